"""Stage `frequency`: the token table, a row for every token id with its count and frequency decile (appendix B)."""

import numpy as np
import pandas as pd

from precompute.store import Tables
from tide.frequency import frequency_deciles
from tide.tokens import Vocabulary


def token_table(vocabulary: Vocabulary, counts: np.ndarray) -> Tables:
    """The token table.

    Args:
        vocabulary: of the model's size V.
        counts: [V] int64, occurrences of every token id in the count corpus.

    Returns:
        `tokens`: columns token_id, text (decoded), shown, special, count, decile (-1 where none), one row a token id.
    """
    table = pd.DataFrame(
        {
            "token_id": np.arange(len(counts), dtype=np.int32),
            "text": vocabulary.texts,
            "shown": vocabulary.shown,
            "special": [i in vocabulary.special_ids for i in range(len(counts))],
            "count": np.asarray(counts, dtype=np.int64),
            "decile": frequency_deciles(counts, vocabulary),
        }
    )
    return {"tokens": table}
