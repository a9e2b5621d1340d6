"""The bootstrap of whole windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.evaluation import bootstrap
from tide.evaluation.bootstrap import percentile_interval, resampled_sums


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**31))
def test_every_replicate_draws_each_text_as_often_as_it_has_windows(strata, seed):
    of_stratum = np.repeat(np.eye(len(strata)), strata, axis=0)  # column s counts the draws from stratum s
    drawn = resampled_sums(of_stratum, strata, replicates=20, seed=seed)
    assert np.array_equal(drawn, np.tile(strata, (20, 1)))


def test_draws_are_those_of_rows_with_replacement():
    """Against brute force: a row that is drawn twice counts twice."""
    rng = np.random.default_rng(0)
    sums = rng.normal(size=(12, 3))
    draws = resampled_sums(np.eye(12), [5, 7], replicates=50, seed=3)
    assert draws.max() > 1
    np.testing.assert_allclose(resampled_sums(sums, [5, 7], replicates=50, seed=3), draws @ sums)


def test_draws_depend_on_seed_and_strata_alone(monkeypatch):
    sums = np.random.default_rng(0).normal(size=(30, 2))
    at_once = resampled_sums(sums, [10, 20], replicates=40, seed=1)
    assert np.array_equal(at_once, resampled_sums(sums, [10, 20], replicates=40, seed=1))
    assert not np.array_equal(at_once, resampled_sums(sums, [10, 20], replicates=40, seed=2))
    np.testing.assert_allclose(resampled_sums(np.hstack([sums, sums]), [10, 20], 40, seed=1)[:, 2:], at_once)
    monkeypatch.setattr(bootstrap, "MAX_DRAW_BYTES", 8 * 30 * 7)  # 7 replicates at a time
    np.testing.assert_allclose(resampled_sums(sums, [10, 20], replicates=40, seed=1), at_once)


def test_intervals_leave_out_what_is_unknown():
    replicates = np.stack([np.arange(101.0), np.full(101, np.nan), np.arange(101.0)], axis=1)
    replicates[:50, 2] = np.nan
    low, high = percentile_interval(replicates)
    np.testing.assert_allclose(low, [2.5, np.nan, 51.25])
    np.testing.assert_allclose(high, [97.5, np.nan, 98.75])
    assert percentile_interval(replicates.reshape(101, 3, 1))[0].shape == (3, 1)


def test_the_interval_covers_the_truth_where_positions_of_a_window_are_alike():
    """Windows share half of their variance: 95 % intervals over windows hold, those over positions would not."""
    rng = np.random.default_rng(0)
    covered, covered_by_positions, trials = 0, 0, 300
    for trial in range(trials):
        losses = rng.normal(size=(60, 1)) + rng.normal(size=(60, 30))  # mean 0
        low, high = percentile_interval(resampled_sums(losses.sum(axis=1, keepdims=True), [60], 300, seed=trial))
        covered += low[0] <= 0 <= high[0]
        covered_by_positions += abs(losses.mean()) < 1.96 * losses.std() / losses.size**0.5
    assert covered / trials == pytest.approx(0.95, abs=0.04)
    assert covered_by_positions / trials < 0.6
