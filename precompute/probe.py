"""The probe text: a part of the held-out text on which a changed model is compared with the unchanged one.

The bin of a position is that of the token to predict (appendix B), as in `tide.evaluation.compare`. Intervals, ours,
are of a bootstrap over whole windows within each text (`tide.evaluation.bootstrap`), both models on the same draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd

from precompute.blocks import REPLICATES, SEED
from precompute.text import HeldOutText, domain_names
from tide.cli import UserError
from tide.evaluation.bins import CELLS, NO_BIN, bins_of_cells, cells_of
from tide.evaluation.bootstrap import percentile_interval, resampled_sums
from tide.evaluation.compare import ALL_TEXTS

BATCH_TOKENS = 2048  # most tokens of the probe text at once, where a window alone does not exceed it


def check_names(files: Sequence[Path]) -> None:
    """Checks that no text has the name that all texts together have.

    Raises:
        UserError: when one has.
    """
    if ALL_TEXTS in domain_names(files):
        raise UserError(f"A held-out text is called {ALL_TEXTS!r}, as all together are; rename its file.")


def probe_windows(text: HeldOutText, tokens: int) -> np.ndarray:
    """The windows of the probe text that have something to predict: numbers of windows [W], ascending.

    Args:
        text: the held-out text.
        tokens: about how many, as `HeldOutText.probe`.

    Raises:
        UserError: where there is none.
    """
    windows = np.array(text.probe(tokens), dtype=np.int64)
    windows = windows[text.window_lengths[windows] > 1]
    if not len(windows):
        raise UserError("The held-out text has no two tokens in a row to measure a loss on; give a longer --text.")
    return windows


@dataclass(frozen=True)
class CellSums:
    """Sums over the positions of each window and frequency cell, of several models; the first is the unchanged one.

    Attributes:
        n: [W, C] int64, positions; a cell is a row of `bins_of_cells`: none, then the ten deciles.
        loss: [M, W, C] float64, sum of the losses.
        squares: [M, W, C] float64, sum of the squared differences from the unchanged model.
    """

    n: np.ndarray
    loss: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, losses: np.ndarray, input_ids: np.ndarray, deciles: np.ndarray) -> Self:
        """The sums of some windows of one length.

        Args:
            losses: [M, W, T-1] nats, the unchanged model's first.
            input_ids: [W, T].
            deciles: [V], frequency decile of every token id, -1 for none.
        """
        windows, num_cells = len(input_ids), len(CELLS)
        places = np.arange(windows)[:, None] * num_cells + cells_of(input_ids[:, 1:], deciles)
        losses = losses.astype(np.float64)

        def by_cell(values: np.ndarray) -> np.ndarray:
            return np.bincount(places.ravel(), values.ravel(), windows * num_cells).reshape(windows, num_cells)

        n = by_cell(np.ones(places.shape)).astype(np.int64)
        squares = np.square(losses - losses[0])
        return cls(n, np.stack([by_cell(v) for v in losses]), np.stack([by_cell(v) for v in squares]))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The windows of all parts, in order."""
        axes = {"n": 0, "loss": 1, "squares": 1}
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts], axis) for name, axis in axes.items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The attributes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def difference_table(
    sums: CellSums, window_domains: np.ndarray, domains: Sequence[str], replicates: int = REPLICATES, seed: int = SEED
) -> pd.DataFrame:
    """Losses of every model, and what sets them apart from the unchanged one's on the same positions.

    Args:
        sums: of M models over W windows.
        window_domains: [W], number of the text that each window is of, ascending.
        domains: what the texts are called.
        replicates: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        One row a (model, text, bin): model (its number, 0 is the unchanged one), text (one of `domains`, or "all", all
        of them together), bin_kind and bin (("all", "all"), ("group", "rare"), ("group", "mid"), ("group", "common"),
        ("decile", "none")), n positions and n_windows windows of the bin, loss (mean, nats), difference (mean of
        changed - unchanged, nats), sd of the difference over positions (sample standard deviation, NaN for n < 2),
        low and high end of its 95 % interval (NaN where the bin lies in one window), perplexity, and
        perplexity_change_percent, 100 (exp(difference) - 1). Bins without positions have no row.
    """
    keys, unions = bins_of_cells(by_frequency=True)
    kept = [i for i, (kind, name) in enumerate(keys) if kind != "decile" or name == NO_BIN]
    keys, unions = [keys[i] for i in kept], unions[:, kept]
    n, loss, squares = sums.n @ unions, sums.loss @ unions, sums.squares @ unions  # (W, bins); (M, W, bins) twice
    own = {domain: window_domains == number for number, domain in enumerate(domains) if number in window_domains}
    texts = {**own, ALL_TEXTS: np.ones(len(window_domains), dtype=bool)}
    tables = [
        _text_table(n[inside], loss[:, inside], squares[:, inside], window_domains[inside], keys, replicates, seed)
        for inside in texts.values()
    ]
    table = pd.concat([part.assign(text=text) for part, text in zip(tables, texts, strict=True)], ignore_index=True)
    front = ["model", "text", "bin_kind", "bin"]
    table = table[[*front, *table.columns.difference(front, sort=False)]]
    return table[table["n"] > 0].sort_values("model", kind="stable", ignore_index=True)


def _text_table(
    n: np.ndarray,
    loss: np.ndarray,
    squares: np.ndarray,
    window_domains: np.ndarray,
    keys: list[tuple[str, str]],
    replicates: int,
    seed: int,
) -> pd.DataFrame:
    """The rows of one text, those of empty bins included: M times as many as there are `keys`."""
    models, windows, bins = loss.shape
    apart = loss - loss[:1]
    columns = np.concatenate([n[None], apart]).swapaxes(0, 1).reshape(windows, -1)  # (W, (1 + M) * bins)
    strata = np.unique(window_domains, return_counts=True)[1].tolist()
    drawn = resampled_sums(columns, strata, replicates, seed).reshape(-1, 1 + models, bins)
    count, n_windows = n.sum(axis=0), (n > 0).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 where a bin is empty, or was not drawn
        low, high = percentile_interval(drawn[:, 1:] / drawn[:, :1])
        mean, difference = loss.sum(axis=1) / count, apart.sum(axis=1) / count  # (M, bins)
        variance = (squares.sum(axis=1) - count * np.square(difference)).clip(min=0) / (count - 1)
    sd = np.sqrt(np.where(count > 1, variance, np.nan))
    low, high = (np.where(n_windows > 1, end, np.nan) for end in (low, high))  # one window says nothing of its spread
    with np.errstate(over="ignore"):  # a model that predicts nothing at all has an infinite perplexity
        perplexity, change = np.exp(mean), 100 * np.expm1(difference)
    return pd.DataFrame(
        {
            "model": np.repeat(np.arange(models), bins),
            "bin_kind": [kind for kind, _ in keys] * models,
            "bin": [name for _, name in keys] * models,
            "n": np.tile(count.astype(np.int64), models),
            "n_windows": np.tile(n_windows, models),
            "loss": mean.ravel(),
            "difference": difference.ravel(),
            "sd": sd.ravel(),
            "low": low.ravel(),
            "high": high.ravel(),
            "perplexity": perplexity.ravel(),
            "perplexity_change_percent": change.ravel(),
        }
    )
