"""Bins of positions: by frequency decile and rare, mid, common (appendix B of the paper), and by repetition (ours)."""

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
REPEATS = ("new", "token", "pair")
"""The token to predict is not in the window yet; is, but not behind the token just read; is there behind it."""


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


def repeats_of(windows: np.ndarray) -> np.ndarray:
    """Whether a window has shown the token to predict before.

    Args:
        windows: token ids [N, T].

    Returns:
        [N, T-1] int64, an index into `REPEATS`; column t is for token t+1, of what tokens 0 to t have shown.
    """
    windows = windows.astype(np.int64)
    pairs = windows[:, :-1] * (windows.max(initial=0) + 1) + windows[:, 1:]
    repeats = np.zeros(pairs.shape, dtype=np.int64)
    for row, window, of_pairs in zip(repeats, windows, pairs, strict=True):
        row += _seen_before(window)[1:]
        row += _seen_before(of_pairs)  # a pair that was there brought its second token
    return repeats


def _seen_before(values: np.ndarray) -> np.ndarray:
    """Where a value of a row [T] has occurred before, bool [T]."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse] < np.arange(len(values))
