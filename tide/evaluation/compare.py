"""Tables of losses by text and frequency bin, and of the paired difference between a base model and others.

Figures 5 and 7 of the paper do not say whether theirs are means over positions or over token types: both are here.

- "position": every position of the bin weighs the same, so that a token weighs as often as it occurs.
- "type": every token id that occurs in the bin weighs the same, which is to say a position of token v weighs 1/n_v,
  n_v being the number of times v occurs in the text.

Both are then a ratio of sums over windows, and both are resampled alike. The weights of "type" stay those of the whole
text in every replicate. To count types anew in each would lose those types that the draw missed, which are the rare
ones and so the dear ones: the replicates would lie beside the estimate, not around it.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from tide.evaluation.bins import WHOLE, bins_of_cells, cells_of
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

    Returns:
        "losses", a row a (text, averaging, model, bin): n positions, n_types token ids and n_windows windows of the
        bin, mean (nats), low and high end of its 95 % interval; for a whole text averaged by position, perplexity
        and its interval too.
        "differences", where there is a base and another model: the same for the mean of base - model on the same
        positions and draws, and `better`, "model" or "base", "unclear" where the interval holds 0 or is unknown.
        The text "all" is all texts together. Bins without positions have no row. A bin that lies in one window only
        has no interval (NaN).
    """
    members = {text: [text] for text in windows} | {ALL_TEXTS: list(windows)}
    parts: dict[str, list[pd.DataFrame]] = {"losses": [], "differences": []}
    for text, names in members.items():
        targets = np.concatenate([windows[name][:, 1:] for name in names])
        stacked = np.stack([np.concatenate([of[name] for name in names]) for of in losses.values()])
        strata = [len(windows[name]) for name in names]
        for averaging in AVERAGINGS:
            bins, means, drawn = _means(targets, stacked, strata, deciles, averaging, replicates, seed)
            bins = bins.assign(text=text, averaging=averaging)
            for m, model in enumerate(losses):
                rows = _rows(bins.assign(model=model), means[m], drawn[:, m])
                parts["losses"].append(_with_perplexity(rows))
                if base is not None and model != base:
                    b = list(losses).index(base)
                    rows = _rows(bins.assign(model=model, base=base), means[b] - means[m], drawn[:, b] - drawn[:, m])
                    better = np.select([rows["low"] > 0, rows["high"] < 0], ["model", "base"], "unclear")
                    parts["differences"].append(rows.assign(better=better))
    return {name: _ordered(frames) for name, frames in parts.items() if frames}


def _means(
    targets: np.ndarray,
    losses: np.ndarray,
    strata: list[int],
    deciles: np.ndarray | None,
    averaging: str,
    replicates: int,
    seed: int,
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """The bins of one text, the means of every model in them [M, bins], and their replicates [R, M, bins].

    Args:
        targets: token ids [N, T-1].
        losses: [M, N, T-1].
        strata: windows of each text that was put together.
        deciles: as in `loss_tables`.
        averaging: one of `AVERAGINGS`.
        replicates: R.
        seed: of the draws.
    """
    keys, unions = bins_of_cells(deciles is not None)
    num_windows, num_cells = len(targets), len(unions)
    cells = cells_of(targets, deciles)
    occurrences = np.bincount(targets.ravel())
    weights = 1 / occurrences[targets] if averaging == "type" else np.ones(targets.shape)

    # What every window adds to the sum of weights and to each model's weighted sum of losses, bin by bin.
    places = (np.arange(num_windows)[:, None] * num_cells + cells).ravel()

    def by_window(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values.ravel(), num_windows * num_cells).reshape(num_windows, num_cells) @ unions

    sums = np.stack([by_window(weights), *(by_window(weights * of_model) for of_model in losses)], axis=1)
    n = by_window(np.ones(targets.shape))  # (N, bins)
    seen = np.flatnonzero(occurrences)
    n_types = np.bincount(cells_of(seen, deciles), minlength=num_cells) @ unions
    drawn = resampled_sums(sums.reshape(num_windows, -1), strata, replicates, seed).reshape(-1, *sums.shape[1:])

    bins = pd.DataFrame(keys, columns=["bin_kind", "bin"])
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
    keys = [k for k in ("model", "base", "text", "bin_kind", "bin", "averaging") if k in table]
    return table[[*keys, *table.columns.difference(keys, sort=False)]]
