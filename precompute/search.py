"""Nearest rows of a table by cosine: FAISS indexes built a tile at a time, searched within a memory budget.

A table is seen as tiles, arrays [n, d] in row order, so that it is never held twice. Rows are brought to unit length,
and their inner product is the cosine; a row of zeros stays zero and has cosine 0 with every row.

An index is one of three kinds. "flat" holds float32 and is exact. "fp16" and "sq8" hold half and a quarter of the
bytes, and give the cosines of the rounded rows. FAISS scans such codes query by query, at a sixth of the speed of the
matrix product; a large batch of queries therefore meets decoded tiles, which gives the same inner products.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from tide.cli import UserError
from tide.files import replacing

if TYPE_CHECKING:
    import faiss

INDEX_KINDS = ("flat", "fp16", "sq8")
BUDGET_BYTES = 2**30  # that a search may take beyond index and result
RECALL_SAMPLE = 2000  # rows on which an approximate search is compared with the exact one

_QUERY_BATCH = 4096  # FAISS multiplies so many queries at once; more gain no speed
_DECODED_ROWS = 16_384  # rows of a decoded tile, at most
_DECODE_FROM = 64  # queries from which decoding the table is cheaper than scanning its codes
_RESULT_BYTES = 80  # of memory for each result of a query, while results are sorted
_QUERY_BYTES = 4096  # of a query's products with the 1,024 rows that FAISS takes at once


def load_faiss() -> Any:
    """FAISS, which is installed with one of two extras.

    Raises:
        UserError: when it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "FAISS, which searches for neighbours, is not installed; run `pip install 'tide-explorer[cpu]'`, or"
            " `pip install 'tide-explorer[gpu]'` for an NVIDIA GPU."
        ) from error
    return faiss


class Tiles:
    """Tiles that can be walked more than once, because they are made anew for every walk."""

    def __init__(self, make: Callable[[], Iterator[np.ndarray]]):
        self._make = make

    def __iter__(self) -> Iterator[np.ndarray]:
        """From the first row of the table to its last."""
        return self._make()


def build_index(tiles: Iterable[np.ndarray], size: int, kind: str = "flat") -> "faiss.Index":
    """An index of one table. It takes the memory of the index itself and of three tiles.

    Args:
        tiles: [n, d] float32 each, the rows of the table in order. For "sq8" they are walked twice: give a list or
            `Tiles`, not a generator.
        size: rows of the table, V.
        kind: one of `INDEX_KINDS`. The 256 levels of "sq8" span, in every dimension, what the whole table has there.

    Raises:
        UserError: when FAISS is not installed, or a value of the table is not finite.
        ValueError: when the tiles do not have `size` rows, or cannot be walked twice where that is needed.
    """
    faiss = load_faiss()
    extremes = _extremes(tiles) if kind == "sq8" else None
    index, codes, filled = None, np.empty(0), 0
    for start, unit in _unit_tiles(tiles):
        if index is None:
            index = _empty_index(unit.shape[1], kind)
            if extremes is not None:
                index.train(extremes)
            # Made in one go and filled in place: `index.add` would copy what it has whenever the codes outgrow it.
            index.codes.resize(size * index.code_size)
            codes = faiss.rev_swig_ptr(index.codes.data(), size * index.code_size).reshape(size, index.code_size)
        filled = start + len(unit)
        if filled <= size:
            index.sa_encode(unit, codes=codes[start:filled])
    if index is None or filled != size:
        raise ValueError(f"the tiles have {filled} rows, not {size}")
    index.ntotal = size
    return index


def on_gpu(index: "faiss.Index", gpu: int = 0) -> "faiss.Index":
    """The same rows as float32 on a GPU, to be searched there.

    Args:
        index: of any kind; one of rounded rows gives the answers that it gives on the CPU.
        gpu: number of the GPU.

    Returns:
        The copy; `index` itself where FAISS has no GPU.
    """
    faiss = load_faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return index
    config = faiss.GpuIndexFlatConfig()  # float32, as `index` decodes to, unless told otherwise
    config.device = gpu
    copy = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), index.d, config)
    for _, rows in _decoded_tiles(index, _DECODED_ROWS):
        copy.add(rows)
    return copy


def search(
    index: "faiss.Index", queries: np.ndarray, k: int, own: np.ndarray | None = None, budget_bytes: int = BUDGET_BYTES
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest rows of every query by cosine.

    Args:
        index: from `build_index`, `open_index` or `on_gpu`.
        queries: [Q, d] of any length but float32.
        k: at most V, or V - 1 with `own`.
        own: [Q], for every query the row that it is and that is left out of its result.
        budget_bytes: memory for batches of queries, beyond index and result.

    Returns:
        ids [Q, k] int32 and cosines [Q, k] float32, the nearest first, equal cosines by id.

    Raises:
        UserError: when FAISS is not installed, or a value of the queries is not finite.
        ValueError: when the index has too few rows.
    """
    depth = k + (own is not None)
    _check_depth(index, depth)
    ids = np.empty((len(queries), k), dtype=np.int32)
    cosines = np.empty((len(queries), k), dtype=np.float32)
    batch, tile_rows = _sizes(index.d, depth, budget_bytes)
    for start in range(0, len(queries), batch):
        rows = slice(start, start + batch)
        unit = _unit_rows(queries[rows], start, "queries")
        ids[rows], cosines[rows] = _search_batch(index, unit, depth, None if own is None else own[rows], tile_rows)
    return ids, cosines


def neighbors_of_rows(
    index: "faiss.Index",
    k: int,
    rows: range | None = None,
    bar: tqdm | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """The k nearest other rows of every row of the table, in batches; the queries are read from the index.

    Args:
        index: from `build_index`, `open_index` or `on_gpu`.
        k: at most V - 1.
        rows: consecutive rows, the whole table by default.
        bar: is moved on by one a row.
        budget_bytes: memory beyond the index and what is yielded.

    Yields:
        The rows of the batch, their ids [B, k] int32 and cosines [B, k] float32, as `search` orders them.

    Raises:
        UserError: when FAISS is not installed.
        ValueError: when the index has too few rows.
    """
    _check_depth(index, k + 1)
    rows = range(index.ntotal) if rows is None else rows
    batch, tile_rows = _sizes(index.d, k + 1, budget_bytes)
    for start in range(rows.start, rows.stop, batch):
        stop = min(start + batch, rows.stop)
        # A rounded row is not quite of unit length.
        unit = _unit_rows(index.reconstruct_n(start, stop - start), start, "index")
        ids, cosines = _search_batch(index, unit, k + 1, np.arange(start, stop), tile_rows)
        if bar is not None:
            bar.update(stop - start)
        yield slice(start, stop), ids, cosines


def sampled_recall(
    ids: np.ndarray, tiles: Iterable[np.ndarray], depths: Sequence[int], sample: int = RECALL_SAMPLE
) -> list[float]:
    """Shares of the exact neighbours that an approximate search found, on evenly spaced rows; one for each depth.

    Among rows of equal cosine at the end of a list, exact search takes any: others count as missed.

    Args:
        ids: [V, k], neighbours of every row from an approximate index, the nearest first.
        tiles: the table from which that index was built; walked twice.
        depths: how many of the nearest are compared, each at most k.
        sample: rows to compare, all where there are fewer.

    Raises:
        UserError: when FAISS is not installed.
        ValueError: when the tiles cannot be walked twice.
    """
    _check_walkable_again(tiles)
    rows = np.unique(np.linspace(0, len(ids) - 1, min(sample, len(ids))).round().astype(np.int64))
    queries = np.concatenate(
        [unit[rows[(rows >= start) & (rows < start + len(unit))] - start] for start, unit in _unit_tiles(tiles)]
    )
    exact, _ = _without_own(*_search_tiles(queries, _unit_tiles(tiles), max(depths) + 1), rows)
    return [recall(ids[rows, :depth], exact[:, :depth]) for depth in depths]


def recall(approximate_ids: np.ndarray, exact_ids: np.ndarray) -> float:
    """Mean share of the exact neighbours that an approximate search found.

    Args:
        approximate_ids: [Q, k], distinct in a row.
        exact_ids: [Q, k] likewise.
    """
    return float(_common(approximate_ids, exact_ids).mean() / exact_ids.shape[-1])


def write_index(index: "faiss.Index", path: Path) -> None:
    """Writes an index in FAISS's own format, whole or not at all; raises OSError when it cannot be written."""
    faiss = load_faiss()
    with replacing(path) as temporary:
        try:
            faiss.write_index(index, str(temporary))
            _map_index(temporary)  # FAISS does not tell that the disk was full when it closed the file
        except RuntimeError as error:
            raise OSError(" ".join(str(error).split())) from error


def open_index(path: Path) -> "faiss.Index":
    """An index from a file, mapped into memory: a page of it is read when a search first needs it.

    Raises:
        UserError: when FAISS is not installed, or the file is missing or damaged.
    """
    try:
        return _map_index(path)
    except RuntimeError as error:
        raise UserError(
            f"{path} is missing or damaged; make it again with `tide-precompute --only neighbors`."
        ) from error


def jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Jaccard overlap of two sets a row.

    Args:
        a: [..., k] ids, distinct in a row.
        b: [..., l] likewise.

    Returns:
        [...] float32: size of the intersection over size of the union.
    """
    common = _common(a, b)
    return (common / (a.shape[-1] + b.shape[-1] - common)).astype(np.float32)


def rank_biased_overlap(a: np.ndarray, b: np.ndarray, p: float = 0.9) -> np.ndarray:
    """Extrapolated rank-biased overlap of two ranked lists a row (Webber, Moffat and Zobel 2010, RBO_ext).

    With X_d ids common to both lists at depth d, it is X_k/k p^k + (1-p)/p sum_{d=1..k} X_d/d p^d (their equation 30
    for lists of equal length): what both lists agree on, the first ranks most, if they went on as they do at depth k.

    Args:
        a: [V, k] ids, distinct in a row, the first rank first.
        b: [V, k] likewise.
        p: weight of each rank against the one before, 0 < p < 1.

    Returns:
        [V] float32, from 0 for disjoint to 1 for identical lists.
    """
    k = a.shape[1]
    depths = np.arange(1, k + 1)
    # An id of rank i in a and j in b is common from depth max(i, j) on: so much does it add to the sum above.
    added = p**k / k + (1 - p) / p * np.cumsum((p**depths / depths)[::-1])[::-1]
    by_place = np.concatenate([added, np.zeros(k)])
    shift = (2 * k - 1).bit_length()
    places = np.arange(2 * k)
    out = np.empty(len(a), dtype=np.float32)
    for start in range(0, len(a), _QUERY_BATCH):
        rows = slice(start, start + _QUERY_BATCH)
        # Sorted by id, then by place (0..k-1 in a, k..2k-1 in b), the two places of a common id are neighbours.
        keys = (np.concatenate([a[rows], b[rows]], axis=1).astype(np.int64) << shift) | places
        keys.sort(axis=1)
        in_both = (keys[:, 1:] ^ keys[:, :-1]) >> shift == 0
        place = keys & (2**shift - 1)
        lower = np.maximum(place[:, :-1], place[:, 1:] - k)
        out[rows] = np.where(in_both, by_place[lower], 0).sum(axis=1)
    return out


def _map_index(path: Path) -> "faiss.Index":
    faiss = load_faiss()
    return faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Number of ids that both have, a row: [...]."""
    both = np.sort(np.concatenate([a, b], axis=-1), axis=-1)
    return (both[..., 1:] == both[..., :-1]).sum(axis=-1)


def _unit_rows(vectors: np.ndarray, start: int, of: str) -> np.ndarray:
    """A float32 copy with rows of unit length."""
    unit = np.array(vectors, dtype=np.float32, order="C")
    # float64, so that the squares of very small and very large values neither vanish nor overflow
    lengths = np.sqrt(np.einsum("nd,nd->n", unit, unit, dtype=np.float64))
    if not np.isfinite(lengths).all():
        row = start + int(np.flatnonzero(~np.isfinite(lengths))[0])
        raise UserError(f"Row {row} of the {of} holds a value that is not finite; mend the checkpoint that it is from.")
    unit /= np.where(lengths > 0, lengths, 1).astype(np.float32)[:, None]
    return unit


def _unit_tiles(tiles: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """The first row of each tile, and its rows at unit length."""
    start = 0
    for tile in tiles:
        yield start, _unit_rows(tile, start, "table")
        start += len(tile)


def _decoded_tiles(index: "faiss.Index", tile_rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """The first row of each tile, and its rows as the index holds them, float32."""
    for start in range(0, index.ntotal, tile_rows):
        yield start, index.reconstruct_n(start, min(tile_rows, index.ntotal - start))


def _check_walkable_again(tiles: Iterable[np.ndarray]) -> None:
    if iter(tiles) is tiles:
        raise ValueError("tiles that are walked twice must be a list or `Tiles`, not an iterator")


def _extremes(tiles: Iterable[np.ndarray]) -> np.ndarray:
    """Smallest and largest value of every dimension of the unit rows: [2, d], all that "sq8" is trained on."""
    _check_walkable_again(tiles)
    parts = [np.stack([unit.min(axis=0), unit.max(axis=0)]) for _, unit in _unit_tiles(tiles)]
    stacked = np.stack(parts)
    return np.stack([stacked[:, 0].min(axis=0), stacked[:, 1].max(axis=0)])


def _empty_index(width: int, kind: str) -> Any:
    faiss = load_faiss()
    if kind == "flat":
        return faiss.IndexFlatIP(width)
    quantizers = {"fp16": faiss.ScalarQuantizer.QT_fp16, "sq8": faiss.ScalarQuantizer.QT_8bit}
    return faiss.IndexScalarQuantizer(width, quantizers[kind], faiss.METRIC_INNER_PRODUCT)


def _check_depth(index: "faiss.Index", depth: int) -> None:
    if not 1 <= depth <= index.ntotal:
        raise ValueError(f"{depth} rows a query were asked of an index of {index.ntotal}")


def _sizes(width: int, depth: int, budget_bytes: int) -> tuple[int, int]:
    """Queries a batch, and rows of a tile that is decoded for them, which get half of the budget each."""
    a_query = 2 * 4 * width + _QUERY_BYTES + _RESULT_BYTES * depth  # as it is given, and at unit length
    batch = min(max(budget_bytes // 2 // a_query, 1), _QUERY_BATCH)
    return batch, min(max(budget_bytes // 2 // (4 * width), 1), _DECODED_ROWS)


def _search_batch(
    index: "faiss.Index", unit: np.ndarray, depth: int, own: np.ndarray | None, tile_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and cosines of queries of unit length, in order; `own` left out of the `depth` nearest."""
    if isinstance(index, load_faiss().IndexScalarQuantizer) and len(unit) >= _DECODE_FROM:
        ids, cosines = _search_tiles(unit, _decoded_tiles(index, tile_rows), depth)
    else:
        cosines, ids = index.search(unit, depth)
    return _in_order(ids, cosines) if own is None else _without_own(ids, cosines, own)


def _search_tiles(
    unit: np.ndarray, tiles: Iterable[tuple[int, np.ndarray]], depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `depth` rows of largest inner product among all tiles: ids and products [B, depth]."""
    faiss = load_faiss()
    best = faiss.ResultHeap(len(unit), depth, keep_max=True)
    for start, rows in tiles:
        products, ids = faiss.knn(unit, rows, min(depth, len(rows)), faiss.METRIC_INNER_PRODUCT)
        best.add_result(products, ids + start)
    best.finalize()
    return best.I, best.D


def _without_own(ids: np.ndarray, cosines: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Takes the row itself out of its search result [B, k+1].

    A row with exact duplicates need not come first in its own result, nor be in it at all: then the last one goes.
    """
    is_own = ids == own[:, None]
    is_own[~is_own.any(axis=1), -1] = True
    return _in_order(ids[~is_own].reshape(len(ids), -1), cosines[~is_own].reshape(len(ids), -1))


def _in_order(ids: np.ndarray, cosines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest cosine first, equal ones by id; ids int32."""
    order = np.lexsort((ids, -cosines), axis=1)
    return np.take_along_axis(ids, order, axis=1).astype(np.int32), np.take_along_axis(cosines, order, axis=1)
