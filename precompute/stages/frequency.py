"""Stage `frequency`: the token table, a row for every token id with its count and frequency decile (appendix B)."""

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.text import check_text_files
from tide.checkpoint import COUNTS_FILE, token_counts
from tide.cli import UserError
from tide.frequency import count_tokens, frequency_deciles
from tide.tokens import Vocabulary
from tide.training.corpus import read_documents
from tide.training.sources import DataSource


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


class Frequency(Stage):
    """Counts of `--count-text` where it is given; else those that the checkpoint holds; else of the held-out text."""

    name = "frequency"

    def check(self, context: Context) -> None:
        """The counts or the text must be there.

        Raises:
            UserError: one sentence.
        """
        if self._sources(context):
            return
        stored = token_counts(context.job.checkpoint)
        if stored is None:
            if not context.job.text:
                raise UserError("There is no text to count; give --count-text or --text.")
            check_text_files(context.job.text, "--text")
        elif len(stored[0]) != context.config.vocab_size:
            raise UserError(
                f"{context.job.checkpoint / COUNTS_FILE} has {len(stored[0]):,} counts, the model "
                f"{context.config.vocab_size:,} token ids; remove the file or put the right one there."
            )

    def inputs(self, context: Context) -> dict[str, Any]:
        """The tokenizer and what is counted."""
        return {"tokenizer": context.tokenizer_fingerprint, **self.parameters(context)}

    def parameters(self, context: Context) -> dict[str, Any]:
        """The corpus by name, and where its counts come from."""
        if sources := self._sources(context):
            return {
                "count_corpus": ", ".join(source.title for source in sources),
                "count_source": {"fingerprint": [source.identity() for source in sources]},
            }
        stored = token_counts(context.job.checkpoint)
        if stored is not None:
            digest = hashlib.sha256(stored[0].tobytes()).hexdigest()[:32]
            return {"count_corpus": stored[1], "count_source": {"file": COUNTS_FILE, "fingerprint": digest}}
        text = context.text_entry
        return {"count_corpus": ", ".join(entry["name"] for entry in text["files"]), "count_source": text}

    def measure(self, context: Context, piece: str) -> Tables:
        """`token_table`."""
        return token_table(context.vocabulary, self._counts(context))

    def _sources(self, context: Context) -> Sequence[DataSource]:
        try:
            return [DataSource.parse(name) for name in context.job.count_text]
        except UserError as error:  # it speaks of the option of tide-train
            raise UserError(str(error).replace("--data", "--count-text")) from error

    def _counts(self, context: Context) -> np.ndarray:
        vocab_size, shows = context.config.vocab_size, context.shows_progress
        stored = token_counts(context.job.checkpoint)
        if sources := self._sources(context):
            documents = chain.from_iterable(source.documents() for source in sources)
        elif stored is not None:
            return stored[0]
        else:
            documents = chain.from_iterable(read_documents(file) for file in context.job.text)
        return count_tokens(documents, context.tokenizer, vocab_size, shows)
