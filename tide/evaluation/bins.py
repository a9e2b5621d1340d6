"""Bins of token ids: frequency deciles and rare, mid, common (appendix B of the paper)."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import token_counts
from tide.frequency import GROUPS, NO_DECILE, NUM_DECILES, frequency_deciles
from tide.tokens import Vocabulary

WHOLE = "all"
NO_BIN = "none"
CELLS = (NO_DECILE, *range(NUM_DECILES))
"""The finest division, which every bin is a union of: the ten deciles, and what has none."""


def deciles_of(checkpoint: Path, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> tuple[np.ndarray, str] | None:
    """The frequency deciles by the counts that a checkpoint carries.

    Args:
        checkpoint: its folder.
        tokenizer: its tokenizer.
        vocab_size: V of the model.

    Returns:
        [V] int8, -1 where a token has none, and what was counted; None where the checkpoint carries no counts.

    Raises:
        UserError: when the file of counts is damaged.
    """
    stored = token_counts(checkpoint)
    if stored is None:
        return None
    counts, corpus = stored
    bins = np.full(vocab_size, NO_DECILE, dtype=np.int8)
    deciles = frequency_deciles(counts, Vocabulary(tokenizer, size=len(counts)))[:vocab_size]
    bins[: len(deciles)] = deciles
    return bins, corpus


def bins_of_cells(by_frequency: bool) -> tuple[list[tuple[str, str]], np.ndarray]:
    """The bins that a table has a row for.

    Args:
        by_frequency: False leaves the whole text alone, one cell.

    Returns:
        (bin kind, bin) of every bin: ("all", "all"), ("decile", "0".."9" or "none"), ("group", "rare"...); and
        which cells each is made of, [cells, bins] float64 of 0 and 1.
    """
    if not by_frequency:
        return [(WHOLE, WHOLE)], np.ones((1, 1))
    members: dict[tuple[str, str], tuple[int, ...]] = {(WHOLE, WHOLE): CELLS}
    members |= {("decile", str(decile)): (decile,) for decile in range(NUM_DECILES)}
    members[("decile", NO_BIN)] = (NO_DECILE,)
    members |= {("group", group): deciles for group, deciles in GROUPS.items()}
    unions = np.array([[cell in deciles for deciles in members.values()] for cell in CELLS], dtype=np.float64)
    return list(members), unions


def cells_of(token_ids: np.ndarray, deciles: np.ndarray | None) -> np.ndarray:
    """The cell of every token id, as an index into the rows of `bins_of_cells`; same shape, int64."""
    if deciles is None:
        return np.zeros_like(token_ids)
    return deciles[token_ids].astype(np.int64) - NO_DECILE
