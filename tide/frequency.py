"""Frequency deciles of a vocabulary (appendix B of the paper), the groups made of them, and counting tokens."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tide.tokens import Vocabulary

NUM_DECILES = 10
NO_DECILE = -1

GROUPS: dict[str, tuple[int, ...]] = {"rare": (0, 1, 2), "mid": (3, 4, 5, 6), "common": (7, 8, 9)}
"""The paper's three groups of deciles (appendix B)."""


def frequency_deciles(
    counts: np.ndarray, texts: "Sequence[str] | Vocabulary", special_ids: Iterable[int] | None = None
) -> np.ndarray:
    """Puts every observed token type into one of ten bins of equal type count (appendix B).

    Left out are special tokens, types whose text holds no letter or digit (blank ones among them), and types that
    were never seen. The rest is sorted by count, ascending; the type of rank r among n goes to bin 10 r // n.
    Ours, not stated in the paper: types of equal count are ordered by token id, a letter or digit is one in
    Unicode's sense, and bytes that are no whole character are neither.

    Args:
        counts: [V] integer, occurrences of every token id.
        texts: the decoded text of every token id, or a `Vocabulary`; ids beyond its end have no text.
        special_ids: token ids to leave out; by default those of the `Vocabulary`, and none for plain strings.

    Returns:
        [V] int8: 0 (rarest) to 9 (most common), -1 where a token has none.
    """
    counts = np.asarray(counts)
    if not isinstance(texts, Sequence):
        special_ids = texts.special_ids if special_ids is None else special_ids
        texts = texts.texts
    eligible = np.zeros(len(counts), dtype=bool)
    size = min(len(counts), len(texts))
    eligible[:size] = [any(map(str.isalnum, text)) for text in texts[:size]]
    eligible[[i for i in special_ids or () if i < len(counts)]] = False

    observed = np.flatnonzero(eligible & (counts > 0))
    ascending = observed[np.argsort(counts[observed], kind="stable")]  # stable: ties stay in the order of ids
    deciles = np.full(len(counts), NO_DECILE, dtype=np.int8)
    deciles[ascending] = np.arange(len(ascending)) * NUM_DECILES // max(len(ascending), 1)
    return deciles


def count_tokens(
    documents: Iterable[str],
    tokenizer: "PreTrainedTokenizerFast",
    vocab_size: int | None = None,
    show_progress: bool = True,
) -> np.ndarray:
    """How often each token id occurs in some documents, which are read as a stream and never held whole.

    Args:
        documents: their texts.
        tokenizer: a fast tokenizer; the special tokens that it adds to each document are counted too.
        vocab_size: V, where the model has room for more ids than the tokenizer has; by default the tokenizer's.
        show_progress: draw a progress bar.

    Returns:
        [V] int64.
    """
    # Imported here: they load torch, which those who only want the groups and deciles do not need.
    from tqdm import tqdm

    from tide.training.data import encode_documents

    counts = np.zeros(vocab_size or len(tokenizer), dtype=np.int64)
    with tqdm(desc="count tokens", unit=" tokens", unit_scale=True, disable=not show_progress) as bar:
        for ids in encode_documents(iter(documents), tokenizer):
            counts += np.bincount(ids, minlength=len(counts))
            bar.update(len(ids))
    return counts
