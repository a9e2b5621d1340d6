import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from precompute.measure import Cost, peak_resident_bytes
from precompute.search import (
    INDEX_KINDS,
    Tiles,
    build_index,
    jaccard,
    load_faiss,
    neighbors_of_rows,
    on_gpu,
    open_index,
    rank_biased_overlap,
    recall,
    sampled_recall,
    search,
    write_index,
)
from tide.cli import UserError

faiss = pytest.importorskip("faiss")

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory")


def random_rows(size: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, width)).astype(np.float32)


def in_tiles(table: np.ndarray, rows: int = 100) -> list[np.ndarray]:
    return [table[start : start + rows] for start in range(0, len(table), rows)]


def brute_force(queries: np.ndarray, table: np.ndarray, k: int, own: np.ndarray | None = None):
    def unit(rows):
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1)

    cosines = unit(queries) @ unit(table).T
    if own is not None:
        cosines[np.arange(len(own)), own] = -np.inf
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, axis=1)


def all_rows(index, k: int, **options) -> tuple[np.ndarray, np.ndarray]:
    batches = list(neighbors_of_rows(index, k, **options))
    return np.concatenate([ids for _, ids, _ in batches]), np.concatenate([cosines for *_, cosines in batches])


# Search


def test_search_of_other_vectors_is_exact():
    table, queries = random_rows(333, 24), 7 * random_rows(40, 24, seed=1)
    ids, cosines = search(build_index(in_tiles(table), 333), queries, 12)
    expected_ids, expected_cosines = brute_force(queries, table, 12)
    assert (ids.dtype, cosines.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(cosines, expected_cosines, atol=1e-6)


def test_neighbours_of_all_rows_are_exact_and_leave_the_row_out():
    table = 5 * random_rows(333, 24)
    bar = tqdm(total=333, disable=True)
    bar.update = lambda n: counted.append(n)
    counted: list[int] = []
    index = build_index(in_tiles(table), 333)
    ids, cosines = all_rows(index, 12, bar=bar, budget_bytes=1_000_000)
    expected_ids, expected_cosines = brute_force(table, table, 12, own=np.arange(333))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(cosines, expected_cosines, atol=1e-6)
    assert sum(counted) == 333
    assert len(counted) > 1


def test_a_range_of_rows_is_a_part_of_the_whole():
    index = build_index([random_rows(200, 8)], 200)
    (rows, ids, cosines), *more = neighbors_of_rows(index, 5, range(50, 120))
    assert (rows, more) == (slice(50, 120), [])
    whole_ids, whole_cosines = all_rows(index, 5)
    np.testing.assert_array_equal(ids, whole_ids[50:120])
    np.testing.assert_allclose(cosines, whole_cosines[50:120], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(1, 12), st.integers(0, 10_000), st.sampled_from(INDEX_KINDS))
def test_a_row_is_never_its_own_neighbour_even_among_duplicates(size, distinct, seed, kind):
    rng = np.random.default_rng(seed)
    table = random_rows(distinct, 6, seed)[rng.integers(distinct, size=size)]
    k = min(10, size - 1)
    index = build_index(in_tiles(table, 17), size, kind)
    for ids, cosines in (all_rows(index, k), search(index, table, k, own=np.arange(size))):
        assert not (ids == np.arange(size)[:, None]).any()
        assert all(len(set(row)) == k for row in ids.tolist())
        ordered = [sorted(zip(-c, i, strict=True)) for c, i in zip(cosines, ids, strict=True)]
        assert [[i for _, i in row] for row in ordered] == ids.tolist()
        tolerance = {"flat": 1e-6, "fp16": 2e-3, "sq8": 2e-2}[kind]
        np.testing.assert_allclose(cosines, brute_force(table, table, k, np.arange(size))[1], atol=tolerance)


def test_a_row_of_zeros_is_no_error():
    table = np.eye(5, 6, dtype=np.float32)
    table[2] = 0
    ids, cosines = all_rows(build_index([table], 5), 4)
    assert (cosines == 0).all()
    assert (np.sort(ids[2]) == [0, 1, 3, 4]).all()


def test_very_long_and_very_short_rows_have_neighbours_too():
    table = random_rows(60, 8)
    scale = np.resize(np.float32([1e-30, 1, 1e30]), 60)[:, None]
    ids, _ = all_rows(build_index([table * scale], 60), 5)
    np.testing.assert_array_equal(ids, all_rows(build_index([table], 60), 5)[0])


@pytest.mark.parametrize("kind", ["fp16", "sq8"])
def test_decoded_tiles_give_what_faiss_finds_in_the_codes(kind, monkeypatch):
    table = random_rows(3000, 256)
    index = build_index(in_tiles(table), 3000, kind)
    unit = table[:200] / np.linalg.norm(table[:200], axis=1, keepdims=True)
    expected_cosines, expected_ids = index.search(unit, 9)
    decoded = []
    multiply = faiss.knn
    monkeypatch.setattr(faiss, "knn", lambda q, x, k, metric: (decoded.append(len(x)), multiply(q, x, k, metric))[1])
    for budget, tiles in ((2**30, [3000]), (1_000_000, 6 * [488] + [72])):
        decoded.clear()
        ids, cosines = search(index, table[:200], 9, budget_bytes=budget)
        assert decoded[: len(tiles)] == tiles
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(cosines, expected_cosines, atol=1e-5)


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_the_budget_changes_no_result(kind):
    table = random_rows(500, 12)
    index = build_index(in_tiles(table), 500, kind)
    ids, cosines = all_rows(index, 7)
    for budget in (1, 50_000):  # one query at a time, and a few
        small_ids, small_cosines = all_rows(index, 7, budget_bytes=budget)
        np.testing.assert_array_equal(small_ids, ids)
        np.testing.assert_allclose(small_cosines, cosines, atol=1e-5)


def test_more_rows_than_there_are_cannot_be_asked_for():
    index = build_index([random_rows(5, 4)], 5)
    with pytest.raises(ValueError, match="6 rows a query were asked of an index of 5"):
        search(index, random_rows(2, 4), 5, own=np.arange(2))
    with pytest.raises(ValueError, match="6 rows"):
        next(neighbors_of_rows(index, 5))
    assert search(index, random_rows(2, 4), 5)[0].shape == (2, 5)


def test_on_gpu_is_the_index_itself_without_a_gpu(monkeypatch):
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    index = build_index([random_rows(5, 4)], 5)
    assert on_gpu(index) is index


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_on_gpu_holds_the_same_rows(monkeypatch, kind):
    """FAISS's GPU classes are played by those of the CPU."""
    configs = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatConfig", SimpleNamespace, raising=False)
    monkeypatch.setattr(
        faiss, "GpuIndexFlatIP", lambda _, d, config: (configs.append(config), faiss.IndexFlatIP(d))[1], raising=False
    )
    index = build_index([random_rows(300, 8)], 300, kind)
    copy = on_gpu(index, gpu=1)
    assert isinstance(copy, faiss.IndexFlatIP)
    assert configs == [SimpleNamespace(device=1)]
    np.testing.assert_array_equal(all_rows(copy, 6)[0], all_rows(index, 6)[0])


# Building


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_an_index_does_not_depend_on_the_tiles(kind):
    table = random_rows(230, 10)
    whole = build_index([table], 230, kind)
    for rows in (1, 37, 229):
        index = build_index(Tiles(lambda rows=rows: iter(in_tiles(table, rows))), 230, kind)
        np.testing.assert_array_equal(
            faiss.vector_to_array(index.codes.owned_data), faiss.vector_to_array(whole.codes.owned_data)
        )


def test_the_kinds_take_half_and_a_quarter_of_the_bytes(tmp_path):
    sizes = {}
    for kind in INDEX_KINDS:
        write_index(build_index([random_rows(2000, 64)], 2000, kind), tmp_path / kind)
        sizes[kind] = (tmp_path / kind).stat().st_size
    assert sizes["flat"] == pytest.approx(2000 * 64 * 4, rel=0.01)
    assert sizes["fp16"] == pytest.approx(2000 * 64 * 2, rel=0.01)
    assert sizes["sq8"] == pytest.approx(2000 * 64, rel=0.01)


def test_eight_bits_are_trained_as_faiss_would_on_the_whole_table():
    table = random_rows(500, 10)
    ours = build_index(in_tiles(table), 500, "sq8")
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    theirs = faiss.IndexScalarQuantizer(10, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    theirs.train(unit)
    np.testing.assert_allclose(
        faiss.vector_to_array(ours.sq.trained), faiss.vector_to_array(theirs.sq.trained), atol=1e-7
    )


def test_tiles_must_have_the_rows_that_were_announced():
    for size in (99, 101):
        with pytest.raises(ValueError, match=f"the tiles have 100 rows, not {size}"):
            build_index(in_tiles(random_rows(100, 4), 10), size)
    with pytest.raises(ValueError, match="0 rows, not 5"):
        build_index([], 5)


def test_tiles_that_end_after_one_walk_are_refused_where_two_are_needed():
    tiles = in_tiles(random_rows(100, 4))
    assert build_index(iter(tiles), 100, "fp16").ntotal == 100
    with pytest.raises(ValueError, match="walked twice"):
        build_index(iter(tiles), 100, "sq8")
    with pytest.raises(ValueError, match="walked twice"):
        sampled_recall(np.zeros((100, 3), np.int32), iter(tiles), [3])


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_told_with_its_row(kind, value):
    table = random_rows(30, 4)
    table[17, 2] = value
    with pytest.raises(UserError, match="Row 17 of the table"):
        build_index(in_tiles(table, 10), 30, kind)
    with pytest.raises(UserError, match="Row 17 of the queries"):
        search(build_index([random_rows(30, 4)], 30), table, 3, budget_bytes=1)


def test_without_faiss_both_extras_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"tide-explorer\[cpu\].*tide-explorer\[gpu\]"):
        load_faiss()


@needs_linux
@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_building_takes_little_more_than_the_index(kind):
    size, width, rows = 33_000, 256, 1000  # 33.8 MB of float32, in tiles of 1 MB
    build_index([random_rows(10, 4)], 10, kind)
    tiles = Tiles(lambda: (random_rows(rows, width, start) for start in range(0, size, rows)))
    with Cost() as cost:
        before = peak_resident_bytes()
        index = build_index(tiles, size, kind)
    assert cost.peak_memory_mb - before / 1e6 < index.code_size * size / 1e6 + 8


# Files


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_a_written_index_answers_the_same(kind, tmp_path):
    table = random_rows(300, 16)
    index = build_index([table], 300, kind)
    write_index(index, tmp_path / "an.index")
    opened = open_index(tmp_path / "an.index")
    assert not opened.codes.is_owned  # it stays in the file
    for found, expected in (
        (search(opened, table[:70], 9), search(index, table[:70], 9)),
        (search(opened, table[:3], 9), search(index, table[:3], 9)),
        (all_rows(opened, 9), all_rows(index, 9)),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@needs_linux
def test_opening_an_index_does_not_read_it(tmp_path):
    write_index(build_index([random_rows(20_000, 512)], 20_000), tmp_path / "an.index")
    with Cost() as cost:
        before = peak_resident_bytes()
        index = open_index(tmp_path / "an.index")
        index.reconstruct(12_345)
    assert index.ntotal * index.code_size > 40e6
    assert cost.peak_memory_mb - before / 1e6 < 4


def test_missing_and_damaged_files_are_told(tmp_path):
    with pytest.raises(UserError, match="missing or damaged"):
        open_index(tmp_path / "none.index")
    write_index(build_index([random_rows(300, 16)], 300), tmp_path / "an.index")
    whole = (tmp_path / "an.index").read_bytes()
    for damaged in (whole[:-100], whole[:20], b"", b"not an index" * 10):
        (tmp_path / "an.index").write_bytes(damaged)
        with pytest.raises(UserError, match=r"an\.index is missing or damaged"):
            open_index(tmp_path / "an.index")


@pytest.mark.parametrize("told", [True, False])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, told):
    index = build_index([random_rows(30, 4)], 30)
    write_index(index, tmp_path / "an.index")
    write = faiss.write_index

    def fail(index, path):
        write(index, path)
        Path(path).write_bytes(Path(path).read_bytes()[:-1])
        if told:
            raise RuntimeError("disk full")

    monkeypatch.setattr(faiss, "write_index", fail)
    with pytest.raises(OSError, match="disk full" if told else "read error"):
        write_index(index, tmp_path / "an.index")
    assert [file.name for file in tmp_path.iterdir()] == ["an.index"]
    assert open_index(tmp_path / "an.index").ntotal == 30


# Comparing lists


def test_recall_by_hand():
    assert recall(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 1, 9], [6, 5, 4]])) == pytest.approx((2 / 3 + 1) / 2)


def test_sampled_recall_is_the_recall_on_evenly_spaced_rows():
    table = random_rows(401, 24)
    tiles = in_tiles(table, 50)
    exact, _ = all_rows(build_index(tiles, 401), 10)
    assert sampled_recall(exact, tiles, [3, 10]) == [1, 1]
    coarse, _ = all_rows(build_index([np.sign(table)], 401), 10)  # one bit a value: a bad approximation
    rows = np.arange(0, 401, 4)
    expected = [np.mean([len(set(coarse[row, :k]) & set(exact[row, :k])) / k for row in rows]) for k in (3, 10)]
    assert 0.1 < expected[0] < expected[1] < 0.9
    assert sampled_recall(coarse, tiles, [3, 10], sample=101) == pytest.approx(expected)


def test_rounded_rows_find_most_of_the_exact_neighbours():
    tiles = in_tiles(random_rows(2000, 64))
    found = {
        kind: sampled_recall(all_rows(build_index(tiles, 2000, kind), 10)[0], tiles, [10])[0] for kind in INDEX_KINDS
    }
    assert found["flat"] == 1
    assert 0.99 < found["fp16"] <= 1
    assert 0.93 < found["sq8"] < found["fp16"]


def test_jaccard_by_hand():
    a, b = np.array([[1, 2, 3], [1, 2, 3]]), np.array([[3, 4, 1], [7, 8, 9]])
    assert jaccard(a, b).tolist() == [0.5, 0.0]
    assert jaccard(np.array([[1, 2]]), np.array([[2, 3, 4, 5]])).tolist() == [np.float32(0.2)]


ranked_lists = st.integers(1, 12).flatmap(
    lambda k: st.lists(
        st.tuples(*[st.lists(st.integers(0, 14), min_size=k, max_size=k, unique=True)] * 2), min_size=1, max_size=5
    )
)


def rbo_as_defined(a: list[int], b: list[int], p: float) -> float:
    k = len(a)
    agreement = [len(set(a[:depth]) & set(b[:depth])) / depth for depth in range(1, k + 1)]
    summed = sum(agreement[depth - 1] * p**depth for depth in range(1, k + 1))
    return agreement[-1] * p**k + (1 - p) / p * summed


@given(ranked_lists, st.floats(0.05, 0.99))
def test_overlaps_are_what_their_definitions_say(pairs, p):
    a, b = (np.array(lists, dtype=np.int32) for lists in zip(*pairs, strict=True))
    overlap, rbo = jaccard(a, b), rank_biased_overlap(a, b, p)
    assert overlap.dtype == rbo.dtype == np.float32
    np.testing.assert_allclose(overlap, [len(set(x) & set(y)) / len(set(x) | set(y)) for x, y in pairs], rtol=1e-6)
    np.testing.assert_allclose(rbo, [rbo_as_defined(x, y, p) for x, y in pairs], atol=1e-6)
    np.testing.assert_array_equal(rank_biased_overlap(b, a, p), rbo)
    np.testing.assert_array_equal(jaccard(b, a), overlap)


@given(ranked_lists, st.floats(0.05, 0.99), st.integers(15, 2_000_000))
def test_identical_lists_overlap_wholly_and_disjoint_ones_not_at_all(pairs, p, apart):
    a = np.array([first for first, _ in pairs], dtype=np.int32)
    np.testing.assert_allclose(rank_biased_overlap(a, a, p), 1, rtol=1e-6)
    assert (rank_biased_overlap(a, a + apart, p) == 0).all()
    assert (jaccard(a, a) == 1).all()
    assert (jaccard(a, a + apart) == 0).all()


def test_agreement_at_the_first_ranks_counts_more():
    kept = np.arange(10)[None]
    last, first = kept.copy(), kept.copy()
    last[0, 9], first[0, 0] = 99, 99
    assert rank_biased_overlap(kept, last)[0] > rank_biased_overlap(kept, first)[0]
    assert jaccard(kept, last) == jaccard(kept, first)
