import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from precompute.moments import Moments, moments, sample_deviation

VALUES = st.lists(st.floats(0, 2.0**14, width=32), min_size=2, max_size=60)


@given(VALUES, st.floats(0, 2.0**20, width=32))
def test_float64_sums_keep_the_deviation_of_float32_values(values, offset):
    x = np.float32(offset) + np.array(values, dtype=np.float32)
    x = x.astype(np.float64)
    n = np.array([len(x)])
    mean, deviations = moments(np.array([x.sum()]), np.array([(x**2).sum()]), n)
    np.testing.assert_allclose(mean, x.mean(), rtol=1e-12)
    np.testing.assert_allclose(sample_deviation(deviations, n), x.std(ddof=1), rtol=1e-6, atol=3e-7 * x.max())


@given(VALUES, st.data())
def test_merged_moments_are_those_of_all_values(values, data):
    x = np.array(values)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(x) - 1), max_size=4, unique=True)))
    merged = Moments(3, ())
    for part in np.split(x, cuts):
        one = np.array([len(part)])
        merged.merge(np.array([1]), one, *moments(np.array([part.sum()]), np.array([(part**2).sum()]), one))
    assert merged.n.tolist() == [0, len(x), 0]
    np.testing.assert_allclose(merged.mean[1], x.mean(), rtol=1e-12)
    sd = sample_deviation(merged.deviations, merged.n)
    np.testing.assert_allclose(sd[1], x.std(ddof=1), rtol=1e-6, atol=3e-7 * x.max())
    assert np.isnan(sd[[0, 2]]).all()


def test_one_value_is_its_own_mean_and_has_no_deviation():
    n = np.array([1, 0])
    mean, deviations = moments(np.array([[0.1], [0.0]]), np.array([[0.1**2], [0.0]]), n)
    assert mean[0, 0] == 0.1
    assert np.isnan(mean[1, 0])
    assert np.isnan(sample_deviation(deviations, n)).all()
