import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.neighbors import jaccard, nearest, neighbor_tables
from tests.conftest import tiny_model

pytest.importorskip("faiss")


def brute_force(vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, axis=1)


def test_neighbours_in_the_embedding_and_in_every_bank():
    model = tiny_model()
    made = neighbor_tables(model, k=12, show_progress=False)["neighbors"]
    memory = model.model.memory(torch.arange(61)).detach().numpy()  # M_k(v)
    tables = [model.get_input_embeddings().weight.detach().numpy(), *(memory[:, k] for k in range(3))]
    assert made["ids"].shape == (4, 61, 12)
    for row, vectors in enumerate(tables):
        ids, cosines = brute_force(vectors, 12)
        np.testing.assert_array_equal(made["ids"][row], ids)
        np.testing.assert_allclose(made["cosines"][row], cosines, atol=1e-5)


def test_overlap_is_the_jaccard_of_the_ten_nearest():
    made = neighbor_tables(tiny_model(), k=12, show_progress=False)["neighbors"]
    for token_id in range(61):
        own = set(made["ids"][0, token_id, :10].tolist())
        for bank in range(3):
            other = set(made["ids"][1 + bank, token_id, :10].tolist())
            assert made["overlap"][token_id, bank] == pytest.approx(len(own & other) / len(own | other))


def test_no_more_neighbours_than_other_tokens():
    made = neighbor_tables(tiny_model(), show_progress=False)["neighbors"]
    assert made["ids"].shape == (4, 61, 50)
    made = neighbor_tables(tiny_model(vocab_size=20), show_progress=False)["neighbors"]
    assert made["ids"].shape == (4, 20, 19)
    assert (np.sort(made["ids"][0, 5]) == [i for i in range(20) if i != 5]).all()


def test_a_base_model_has_the_embedding_only():
    made = neighbor_tables(tiny_model(num_memory_blocks=0), show_progress=False)["neighbors"]
    assert made["ids"].shape == (1, 61, 50)
    assert made["overlap"].shape == (61, 0)


@settings(max_examples=25)
@given(st.integers(2, 60), st.integers(1, 12), st.integers(0, 10_000))
def test_a_token_is_never_its_own_neighbour_even_among_duplicates(size, distinct, seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(distinct, 6)).astype(np.float32)[rng.integers(distinct, size=size)]
    k = min(10, size - 1)
    ids, cosines = nearest(vectors, k)
    assert not (ids == np.arange(size)[:, None]).any()
    assert all(len(set(row)) == k for row in ids.tolist())
    np.testing.assert_allclose(cosines, brute_force(vectors, k)[1], atol=1e-5)


def test_a_row_of_zeros_is_no_error():
    vectors = np.eye(5, 6, dtype=np.float32)
    vectors[2] = 0
    ids, cosines = nearest(vectors, 4)
    assert (cosines == 0).all()
    assert (np.sort(ids[2]) == [0, 1, 3, 4]).all()


def test_jaccard_by_hand():
    a, b = np.array([[1, 2, 3], [1, 2, 3]]), np.array([[3, 4, 1], [7, 8, 9]])
    assert jaccard(a, b).tolist() == [0.5, 0.0]
