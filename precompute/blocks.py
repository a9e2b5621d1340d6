"""Blocks of windows, and intervals from a bootstrap over them. Ours: the paper gives no intervals.

Positions of one window share a topic and a context, so that whole windows are drawn, of each held-out text as many as
it has (`tide.evaluation.bootstrap`). Of a long text neighbouring windows are put together, so that what is held per
block stays bounded: about `MAX_BLOCKS` blocks in all.
"""

from dataclasses import dataclass

import numpy as np

from tide.evaluation.bootstrap import percentile_interval, resampled_sums

MAX_BLOCKS = 1_000  # beside at least one a held-out text
REPLICATES = 1_000
SEED = 0


@dataclass(frozen=True)
class Blocks:
    """Which window is in which block.

    Attributes:
        of_window: [W] int64, block of each window; ascending, no block spans two texts.
        domains: [B] int64, number of the held-out text that each block is of.
    """

    of_window: np.ndarray
    domains: np.ndarray

    def __len__(self) -> int:
        """B."""
        return len(self.domains)

    @classmethod
    def of(cls, window_domains: np.ndarray, most: int = MAX_BLOCKS) -> "Blocks":
        """Cuts the windows of each text into blocks of about the same number of windows.

        Args:
            window_domains: [W], number of the text that each window is of, ascending.
            most: blocks in all; a text that has windows has a block, and up to one a text are added by rounding.
        """
        together = max(1, -(-len(window_domains) // most))  # windows a block, rounded up
        of_window: list[np.ndarray] = []
        domains: list[int] = []
        for domain, windows in zip(*np.unique(window_domains, return_counts=True), strict=True):
            blocks = -(-windows // together)
            of_window.append(len(domains) + np.arange(windows) * blocks // windows)
            domains += [domain] * blocks
        return cls(np.concatenate(of_window).astype(np.int64), np.array(domains, dtype=np.int64))


def block_intervals(
    total: np.ndarray, n: np.ndarray, domains: np.ndarray, replicates: int = REPLICATES, seed: int = SEED
) -> tuple[np.ndarray, np.ndarray]:
    """95 % intervals of the means of groups of positions, blocks drawn within their held-out texts.

    Args:
        total: [B, G, ...] float64, sums of some numbers over the positions of each group in each block.
        n: [B, G], those positions.
        domains: [B], as `Blocks.domains`.
        replicates: R.
        seed: of the draws.

    Returns:
        Low and high end of each mean, [G, ...] float64. NaN where nothing varies from draw to draw: a group that one
        block alone holds, or only blocks that are the one block of their text.
    """
    _, text_of, strata = np.unique(domains, return_inverse=True, return_counts=True)
    holds = n > 0  # (B, G)
    varies = (holds.sum(axis=0) > 1) & holds[strata[text_of] > 1].any(axis=0)
    low, high = np.full((2, *total.shape[1:]), np.nan)
    if varies.any():
        sums = np.concatenate([total.reshape(*n.shape, -1), n[..., None]], axis=-1)
        drawn = resampled_sums(sums.reshape(len(n), -1), strata.tolist(), replicates, seed)
        drawn = drawn.reshape(-1, *sums.shape[1:])
        with np.errstate(invalid="ignore"):  # a group that no drawn block holds
            means = drawn[..., :-1] / drawn[..., -1:]
        for end, found in zip((low, high), percentile_interval(means), strict=True):
            end[varies] = found.reshape(end.shape)[varies]
    return low, high
