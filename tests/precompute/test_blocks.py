import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.blocks import Blocks, block_intervals


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(1, 40))
def test_blocks_are_runs_of_windows_of_one_text(windows, most):
    domains = np.repeat(np.arange(len(windows)), windows)
    blocks = Blocks.of(domains, most)
    assert set(np.diff(blocks.of_window)) <= {0, 1}
    assert blocks.of_window[0] == 0
    assert blocks.of_window[-1] == len(blocks) - 1
    assert (blocks.domains[blocks.of_window] == domains).all()
    assert len(blocks) < most + np.count_nonzero(windows)
    for domain in np.unique(domains):
        sizes = np.unique(blocks.of_window[domains == domain], return_counts=True)[1]
        assert sizes.max() - sizes.min() <= 1


def test_of_a_short_text_every_window_is_a_block():
    assert Blocks.of(np.array([0, 0, 1]), most=3).of_window.tolist() == [0, 1, 2]


def test_the_interval_is_that_of_windows_not_of_positions():
    rng = np.random.default_rng(0)
    level = rng.normal(size=(400, 1))  # all positions of a window share it
    values = level + 0.1 * rng.normal(size=(400, 50))
    low, high = block_intervals(values.sum(axis=1)[:, None, None], np.full((400, 1), 50), np.zeros(400))
    assert low < values.mean() < high
    by_window = values.mean(axis=1).std(ddof=1) / np.sqrt(400)
    assert (high - low).item() == pytest.approx(2 * 1.96 * by_window, rel=0.1)


def test_every_text_keeps_its_share():
    values = np.array([0.0, 0.0, 0.0, 5.0, 5.0, 5.0])  # what differs between texts is no uncertainty
    low, high = block_intervals(values[:, None, None], np.ones((6, 1)), np.array([0, 0, 0, 1, 1, 1]))
    assert low == high == 2.5


def test_there_is_no_interval_where_nothing_can_vary():
    n = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1], [1, 0, 1, 1, 0], [1, 0, 1, 0, 0]])
    total = np.random.default_rng(0).normal(size=(4, 5, 2)) * (n > 0)[..., None]
    low, high = block_intervals(total, n, np.array([0, 0, 1, 2]))
    # all blocks; one block; two texts of one block each; a block of two and a text; both blocks of a text
    assert np.isfinite(low).all(axis=1).tolist() == [True, False, False, True, True]
    assert (np.isnan(low) == np.isnan(high)).all()
    assert (low[[0, 3, 4]] <= high[[0, 3, 4]]).all()
    assert np.isnan(block_intervals(total[:1], n[:1], np.array([0]))).all()
    assert np.isnan(block_intervals(total[:0], n[:0], np.array([]))).all()
