"""Means and deviations of groups of values, from sums, and of parts put together; all in float64."""

import numpy as np


def moments(total: np.ndarray, squares: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means, and sums of squared deviations from them.

    Of float32 values this is sound: float64 has 29 more bits, so that a deviation is right to about a millionth of a
    percent of the largest value, times the root of n, even where it is the difference of two large sums.

    Args:
        total: [G, ...] float64, sums of n values.
        squares: [G, ...] float64, sums of their squares.
        n: [G].

    Returns:
        Both [G, ...] float64; NaN where n is 0.
    """
    count = beside(n, total)
    with np.errstate(invalid="ignore"):  # a mean over nothing
        mean = total / count
        return mean, np.clip(squares - count * mean**2, 0, None)


def sample_deviation(deviations: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Sample standard deviations from sums of squared deviations [G, ...] of n [G] values; NaN where n < 2."""
    return np.sqrt(deviations / beside(np.where(n < 2, np.nan, n - 1.0), deviations))


def beside(n: np.ndarray, values: np.ndarray) -> np.ndarray:
    """n [G] in float64, shaped to broadcast with values [G, ...]."""
    return n.astype(np.float64).reshape(-1, *[1] * (values.ndim - 1))


class Moments:
    """Moments of groups, into which those of further values are merged (Chan, Golub and LeVeque 1983).

    Attributes:
        n: [G] int64, values so far.
        mean: [G, ...] float64; 0 where n is 0.
        deviations: [G, ...] float64, sums of squared deviations from the mean.
    """

    def __init__(self, groups: int, shape: tuple[int, ...]):
        self.n = np.zeros(groups, dtype=np.int64)
        self.mean = np.zeros((groups, *shape))
        self.deviations = np.zeros((groups, *shape))

    def merge(self, groups: np.ndarray, n: np.ndarray, mean: np.ndarray, deviations: np.ndarray) -> None:
        """Adds the moments of further values of some groups.

        Args:
            groups: [g], no group twice.
            n: [g], at least 1.
            mean: [g, ...].
            deviations: [g, ...].
        """
        before = self.n[groups]
        share = n / (before + n)
        step = mean - self.mean[groups]
        self.mean[groups] += step * beside(share, step)
        self.deviations[groups] += deviations + step**2 * beside(before * share, step)
        self.n[groups] += n
