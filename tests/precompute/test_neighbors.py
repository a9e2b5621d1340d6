"""Stage `neighbors` against brute force, and live queries of its indexes."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import precompute.stages.neighbors
from precompute import ArtifactError, Artifacts
from precompute.measure import Cost, peak_resident_bytes
from precompute.pipeline import run
from precompute.stage import Context
from precompute.stages.neighbors import Neighbors, recall_table
from precompute.tables import CheckpointTables
from tests.conftest import tiny_model
from tide import TideConfig
from tide.cli import UserError

pytest.importorskip("faiss")

NAMES = ["embedding", "unembedding", "bank_0", "bank_1", "bank_2"]

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory")


def brute_force(queries: np.ndarray, table: np.ndarray, k: int, own: np.ndarray | None = None):
    """Ids and cosines [Q, k] in float64; `own` left out."""
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries.astype(np.float64), table)]
    cosines = unit[0] @ unit[1].T
    if own is not None:
        cosines[np.arange(len(own)), own] = -np.inf
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, axis=1)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "neighbors").iterdir())}


@pytest.fixture(scope="module")
def tables(job) -> dict[str, np.ndarray]:
    """Every table whole, by name: [V, d] float32."""
    stored = CheckpointTables(job.checkpoint, TideConfig.from_pretrained(job.checkpoint))
    return {name: stored.read(table, 0, 330) for name, table in zip(NAMES, stored.names, strict=True)}


@pytest.fixture(scope="module")
def made(job, tmp_path_factory):
    """`made(kind)`: artifacts with the stage alone, by kind of index."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("flat", "fp16", "sq8")}
    for kind, folder in folders.items():
        assert run(replace(job, out=folder, index=kind), ["neighbors"]) == ["neighbors"]
    return lambda kind="flat": Artifacts.open(folders[kind])


# --- The stage ---------------------------------------------------------------------------------------------------


def test_lists_of_every_table_are_exact(made, tables):
    folder = made().folder / "neighbors"
    assert {file.name for file in folder.iterdir()} == {
        "recall.parquet",
        *(f"{name}{suffix}" for name in NAMES for suffix in (".safetensors", ".faiss")),
    }
    for name, table in tables.items():
        stored = load_file(folder / f"{name}.safetensors")
        ids, cosines = brute_force(table, table, 50, own=np.arange(330))
        assert (stored["ids"].dtype, stored["cosines"].dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(stored["ids"], ids)
        np.testing.assert_allclose(stored["cosines"], cosines, atol=1e-6)


def test_the_reader_gives_what_is_stored(made, tables):
    ids, cosines = made().neighbors(17, 2, k=5)
    expected = brute_force(tables["bank_2"][17:18], tables["bank_2"], 5, own=np.array([17]))
    assert ids.dtype == np.int64
    assert ids.tolist() == expected[0][0].tolist()
    np.testing.assert_allclose(cosines, expected[1][0], atol=1e-6)
    assert made().neighbors(17, "unembedding")[0].tolist() != made().neighbors(17)[0].tolist()


def test_no_more_neighbours_than_other_tokens_and_one_table_without_banks(job, tokenizer, tmp_path):
    model = tiny_model(vocab_size=20, num_memory_blocks=0, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run(replace(job, checkpoint=tmp_path / "base", base=None, out=tmp_path / "out"), ["neighbors"])
    opened = Artifacts.open(tmp_path / "out")
    ids, _ = opened.neighbors(5, k=19)
    assert sorted(ids) == [i for i in range(20) if i != 5]
    with pytest.raises(ValueError, match="k is 20; 1 to 19"):
        opened.neighbors(5, k=20)
    assert opened.index_recall()["k"].tolist() == [10, 19]
    assert {file.stem for file in (tmp_path / "out" / "neighbors").glob("*.faiss")} == {"embedding"}


def test_a_run_that_was_stopped_ends_with_the_same_bytes(job, made, tmp_path, monkeypatch):
    measure, asked = Neighbors.measure, []

    def stop(self, context, piece):
        asked.append(piece)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(self, context, piece)

    monkeypatch.setattr(Neighbors, "measure", stop)
    own = replace(job, out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(own, ["neighbors"])
    run(own, ["neighbors"])
    assert asked == [*NAMES[:3], *NAMES[2:]]
    assert bytes_of(own.out) == bytes_of(made().folder)


def test_another_kind_of_index_makes_the_stage_anew(job, tmp_path):
    own = replace(job, out=tmp_path / "out", index="sq8")
    assert run(own, ["neighbors"]) == ["neighbors"]
    assert run(own, ["neighbors"]) == []
    assert run(replace(own, index="fp16"), ["neighbors"]) == ["neighbors"]


@pytest.mark.parametrize("kind", ["flat", "fp16", "sq8"])
def test_recall_is_the_share_of_exact_neighbours_that_are_stored(made, tables, kind):
    table = made(kind).index_recall()
    assert list(table.columns) == ["table", "k", "recall", "n"]
    assert table["table"].tolist() == [name for name in NAMES for _ in range(2)]
    assert (table["n"] == 330).all()
    for row in table.itertuples():
        exact, _ = brute_force(tables[row.table], tables[row.table], row.k, own=np.arange(330))
        stored = load_file(made(kind).folder / "neighbors" / f"{row.table}.safetensors")["ids"][:, : row.k]
        shares = [len(set(a) & set(b)) / row.k for a, b in zip(stored.tolist(), exact.tolist(), strict=True)]
        assert row.recall == pytest.approx(np.mean(shares))
    assert {"flat": 1, "fp16": 0.99, "sq8": 0.9}[kind] <= table["recall"].min()
    if kind == "sq8":
        assert table["recall"].max() < 1


def test_the_recall_of_an_exact_index_is_not_measured():
    table = recall_table("bank_1", "flat", np.zeros((7, 3), dtype=np.int32), iter(()))
    assert table.to_dict("records") == [{"table": "bank_1", "k": 3, "recall": 1.0, "n": 7}]


def test_an_index_that_is_not_exact_is_smaller(made):
    sizes = {kind: (made(kind).folder / "neighbors" / "bank_1.faiss").stat().st_size for kind in ("flat", "sq8")}
    assert sizes["flat"] - sizes["sq8"] > 0.7 * 330 * 32 * 4


def test_a_gpu_of_the_job_is_used(job, monkeypatch):
    asked = []
    monkeypatch.setattr(
        precompute.stages.neighbors, "on_gpu", lambda index, gpu: (asked.append((index.ntotal, gpu)), index)[1]
    )
    for device in ("cuda", "cuda:1", "cpu", "mps"):
        Neighbors().measure(Context(replace(job, device=device)), "bank_1")
    assert asked == [(330, 0), (330, 1)]


class RandomTables:
    """A table of 16 MB, made tile by tile."""

    names = ("embedding",)
    vocab_size, hidden_size = 4000, 1024

    def tiles(self, table, rows):
        for start in range(0, self.vocab_size, rows):
            size = min(rows, self.vocab_size - start)
            yield np.random.default_rng(start).standard_normal((size, self.hidden_size), dtype=np.float32)


@needs_linux
@pytest.mark.parametrize("kind", ["flat", "sq8"])
def test_a_piece_takes_one_table_and_the_memory_that_it_is_given(job, kind):
    context = Context(replace(job, index=kind, max_memory=10_000_000))
    Neighbors().measure(Context(replace(job, index=kind)), "embedding")  # loads what is loaded once
    context.tables = RandomTables()
    with Cost() as cost:
        before = peak_resident_bytes()
        Neighbors().measure(context, "embedding")
    assert cost.peak_memory_mb * 1e6 - before < 4000 * 1024 * 4 + 10e6


def test_a_table_is_given_back_when_its_index_is_written(job, tmp_path, monkeypatch):
    indexes = []
    build = precompute.stages.neighbors.build_index
    monkeypatch.setattr(
        precompute.stages.neighbors,
        "build_index",
        lambda *args: (index := build(*args), indexes.append(weakref.ref(index)))[0],
    )
    held = Neighbors().measure(Context(job), "bank_1")
    assert indexes[0]() is not None
    held["bank_1.faiss"].write(tmp_path / "bank_1.faiss")
    gc.collect()
    assert indexes[0]() is None


def test_too_little_memory_for_a_row_is_told(job):
    with pytest.raises(UserError, match="--max-memory is too little"):
        Neighbors().measure(Context(replace(job, max_memory=1000)), "bank_1")


# --- Live queries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["embedding", "unembedding", 1])
def test_any_vector_can_be_asked(made, tables, table):
    rows = tables[table if isinstance(table, str) else f"bank_{table}"]
    queries = 9 * np.random.default_rng(0).normal(size=(3, 32))
    expected_ids, expected_cosines = brute_force(queries, rows, 12)
    ids, cosines = made().nearest_to(queries, table, k=12)
    assert (ids.dtype, cosines.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(cosines, expected_cosines, atol=1e-6)
    ids, cosines = made().nearest_to(queries[1].tolist(), table, k=12)
    assert ids.tolist() == expected_ids[1].tolist()
    assert cosines.shape == (12,)


def test_the_vectors_of_tokens_are_their_rows_at_unit_length(made, tables):
    ids = [5, 329, 5, 0]
    expected = tables["bank_2"][ids] / np.linalg.norm(tables["bank_2"][ids], axis=1, keepdims=True)
    found = made().vectors(ids, 2)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert made().vectors([]).shape == (0, 32)
    for kind, tolerance in (("fp16", 1e-3), ("sq8", 2e-2)):
        rounded = made(kind).vectors(ids, 2)
        np.testing.assert_allclose(rounded, expected, atol=tolerance)
        np.testing.assert_allclose(np.linalg.norm(rounded, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", ["flat", "fp16", "sq8"])
def test_a_tokens_vector_finds_the_token_and_then_its_neighbours(made, kind):
    opened = made(kind)
    for token_id in (3, 200):
        ids, cosines = opened.nearest_to(opened.vectors([token_id], 0)[0], 0, k=11)
        stored_ids, stored_cosines = opened.neighbors(token_id, 0)
        assert ids[0] == token_id
        np.testing.assert_array_equal(ids[1:], stored_ids)
        np.testing.assert_allclose(cosines[1:], stored_cosines, atol=1e-5)


def test_a_row_of_zeros_has_a_vector_of_zeros(job, tokenizer, tmp_path):
    model = tiny_model(vocab_size=61)
    model.model.embed_tokens.weight.data[7] = 0
    model.save_pretrained(tmp_path / "tide")
    tokenizer.save_pretrained(tmp_path / "tide")
    run(replace(job, checkpoint=tmp_path / "tide", base=None, out=tmp_path / "out"), ["neighbors"])
    opened = Artifacts.open(tmp_path / "out")
    assert (opened.vectors([7]) == 0).all()
    assert (opened.nearest_to(np.zeros(32))[1] == 0).all()
    assert (opened.neighbors(7)[1] == 0).all()


def test_threads_share_one_index(made, monkeypatch):
    opened, queries = made(), np.random.default_rng(1).normal(size=(40, 32))
    expected = made().nearest_to(queries)[0]
    opens = []
    open_index = precompute.artifacts.neighbors.open_index
    monkeypatch.setattr(
        precompute.artifacts.neighbors, "open_index", lambda path: (opens.append(path), open_index(path))[1]
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: opened.nearest_to(query)[0], queries))
    np.testing.assert_array_equal(found, expected)
    assert len(opens) == 1


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda a: a.nearest_to(np.ones(31)), "31 values; the vectors of the table have 32"),
        (lambda a: a.nearest_to(1.0), "single values"),
        (lambda a: a.nearest_to(np.ones((2, 2, 32))), "2 x 2 x 32 values"),
        (lambda a: a.nearest_to(np.full(32, np.nan)), "not finite"),
        (lambda a: a.nearest_to(np.ones(32), k=0), "k is 0"),
        (lambda a: a.nearest_to(np.ones(32), k=331), "k is 331; the table has 1 to 330"),
        (lambda a: a.nearest_to(np.ones(32), table=3), "no table 3"),
        (lambda a: a.vectors([330]), "no token id 330"),
        (lambda a: a.vectors([1], "memory"), "no table 'memory'"),
    ],
)
def test_what_cannot_be_asked_is_said(made, ask, match):
    with pytest.raises(ValueError, match=match):
        ask(made())


def test_without_faiss_the_lists_can_be_read_and_queries_say_what_to_install(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    opened = made()
    assert len(opened.neighbors(3)[0]) == 10
    for ask in (lambda: opened.nearest_to(np.ones(32)), lambda: opened.vectors([3])):
        with pytest.raises(ArtifactError, match=r"pip install 'tide-explorer\[cpu\]'"):
            ask()


def test_queries_without_the_stage_name_the_command(job, tmp_path):
    run(replace(job, out=tmp_path / "out"), ["frequency"])
    with pytest.raises(ArtifactError, match="--only neighbors"):
        Artifacts.open(tmp_path / "out").nearest_to(np.ones(32))
