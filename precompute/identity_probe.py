"""A linear probe of identity: can it be read off a hidden state which word it stands at? Ours.

A probe learns from some templates and is tested on others. It is Fisher's linear discriminant: the words' means over
the training templates, and one covariance within words, common to all words of a category and shrunk towards a
multiple of the identity by the rule of Ledoit & Wolf (2004), which needs no setting. A word has few templates (five,
where half of ten are trained on) in many dimensions, too few for a covariance of its own; the deviations of all words
together are many.

To tell two words apart turns out to be easy in every layer, so that accuracy says little. What does not come to an
end at 1 is d', how far apart the two words' scores lie in units of the spread that the sentence brings.
"""

import numpy as np

REPEATS = 3  # random halvings of the templates; each half is trained on once
SEED = 0
TIE = 1e-9  # of the largest score: scores closer than that differ by rounding alone


def half_splits(templates: int, repeats: int = REPEATS, seed: int = SEED) -> list[tuple[np.ndarray, np.ndarray]]:
    """Halves of the templates to train and to test on.

    Args:
        templates: how many there are; of an odd number the first half is the smaller one.
        repeats: random halvings.
        seed: of the random numbers.

    Returns:
        2 * repeats pairs of template numbers, to train on and to test on; none for fewer than two templates. Every
        template is tested on `repeats` times.
    """
    if templates < 2:
        return []
    rng, splits = np.random.default_rng(seed), []
    for _ in range(repeats):
        order = rng.permutation(templates)
        first, second = order[: templates // 2], order[templates // 2 :]
        splits += [(first, second), (second, first)]
    return splits


def probe_scores(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The linear discriminant scores of every word for every tested state.

    Dimensions are scaled to mean 0 and standard deviation 1 over the training states, so that a few large ones do not
    set the scale of the shrinkage.

    Args:
        train: [W, n, d] float64, states of each word to train on.
        test: [W, m, d] float64, states to score.

    Returns:
        [W, m, W] float64; the largest along the last axis is the word that the state is taken for, and of two words
        the one with the larger score.
    """
    from sklearn.covariance import ledoit_wolf

    varies = (train - train.mean(axis=1, keepdims=True)).any()  # asked before scaling, which brings rounding
    center, scale = train.mean(axis=(0, 1)), train.std(axis=(0, 1))
    scale = np.where(scale > 0, scale, 1)
    train, test = (train - center) / scale, (test - center) / scale
    means = train.mean(axis=1)
    if varies:
        within = (train - means[:, None]).reshape(-1, train.shape[-1])
        covariance, _ = ledoit_wolf(within, assume_centered=True)
        weights = np.linalg.solve(covariance, means.T)
    else:  # one template, or the embedding, which is the same in every sentence
        weights = means.T
    return test @ weights - (means * weights.T).sum(axis=1) / 2


def pair_accuracy(scores: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """How many tested states of two words are taken for the right one of the two.

    Args:
        scores: [W, m, W], from `probe_scores`.
        pairs: [P, 2], numbers of the words.

    Returns:
        [P] float64, 0 to 1, chance 0.5; a tie counts as half.
    """
    margins, tie = _margins(scores, pairs), TIE * np.abs(scores).max()
    return np.where(np.abs(margins) <= tie, 0.5, margins > 0).mean(axis=(1, 2))


def identity_accuracy(scores: np.ndarray) -> np.ndarray:
    """How many tested states of a word are taken for it among all words.

    Args:
        scores: [W, m, W], from `probe_scores`.

    Returns:
        [W] float64, 0 to 1, chance 1 / W; of k words that tie, each counts 1 / k.
    """
    best = scores >= scores.max(axis=-1, keepdims=True) - TIE * np.abs(scores).max()
    own = np.arange(len(scores))
    return (best[own, :, own] / best.sum(axis=-1)).mean(axis=1)


def d_prime(scores: np.ndarray, test: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The distance between the scores of two words, in units of their spread over sentences.

    The score is the difference of both words' discriminants. d' is the difference of its two means over its pooled
    standard deviation within words, corrected for the few sentences (Hedges 1981): 0 where the words cannot be told
    apart, 1 at 69 % correct, 3 at 93 %, for normal scores.

    Args:
        scores: [W, m, W], from `probe_scores`.
        test: [W, m, d], the tested states.
        pairs: [P, 2], numbers of the words.

    Returns:
        [P] float64; NaN for fewer than two tested sentences a word, and where the states do not vary over them.
    """
    sentences = test.shape[1]
    varies = (test != test[:, :1]).any(axis=(1, 2))[pairs].any(axis=1)
    if sentences < 2 or not varies.any():
        return np.full(len(pairs), np.nan)
    margins = _margins(scores, pairs)
    spread = np.sqrt(margins.var(axis=2, ddof=1).mean(axis=1))
    distance = margins.mean(axis=2).sum(axis=1)
    correction = 1 - 3 / (4 * 2 * (sentences - 1) - 1)
    return np.divide(correction * distance, spread, out=np.full(len(pairs), np.nan), where=varies & (spread > 0))


def _margins(scores: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """[P, 2, m]: by how much each state of the two words scores higher for its own word than for the other."""
    a, b = pairs.T
    return np.stack([scores[a, :, a] - scores[a, :, b], scores[b, :, b] - scores[b, :, a]], axis=1)


def probe_words(states: np.ndarray, pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Trains and tests the probe on halves of the templates.

    Args:
        states: [W, T, d], the hidden state of one layer at every word of a category in every template.
        pairs: [P, 2], numbers of the words of each pair.

    Returns:
        pair_accuracy, d_prime and identity_accuracy (mean of both words), each [P] float64: means over the tested
        halves. d' is a mean over the halves that have one; all are NaN for fewer than two templates.
    """
    states = states.astype(np.float64)
    found: dict[str, list[np.ndarray]] = {"pair_accuracy": [], "d_prime": [], "identity_accuracy": []}
    for train, test in half_splits(states.shape[1]):
        scores = probe_scores(states[:, train], states[:, test])
        found["pair_accuracy"].append(pair_accuracy(scores, pairs))
        found["d_prime"].append(d_prime(scores, states[:, test], pairs))
        found["identity_accuracy"].append(identity_accuracy(scores)[pairs].mean(axis=1))
    return {name: _mean(values, len(pairs)) for name, values in found.items()}


def _mean(values: list[np.ndarray], length: int) -> np.ndarray:
    stacked = np.array(values).reshape(-1, length)
    defined = ~np.isnan(stacked)
    count = defined.sum(axis=0)
    return np.divide(np.where(defined, stacked, 0).sum(axis=0), count, out=np.full(length, np.nan), where=count > 0)
