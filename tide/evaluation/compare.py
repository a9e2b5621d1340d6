"""Tables of losses by text, frequency and repetition, and of the paired difference between a base model and others.

Figures 5 and 7 of the paper do not say whether theirs are means over positions or over token types: both are here.

- "position": every position of the bin weighs the same, so that a token weighs as often as it occurs.
- "type": every token id that occurs in the bin weighs the same, which is to say a position of token v weighs 1/n_v,
  n_v being the number of times v occurs in the text.

Both are then a ratio of sums over windows, and both are resampled alike. The weights of "type" stay those of the whole
text in every replicate. To count types anew in each would lose those types that the draw missed, which are the rare
ones and so the dear ones: the replicates would lie beside the estimate, not around it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from tide.evaluation.bins import REPEATS, WHOLE, bins_of_cells, cells_of, repeats_of
from tide.evaluation.bootstrap import percentile_interval, resampled_sums

ALL_TEXTS = "all"
AVERAGINGS = ("position", "type")


def loss_tables(
    losses: Mapping[str, Mapping[str, np.ndarray]],
    windows: Mapping[str, np.ndarray],
    deciles: np.ndarray | None,
    base: str | None = None,
    replicates: int = 1000,
    seed: int = 0,
    by_repetition: bool = False,
) -> dict[str, pd.DataFrame]:
    """Means with their intervals, of every model, text and bin, and of what sets the models apart.

    The bin of a position is that of the token to predict (appendix B).

    Args:
        losses: [N, T-1] nats by model and text, from `token_losses`.
        windows: token ids [N, T] by text.
        deciles: [V], the frequency decile of every token id, -1 where it has none (`tide.frequency`); None leaves
            the rows by frequency out.
        base: which model the others are compared with; None compares none.
        replicates: R of the bootstrap.
        seed: of the bootstrap.
        by_repetition: also divide every bin by whether the window has shown the token to predict before. What was shown
            can be copied, what was not must be known, and a model may gain in one and lose in the other. Ours.

    Returns:
        "losses", a row a (text, averaging, model, bin): n positions, n_types token ids and n_windows windows of the
        bin, mean (nats), low and high end of its 95 % interval; for a whole text averaged by position, perplexity
        and its interval too.
        "differences", where there is a base and another model: the same for the mean of base - model on the same
        positions and draws, and `better`, "model" or "base", "unclear" where the interval holds 0 or is unknown.
        The text "all" is all texts together. Bins without positions have no row. A bin that lies in one window only
        has no interval (NaN). By repetition: "repeats" and "repeat_differences", the same columns but for perplexities
        and with `repeat`, one of `tide.evaluation.bins.REPEATS`; averaged by position alone.
    """
    keys, unions = bins_of_cells(deciles is not None)
    bins = pd.DataFrame(keys, columns=["bin_kind", "bin"])
    binning = _Binning(bins, unions, lambda ids: cells_of(ids[:, 1:], deciles))
    means, apart = _tables(losses, windows, base, replicates, seed, binning, AVERAGINGS)
    tables = {"losses": _with_perplexity(means), "differences": apart}
    if by_repetition:
        split = _Binning(
            bins.merge(pd.DataFrame({"repeat": REPEATS}), how="cross"),
            np.kron(unions, np.eye(len(REPEATS))),
            lambda ids: binning.cells(ids) * len(REPEATS) + repeats_of(ids),
        )
        of_repeats = _tables(losses, windows, base, replicates, seed, split, ["position"])
        tables |= dict(zip(("repeats", "repeat_differences"), of_repeats, strict=True))
    return {name: table for name, table in tables.items() if len(table)}


class _Binning(NamedTuple):
    """How positions are divided into bins.

    Attributes:
        bins: the columns that name a bin.
        unions: which cells a bin is made of, [cells, bins] of 0 and 1.
        cells: the cell of every predicted position, [N, T-1], of windows [N, T].
    """

    bins: pd.DataFrame
    unions: np.ndarray
    cells: Callable[[np.ndarray], np.ndarray]


def _tables(
    losses: Mapping[str, Mapping[str, np.ndarray]],
    windows: Mapping[str, np.ndarray],
    base: str | None,
    replicates: int,
    seed: int,
    binning: _Binning,
    averagings: Sequence[str],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Losses and differences (empty where nothing is compared) of every text and of all together, as `loss_tables`."""
    members = {text: [text] for text in windows} | {ALL_TEXTS: list(windows)}
    cells = {text: binning.cells(ids) for text, ids in windows.items()}
    means_of, apart = [], []
    for text, names in members.items():
        targets = np.concatenate([windows[name][:, 1:] for name in names])
        here = np.concatenate([cells[name] for name in names])
        stacked = np.stack([np.concatenate([of[name] for name in names]) for of in losses.values()])
        strata = [len(windows[name]) for name in names]
        for averaging in averagings:
            bins, means, drawn = _means(targets, here, stacked, strata, binning, averaging, replicates, seed)
            bins = bins.assign(text=text, averaging=averaging)
            for m, model in enumerate(losses):
                means_of.append(_rows(bins.assign(model=model), means[m], drawn[:, m]))
                if base is not None and model != base:
                    b = list(losses).index(base)
                    rows = _rows(bins.assign(model=model, base=base), means[b] - means[m], drawn[:, b] - drawn[:, m])
                    better = np.select([rows["low"] > 0, rows["high"] < 0], ["model", "base"], "unclear")
                    apart.append(rows.assign(better=better))
    return _ordered(means_of), _ordered(apart) if apart else pd.DataFrame()


def _means(
    targets: np.ndarray,
    cells: np.ndarray,
    losses: np.ndarray,
    strata: list[int],
    binning: _Binning,
    averaging: str,
    replicates: int,
    seed: int,
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """The bins of one text, the means of every model in them [M, bins], and their replicates [R, M, bins].

    Args:
        targets: token ids [N, T-1].
        cells: of every position [N, T-1].
        losses: [M, N, T-1].
        strata: windows of each text that was put together.
        binning: bins, of cells.
        averaging: one of `AVERAGINGS`.
        replicates: R.
        seed: of the draws.
    """
    unions = binning.unions
    num_windows, num_cells = len(targets), len(unions)
    occurrences = np.bincount(targets.ravel())
    weights = 1 / occurrences[targets] if averaging == "type" else np.ones(targets.shape)

    # What every window adds to the sum of weights and to each model's weighted sum of losses, bin by bin.
    places = (np.arange(num_windows)[:, None] * num_cells + cells).ravel()

    def by_window(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values.ravel(), num_windows * num_cells).reshape(num_windows, num_cells) @ unions

    sums = np.stack([by_window(weights), *(by_window(weights * of_model) for of_model in losses)], axis=1)
    n = by_window(np.ones(targets.shape))  # (N, bins)
    cells_of_types = np.unique(cells.ravel() * len(occurrences) + targets.ravel()) // len(occurrences)
    n_types = np.bincount(cells_of_types, minlength=num_cells) @ unions
    drawn = resampled_sums(sums.reshape(num_windows, -1), strata, replicates, seed).reshape(-1, *sums.shape[1:])

    bins = binning.bins.copy()
    bins["n"], bins["n_types"] = n.sum(axis=0).astype(int), n_types.astype(int)
    bins["n_windows"] = (n > 0).sum(axis=0)
    total = sums.sum(axis=0)
    with np.errstate(invalid="ignore"):  # 0 / 0 where a bin is empty, or was not drawn
        return bins, total[1:] / total[0], drawn[:, 1:] / drawn[:, :1]


def _rows(bins: pd.DataFrame, mean: np.ndarray, drawn: np.ndarray) -> pd.DataFrame:
    """Mean and interval beside the bins that have positions; drawing from one window says nothing of its spread."""
    low, high = percentile_interval(drawn)
    rows = bins.assign(mean=mean, low=low, high=high)
    rows.loc[rows["n_windows"] < 2, ["low", "high"]] = np.nan
    return rows[rows["n"] > 0]


def _with_perplexity(rows: pd.DataFrame) -> pd.DataFrame:
    """Perplexity where it means something: of a whole text, averaged by position."""
    whole = (rows["bin_kind"] == WHOLE) & (rows["averaging"] == "position")
    names = {"mean": "perplexity", "low": "perplexity_low", "high": "perplexity_high"}
    return rows.assign(**{new: np.exp(rows[old]).where(whole) for old, new in names.items()})


def _ordered(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """One table, its keys in front."""
    table = pd.concat(frames, ignore_index=True)
    keys = [k for k in ("model", "base", "text", "bin_kind", "bin", "repeat", "averaging") if k in table]
    return table[[*keys, *table.columns.difference(keys, sort=False)]]
