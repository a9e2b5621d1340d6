"""A bootstrap of whole windows.

The losses of one window are not independent: they share a topic and a context. So windows are drawn, not positions;
and where texts are taken together, each text keeps its number of windows (a stratified cluster bootstrap). Ours: the
paper gives no intervals.
"""

from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
MAX_DRAW_BYTES = 64 * 2**20


def resampled_sums(sums: np.ndarray, strata: Sequence[int], replicates: int, seed: int) -> np.ndarray:
    """Totals over windows drawn with replacement, every column with the same draws.

    Args:
        sums: [N, C], what each window adds to each total; windows of one stratum lie together.
        strata: windows in each stratum, N in all; each replicate draws as many from it.
        replicates: R.
        seed: of the draws; they depend on it and on `strata` alone.

    Returns:
        [R, C] float64.
    """
    generators = [np.random.default_rng([seed, stratum]) for stratum in range(len(strata))]
    at_once = max(1, MAX_DRAW_BYTES // (8 * len(sums)))
    parts = []
    for done in range(0, replicates, at_once):
        size = min(at_once, replicates - done)
        draws = [g.multinomial(n, np.full(n, 1 / n), size=size) for g, n in zip(generators, strata, strict=True)]
        parts.append(np.concatenate(draws, axis=1).astype(np.float64) @ sums)
    return np.concatenate(parts)


def percentile_interval(replicates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middle 95 % of the replicates.

    Args:
        replicates: [R, ...]; NaN where a replicate has no value.

    Returns:
        Low and high end, each [...]; NaN where no replicate has a value.
    """
    flat = replicates.reshape(len(replicates), -1)
    ends = np.full((2, flat.shape[1]), np.nan)
    known = ~np.isnan(flat).all(axis=0)
    ends[:, known] = np.nanquantile(flat[:, known], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    low, high = ends.reshape(2, *replicates.shape[1:])
    return low, high
