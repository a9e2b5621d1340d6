import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf

from precompute.identity_probe import (
    d_prime,
    half_splits,
    identity_accuracy,
    pair_accuracy,
    probe_scores,
    probe_words,
)

PAIRS = np.array([[0, 1], [2, 3]])


def states(seed, words=4, templates=8, width=12, apart=1.0, noise=1.0):
    """[W, T, d] float32: what the word brings, what the template brings (alike for all words), and noise."""
    rng = np.random.default_rng(seed)
    word = apart * rng.normal(size=(words, 1, width))
    template = rng.normal(size=(1, templates, width))
    return (word + template + noise * rng.normal(size=(words, templates, width))).astype(np.float32)


@pytest.mark.parametrize("templates", [2, 3, 10])
def test_every_template_is_tested_on_equally_often(templates):
    splits = half_splits(templates, repeats=4)
    assert len(splits) == 8
    for train, test in splits:
        assert sorted([*train, *test]) == list(range(templates))
        assert abs(len(train) - len(test)) <= 1
    assert np.bincount(np.concatenate([test for _, test in splits])).tolist() == [4] * templates
    again = half_splits(templates, repeats=4)
    assert all(
        (a == b).all() for one, other in zip(splits, again, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_one_template_cannot_be_halved():
    assert half_splits(1) == []
    assert all(np.isnan(values).all() for values in probe_words(states(0)[:, :1], PAIRS).values())


def test_scores_are_those_of_a_normal_model_with_one_covariance():
    data = states(1).astype(np.float64)
    train, test = data[:, :5], data[:, 5:]
    flat = train.reshape(-1, 12)
    train, test = (train - flat.mean(0)) / flat.std(0), (test - flat.mean(0)) / flat.std(0)
    means = train.mean(axis=1)
    inverse = np.linalg.inv(ledoit_wolf((train - means[:, None]).reshape(-1, 12), assume_centered=True)[0])
    scores = probe_scores(data[:, :5], data[:, 5:])
    for word in range(4):
        for sentence in range(3):
            x = test[word, sentence]
            log_density = np.array([-(x - mean) @ inverse @ (x - mean) / 2 for mean in means])
            found = scores[word, sentence]
            np.testing.assert_allclose(found - found[0], log_density - log_density[0], rtol=1e-6, atol=1e-8)


@settings(max_examples=10)
@given(st.integers(0, 1000), st.floats(0.01, 100))
def test_shift_and_scale_of_the_dimensions_do_not_matter(seed, factor):
    data = states(seed).astype(np.float64)
    moved = data * np.linspace(1, factor, 12) + factor
    for name, values in probe_words(data, PAIRS).items():
        np.testing.assert_allclose(probe_words(moved, PAIRS)[name], values, rtol=1e-5)


def test_words_far_apart_are_told_apart_and_the_same_word_is_not():
    far = probe_words(states(2, apart=20), PAIRS)
    assert far["pair_accuracy"].tolist() == [1, 1]
    assert far["identity_accuracy"].tolist() == [1, 1]
    assert (far["d_prime"] > 10).all()
    chance = [probe_words(states(seed, apart=0), PAIRS) for seed in range(60)]
    assert np.mean([found["pair_accuracy"] for found in chance]) == pytest.approx(0.5, abs=0.04)
    assert np.mean([found["identity_accuracy"] for found in chance]) == pytest.approx(0.25, abs=0.04)
    assert np.mean([found["d_prime"] for found in chance]) == pytest.approx(0, abs=0.15)


def test_d_prime_is_the_distance_over_the_spread():
    rng = np.random.default_rng(3)
    found = []
    for _ in range(400):
        test = rng.normal(size=(2, 5, 1)) + np.array([[[1.5]], [[-1.5]]])  # d' is 3 along the only dimension
        scores = np.concatenate([test, -test], axis=2)
        found.append(d_prime(scores, test, np.array([[0, 1]]))[0])
    assert np.mean(found) == pytest.approx(3, abs=0.1)  # without the correction it is 3.3
    one = d_prime(scores[:, :1], test[:, :1], np.array([[0, 1]]))
    assert np.isnan(one).all()


def test_states_without_spread_have_accuracies_but_no_d_prime():
    word = np.random.default_rng(4).normal(size=(4, 1, 12)).astype(np.float32)
    word[3] = word[2]  # two words that end in the same token, in the embedding
    found = probe_words(np.repeat(word, 6, axis=1), PAIRS)
    assert found["pair_accuracy"].tolist() == [1, 0.5]
    assert found["identity_accuracy"].tolist() == [1, 0.5]
    assert np.isnan(found["d_prime"]).all()


def test_ties_count_in_part():
    scores = np.zeros((4, 2, 4))
    scores[0, 0, 0] = 1
    assert pair_accuracy(scores, PAIRS).tolist() == [0.625, 0.5]
    assert identity_accuracy(scores).tolist() == [0.625, 0.25, 0.25, 0.25]


def test_more_dimensions_than_states():
    found = probe_words(states(5, templates=4, width=200, apart=3), PAIRS)
    assert found["pair_accuracy"].tolist() == [1, 1]
    assert np.isfinite(found["d_prime"]).all()
