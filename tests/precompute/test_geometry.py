from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precompute.stages.geometry as geometry
from precompute import Artifacts
from precompute.pipeline import run
from precompute.stages.geometry import (
    cosine_distances,
    group_sums,
    norm_table,
    principal_cosines,
    rank_row,
    read_vectors,
    spectra,
    subspace_size,
)
from precompute.tables import CheckpointTables
from tests.conftest import tiny_model
from tide.config import TideConfig

RNG = np.random.default_rng(0)
SPIKED = RNG.normal(size=(97, 8)) * np.array([9, 5, 3, 1, 1, 0.5, 0.1, 0.01]) + 20  # a strong common direction


def orthonormal(width, count, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(width, count)))[0]


def test_cosine_distances_are_one_minus_cosines():
    vectors = RNG.normal(size=(5, 3, 8)).astype(np.float32)
    vectors[2, 1] = 0
    found = cosine_distances(vectors)
    for token in range(5):
        for a in range(3):
            for b in range(3):
                x, y = vectors[token, a].astype(float), vectors[token, b].astype(float)
                lengths = np.linalg.norm(x) * np.linalg.norm(y)
                assert found[token, a, b] == pytest.approx(1 - (x @ y / lengths if lengths else 0), abs=1e-6)
    assert found[2, 1].tolist() == [1, 1, 1]  # a row of zeros


def test_a_tile_does_not_change_a_distance():
    vectors = RNG.normal(size=(40, 9, 32)).astype(np.float32)
    whole = cosine_distances(vectors)
    for step in (1, 7, 33):
        tiles = [cosine_distances(vectors[start : start + step]) for start in range(0, 40, step)]
        assert np.concatenate(tiles).tobytes() == whole.tobytes()


def test_sums_by_decile():
    values, deciles = RNG.normal(size=(60, 2, 2)), RNG.integers(-1, 8, size=60)
    found = group_sums(values, deciles)
    for place, decile in enumerate([*range(10), -1]):
        members = values[deciles == decile]
        assert found["n"][place] == len(members)
        np.testing.assert_allclose(found["sums"][place], members.sum(axis=0), rtol=1e-12)
        np.testing.assert_allclose(found["squares"][place], (members**2).sum(axis=0), rtol=1e-12)


def test_norms_by_decile():
    norms, deciles = RNG.gamma(3, size=(2, 40)).astype(np.float32), np.repeat([0, 1, 5, -1], 10)
    deciles[0] = 7
    table = norm_table(norms, deciles, ["embedding", "bank_0"])
    assert len(table) == 2 * 11
    row = table[(table["table"] == "bank_0") & (table["decile"] == -1)].iloc[0]
    assert row["n"] == 10
    assert row["mean"] == pytest.approx(norms[1, 30:].mean())
    assert row["sd"] == pytest.approx(norms[1, 30:].astype(float).std(ddof=1))
    assert row["q50"] == pytest.approx(np.median(norms[1, 30:]))
    assert row["q05"] < row["q25"] < row["q75"] < row["q95"]
    single, empty = (table[(table["table"] == "embedding") & (table["decile"] == k)].iloc[0] for k in (7, 3))
    assert single["q05"] == single["mean"] == norms[0, 0]
    assert np.isnan(single["sd"])
    assert empty["n"] == 0
    assert np.isnan([empty["mean"], empty["q50"]]).all()


@pytest.mark.parametrize("step", [1, 10, 97])
def test_spectra_are_those_of_the_whole_table(step):
    table = SPIKED.astype(np.float32)
    found = spectra((table[start : start + step] for start in range(0, 97, step)), 8, 3)
    table = table.astype(np.float64)
    _, expected, directions = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(found["uncentered"], np.linalg.svd(table, compute_uv=False), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found["centered"], expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(np.abs(found["basis"].T @ directions[:3].T), np.eye(3), atol=1e-6)
    assert found["uncentered"][0] / found["centered"][0] > 5  # the common direction is gone


def test_a_table_of_few_rows_has_as_many_singular_values():
    found = spectra([np.eye(3, 8, dtype=np.float32)], 8, 2)
    np.testing.assert_allclose(found["uncentered"], np.ones(3))
    np.testing.assert_allclose(found["centered"], [1, 1, 0], atol=1e-7)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_ranks_lie_between_one_and_the_number_of_directions(values):
    row = rank_row(np.sort(np.array(values))[::-1])
    assert 1 - 1e-9 <= row["participation_ratio"] <= row["effective_rank"] * (1 + 1e-9) <= len(values) * (1 + 1e-8)
    assert 1 / len(values) - 1e-9 <= row["top_1"] <= row["top_10"] <= row["top_100"] == pytest.approx(1)


def test_ranks_of_known_spectra():
    assert rank_row(np.array([2.0, 2, 2, 2, 0]))["effective_rank"] == pytest.approx(4)
    assert rank_row(np.array([2.0, 2, 2, 2, 0]))["participation_ratio"] == pytest.approx(4)
    assert rank_row(np.array([3.0, 1]))["effective_rank"] == pytest.approx(
        np.exp(-0.75 * np.log(0.75) - np.log(0.25) / 4)
    )
    assert rank_row(np.array([3.0, 1]))["participation_ratio"] == pytest.approx(100 / 82)
    assert rank_row(np.array([3.0, 1]))["top_1"] == pytest.approx(0.9)
    assert np.isnan(list(rank_row(np.zeros(4)).values())).all()


def test_principal_cosines_of_known_subspaces():
    basis = orthonormal(10, 6, 0)
    angle = 0.3
    turned = np.cos(angle) * basis[:, 1] + np.sin(angle) * basis[:, 5]
    bases = np.stack([basis[:, :2], np.stack([basis[:, 0], turned], axis=1), basis[:, 2:4]])
    bases[0] = bases[0] @ orthonormal(2, 2, 1)  # another basis of the same subspace
    found = principal_cosines(bases)
    np.testing.assert_allclose(found[0, 1], [1, np.cos(angle)], atol=1e-12)
    np.testing.assert_allclose(found[0, 0], [1, 1], atol=1e-12)
    np.testing.assert_allclose(found[0, 2], [0, 0], atol=1e-12)
    np.testing.assert_allclose(found, found.transpose(1, 0, 2), atol=1e-12)


def test_random_subspaces_have_a_mean_squared_cosine_of_r_over_d():
    bases = np.stack([orthonormal(64, 16, seed) for seed in range(20)])
    squares = (principal_cosines(bases) ** 2).mean(axis=-1)[~np.eye(20, dtype=bool)]
    assert squares.mean() == pytest.approx(16 / 64, abs=0.01)


def test_a_subspace_is_at_most_a_quarter_of_the_width():
    assert [subspace_size(d) for d in (2, 8, 32, 64, 128, 2048)] == [1, 2, 8, 16, 16, 16]


@pytest.fixture(scope="module")
def tables(job):
    return CheckpointTables(job.checkpoint, TideConfig.from_pretrained(job.checkpoint))


@pytest.fixture(scope="module")
def made(job, tmp_path_factory):
    """The stage as the pipeline makes it, of five runs of token ids."""
    out = tmp_path_factory.mktemp("geometry")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(geometry, "PIECE_ROWS", 70)
        patched.setattr(geometry, "TILE_ROWS", 16)
        assert run(replace(job, out=out), ["geometry"])[-1] == "geometry"
    return Artifacts.open(out)


@pytest.fixture(scope="module")
def vectors(tables):
    """[V, T, d] float64, what the model reads, and the rows as they are stored."""
    return tuple(read_vectors(tables, 0, 330, raw).astype(np.float64) for raw in (False, True))


def test_the_distances_of_the_pipeline(made, vectors):
    unit = vectors[0] / np.linalg.norm(vectors[0], axis=-1, keepdims=True)
    distances = 1 - np.einsum("vad,vbd->vab", unit, unit)
    assert made.table_names == ["embedding", "unembedding", "bank_0", "bank_1", "bank_2"]
    for decile in (None, -1, 0, 9):
        of = distances if decile is None else distances[made.bins == decile]
        table = made.cosine_distance(decile)
        assert list(table.columns) == ["a", "b", "mean", "sd", "n"]
        assert (table["n"] == len(of)).all()
        np.testing.assert_allclose(table["mean"], of.mean(axis=0).reshape(-1), atol=1e-6)
        np.testing.assert_allclose(table["sd"], of.std(axis=0, ddof=1).reshape(-1), atol=1e-6)
    first = made.cosine_distance().iloc[2]
    assert (first["a"], first["b"]) == ("embedding", "bank_0")


@pytest.mark.parametrize("decile", [-2, 10])
def test_no_such_decile(made, decile):
    with pytest.raises(ValueError, match=f"no decile {decile}"):
        made.cosine_distance(decile)


def test_the_norms_of_the_pipeline(made, vectors):
    norms = np.linalg.norm(vectors[1], axis=-1)
    for token_id in (0, 69, 70, 329):
        np.testing.assert_allclose(made.norms_of(token_id), norms[token_id], rtol=1e-6)
    table = made.row_norms()
    row = table[(table["table"] == "bank_1") & (table["decile"] == 3)].iloc[0]
    assert row["mean"] == pytest.approx(norms[made.bins == 3, 3].mean())
    assert row["n"] == (made.bins == 3).sum()
    with pytest.raises(ValueError, match="token id 330"):
        made.norms_of(330)


def test_the_spectra_of_the_pipeline(made, vectors):
    bank = vectors[0][:, 4]
    for centered in (True, False):
        expected = np.linalg.svd(bank - bank.mean(axis=0) * centered, compute_uv=False)
        table = made.spectrum(centered)
        rows = table[table["table"] == "bank_2"]
        assert rows["index"].tolist() == list(range(32))
        np.testing.assert_allclose(rows["singular_value"], expected, rtol=1e-6)
        np.testing.assert_allclose(rows["share"], expected**2 / (expected**2).sum(), rtol=1e-6)
        ranks = made.effective_rank()
        row = ranks[(ranks["table"] == "bank_2") & (ranks["centered"] == centered)].iloc[0]
        assert row["participation_ratio"] == pytest.approx(rank_row(expected)["participation_ratio"])
        assert row["top_10"] == pytest.approx(rows["share"].iloc[:10].sum())


def test_the_principal_angles_of_the_pipeline(made, vectors):
    leading = []
    for table in (0, 2):
        centered = vectors[0][:, table] - vectors[0][:, table].mean(axis=0)
        leading.append(np.linalg.svd(centered, full_matrices=False)[2][:8])
    expected = np.linalg.svd(leading[0] @ leading[1].T, compute_uv=False)
    np.testing.assert_allclose(made.principal_cosines("embedding", 0), expected, atol=1e-6)
    table = made.principal_angles().set_index(["a", "b"])
    row = table.loc[("embedding", "bank_0")]
    assert row["mean_squared_cosine"] == pytest.approx((expected**2).mean(), abs=1e-6)
    assert row["largest"] == pytest.approx(expected[0], abs=1e-6)
    assert (row["directions"], row["random"]) == (8, 0.25)
    assert table.loc[("bank_0", "bank_0")]["mean_cosine"] == pytest.approx(1)
    with pytest.raises(ValueError, match="no table"):
        made.principal_cosines("embedding", 3)


def test_runs_of_other_lengths_give_the_same_means(made, job, tmp_path):
    run(replace(job, out=tmp_path / "out"), ["geometry"])  # one run of token ids, tiles of 256
    other = Artifacts.open(tmp_path / "out")
    np.testing.assert_allclose(other.cosine_distance()["mean"], made.cosine_distance()["mean"], rtol=1e-12)
    np.testing.assert_array_equal(other.norms_of(100), made.norms_of(100))


def test_a_base_model_has_an_embedding_alone(job, tokenizer, tmp_path):
    tiny_model(vocab_size=330, num_memory_blocks=0, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run(replace(job, checkpoint=tmp_path / "base", base=None, out=tmp_path / "out"), ["geometry"])
    made = Artifacts.open(tmp_path / "out")
    assert made.table_names == ["embedding"]
    assert made.cosine_distance()["mean"].tolist() == pytest.approx([0], abs=1e-6)
    assert len(made.norms_of(5)) == 1
    assert made.principal_angles()["mean_cosine"].tolist() == pytest.approx([1])
    assert set(made.spectrum()["table"]) == {"embedding"}


def test_a_decile_without_tokens_has_no_mean(job, tmp_path):
    (tmp_path / "text.txt").write_text("The fox sings at night.\n")  # fewer types than deciles
    run(replace(job, text=(tmp_path / "text.txt",), out=tmp_path / "out"), ["geometry"])
    made = Artifacts.open(tmp_path / "out")
    empty = next(decile for decile in range(10) if not (made.bins == decile).any())
    single = next(decile for decile in range(10) if (made.bins == decile).sum() == 1)
    assert made.cosine_distance(empty)["mean"].isna().all()
    assert made.cosine_distance(single)["mean"].notna().all()
    assert made.cosine_distance(single)["sd"].isna().all()
