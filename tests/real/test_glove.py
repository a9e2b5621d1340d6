"""The search on all of GloVe 6B 50d. Opt-in, since it downloads 76 MB."""

import os

import numpy as np
import pytest

from precompute.search import build_index, recall, search
from tests.real.glove import KNOWN, KNOWN_DEPTH, make_slice, sliced_word_vectors, tiles, word_vectors

pytestmark = pytest.mark.skipif(os.environ.get("TIDE_REAL") != "1", reason="opt-in: make test-real")


@pytest.fixture(scope="module")
def glove():
    return word_vectors()


@pytest.fixture(scope="module")
def index(glove):
    return build_index(tiles(glove[1]), 400_000)


@pytest.fixture(scope="module")
def row_of(glove) -> dict[str, int]:
    return {word: row for row, word in enumerate(glove[0])}


def test_known_neighbours_are_found_among_400_000_words(glove, index, row_of):
    words, vectors = glove
    asked = np.array([row_of[word] for word in KNOWN])
    ids, cosines = search(index, vectors[asked], KNOWN_DEPTH, own=asked)
    for word, row, values in zip(KNOWN, ids, cosines, strict=True):
        print(word, [(words[i], round(float(c), 3)) for i, c in zip(row, values, strict=True)])
        assert KNOWN[word] <= {words[i] for i in row}, word


def test_the_nearest_of_known_words_by_hand(glove, index, row_of):
    """A plain product of all 400,000 with one, beside the search."""
    words, vectors = glove
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for word in ("frog", "insulin"):
        cosines = unit @ unit[row_of[word]]
        nearest = np.argsort(-cosines)[1 : KNOWN_DEPTH + 1]
        own = np.array([row_of[word]])
        ids, found = search(index, vectors[own], KNOWN_DEPTH, own)
        assert [words[i] for i in ids[0]] == [words[i] for i in nearest]
        np.testing.assert_allclose(found[0], cosines[nearest], atol=1e-5)


def test_king_without_man_with_woman_is_queen(glove, index, row_of):
    words, _ = glove
    king, man, woman = (index.reconstruct(row_of[word]) for word in ("king", "man", "woman"))
    ids, _ = search(index, (king - man + woman)[None], 3)
    assert {"king", "queen"} <= {words[i] for i in ids[0]}


@pytest.mark.parametrize(("kind", "least"), [("fp16", 0.99), ("sq8", 0.9)])
def test_rounded_vectors_find_most_of_the_same_words(glove, index, kind, least):
    _, vectors = glove
    asked = np.linspace(0, 399_999, 500).astype(np.int64)
    exact, _ = search(index, vectors[asked], 10, own=asked)
    rounded, _ = search(build_index(tiles(vectors), 400_000, kind), vectors[asked], 10, own=asked)
    found = recall(rounded, exact)
    print(kind, "recall@10", round(found, 4), "n", len(asked))
    assert least < found <= 1


def test_the_slice_is_the_one_of_these_vectors(glove):
    made, (words, vectors) = make_slice(*glove), sliced_word_vectors()
    assert made["words"].tobytes().decode().split("\n") == words
    np.testing.assert_array_equal(made["vectors"].astype(np.float32), vectors)
