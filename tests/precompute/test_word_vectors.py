"""The search on real word vectors whose neighbours people know: a slice of GloVe (tests/data)."""

import numpy as np
import pytest

from precompute.search import INDEX_KINDS, build_index, open_index, search, write_index
from tests.real.glove import KNOWN, KNOWN_DEPTH, sliced_word_vectors

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def words() -> list[str]:
    return sliced_word_vectors()[0]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return sliced_word_vectors()[1]


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_known_neighbours_are_found(words, vectors, kind, tmp_path):
    write_index(build_index([vectors[:700], vectors[700:]], 2000, kind), tmp_path / "glove.faiss")
    index = open_index(tmp_path / "glove.faiss")
    asked = np.array([words.index(word) for word in KNOWN])
    ids, _ = search(index, vectors[asked], KNOWN_DEPTH, own=asked)
    for word, row in zip(KNOWN, ids, strict=True):
        assert KNOWN[word] <= {words[i] for i in row}, word


def test_king_without_man_with_woman_is_queen(words, vectors):
    index = build_index([vectors], 2000)
    king, man, woman = (index.reconstruct(words.index(word)) for word in ("king", "man", "woman"))
    ids, _ = search(index, (king - man + woman)[None], 3)
    assert "queen" in {words[i] for i in ids[0]}
