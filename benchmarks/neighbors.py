"""Whether the search for neighbours costs more than its matrix product: all cosines of a table, the nearest kept.

    python -m benchmarks.neighbors [--vocab 131072 --hidden 2048] [--queries 2048] [--rounds 3] [--threads 2]

The claim: at least 0.9 of the speed of the bare matrix product of the same queries and rows, in at most 4 GiB beyond
the table, at V 131,072, d 2,048, k 50. All 131,072 queries are 70 TFLOP; the time goes with their number, so that a
sample of evenly spaced rows tells it.

The rows are random (the speed does not depend on them) or the input embedding of --checkpoint. The bare product takes
the blocks that FAISS takes, reads the same memory, and writes every block into the same output. On the CPU it is made
twice, by torch and by NumPy, whose BLAS differ, and the one that is faster by its median counts. Sides are interleaved,
in an order that moves by one from round to round; reported is the median over rounds. The detail has the same by CPU
seconds, which with one thread say most on a machine that has other work.

The last line is JSON: {"name": "neighbors", "ratios": {"bare_product/search": ...}, "detail": {...}}.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from benchmarks.decode import summary
from precompute.measure import Cost, peak_resident_bytes
from precompute.search import Tiles, build_index, load_faiss, on_gpu, search
from precompute.tables import EMBEDDING, CheckpointTables
from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import TideConfig

TILE_ROWS = 4096
LIMIT, LIMIT_GIB = 0.9, 4.0
CHECKED_QUERIES = 64  # whose cosines are compared with the bare product's


def random_tiles(vocab_size: int, hidden_size: int) -> Tiles:
    """A table of standard normal values, the same in every walk."""

    def make() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for start in range(0, vocab_size, TILE_ROWS):
            yield rng.standard_normal((min(TILE_ROWS, vocab_size - start), hidden_size), dtype=np.float32)

    return Tiles(make)


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` returns; its seconds, and the memory that it takes at most beyond what there was, in GiB."""
    with Cost() as cost:
        before = peak_resident_bytes()
        made = work()
    return made, {"seconds": cost.seconds, "peak_extra_gib": round((cost.peak_memory_mb * 1e6 - before) / 2**30, 3)}


class BareProduct:
    """All inner products of queries and rows, in FAISS's blocks; every block is written into the same memory."""

    def __init__(self, queries: np.ndarray, table: np.ndarray, device: str):
        blocks = load_faiss().cvar
        self._query_rows, self._table_rows = (
            blocks.distance_compute_blas_query_bs,
            blocks.distance_compute_blas_database_bs,
        )
        self._queries, self._table = queries, table
        self._on_device = torch.from_numpy(queries).to(device), torch.from_numpy(table).to(device)
        out = np.empty((min(self._query_rows, len(queries)), self._table_rows), dtype=np.float32)
        self._out, self._torch_out = out, torch.from_numpy(out).to(device)
        self.sides = {"torch": self.by_torch} | ({"numpy": self.by_numpy} if device == "cpu" else {})

    def by_torch(self) -> None:
        """By torch's BLAS: oneMKL on the CPU, cuBLAS on a GPU."""
        queries, table = self._on_device
        for q, rows in self._blocks():
            a, b = queries[q], table[rows]
            torch.mm(a, b.T, out=self._torch_out[: len(a), : len(b)])
        if table.is_cuda:
            torch.cuda.synchronize()

    def by_numpy(self) -> None:
        """By NumPy's BLAS: OpenBLAS, as a rule."""
        for q, rows in self._blocks():
            a, b = self._queries[q], self._table[rows]
            np.matmul(a, b.T, out=self._out[: len(a), : len(b)])

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        for q in range(0, len(self._queries), self._query_rows):
            for row in range(0, len(self._table), self._table_rows):
                yield slice(q, q + self._query_rows), slice(row, row + self._table_rows)


def largest_difference(queries: np.ndarray, own: np.ndarray, table: np.ndarray, cosines: np.ndarray) -> float:
    """Between the cosines [Q, k] that were found and those of the matrix product, sorted."""
    products = queries @ table.T
    products[np.arange(len(own)), own] = -np.inf
    return float(np.abs(np.sort(products, axis=1)[:, : -cosines.shape[1] - 1 : -1] - cosines).max())


def measure(tiles: Tiles, size: int, num_queries: int, k: int, rounds: int, device: str) -> tuple[list[float], dict]:
    """Interleaved rounds of search and product.

    Returns:
        The ratio bare product / search of every round, and what else was measured.
    """
    faiss = load_faiss()
    index, building = measured(lambda: build_index(tiles, size))
    table = faiss.rev_swig_ptr(index.get_xb(), size * index.d).reshape(size, index.d)
    building["peak_extra_gib"] = round(building["peak_extra_gib"] - table.nbytes / 2**30, 3)
    own = np.linspace(0, size - 1, num_queries).astype(np.int64)
    queries = table[own]
    searched = on_gpu(index) if device == "cuda" else index
    bare = BareProduct(queries, table, device)

    (_, cosines), searching = measured(lambda: search(searched, queries, k, own))  # warms up, too
    few = slice(0, CHECKED_QUERIES)
    difference = largest_difference(queries[few], own[few], table, cosines[few])
    sides: dict[str, Callable[[], Any]] = {"search": lambda: search(searched, queries, k, own), **bare.sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in tqdm(range(rounds), desc="rounds", disable=None):
        first = number % len(sides)
        for side in [*sides, *sides][first : first + len(sides)]:
            start, cpu_start = time.perf_counter(), time.process_time()
            sides[side]()
            seconds[side].append(time.perf_counter() - start)
            cpu_seconds[side].append(time.process_time() - cpu_start)
    faster = min(bare.sides, key=lambda side: statistics.median(seconds[side]))
    ratios, cpu_ratios = (
        [product / searched for product, searched in zip(taken[faster], taken["search"], strict=True)]
        for taken in (seconds, cpu_seconds)
    )
    tera = 2 * num_queries * size * index.d / 1e12
    return ratios, {
        "bare_product": faster,
        "seconds": {side: summary(taken) for side, taken in seconds.items()},
        "cpu_seconds": {side: summary(taken) for side, taken in cpu_seconds.items()},
        "tflops": {side: round(tera / statistics.median(taken), 4) for side, taken in seconds.items()},
        "ratio_spread": summary(ratios),
        "cpu_ratio_spread": summary(cpu_ratios),
        "peak_extra_gib": searching["peak_extra_gib"],
        "building": building,
        "largest_cosine_difference": difference,
        "vocab": size,
        "hidden": index.d,
        "queries": num_queries,
        "k": k,
        "table_gib": round(table.nbytes / 2**30, 3),
        "whole_table_seconds": round(statistics.median(seconds["search"]) * size / num_queries),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.neighbors", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vocab", type=whole_number(100), default=131_072, help="rows of the table (default 131072)")
    parser.add_argument("--hidden", type=whole_number(1), default=2048, help="width of the table (default 2048)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="search its input embedding instead")
    parser.add_argument("--queries", type=whole_number(1), default=2048, help="evenly spaced rows (default 2048)")
    parser.add_argument("--k", type=whole_number(1), default=50, help="neighbours to find (default 50)")
    parser.add_argument("--rounds", type=whole_number(1), default=3, help="default 3")
    parser.add_argument("--threads", type=whole_number(1), help="threads of the CPU, all sides (default: their own)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    args = build_parser().parse_args(argv)
    faiss = load_faiss()
    if args.device == "cuda" and not (torch.cuda.is_available() and getattr(faiss, "get_num_gpus", int)()):
        raise UserError("--device cuda needs a GPU that torch and FAISS were built for; take --device cpu.")
    if args.checkpoint:
        tables = CheckpointTables(args.checkpoint, TideConfig.from_pretrained(args.checkpoint))
        tiles, size = Tiles(lambda: tables.tiles(EMBEDDING, TILE_ROWS)), tables.vocab_size
    else:
        tiles, size = random_tiles(args.vocab, args.hidden), args.vocab
    if args.k >= size:
        raise UserError(f"--k {args.k} is too large for a table of {size} rows; take {size - 1} at most.")
    with threadpool_limits(args.threads):
        ratios, detail = measure(tiles, size, min(args.queries, size), args.k, args.rounds, args.device)
        detail["threads"] = faiss.omp_get_max_threads()
    detail |= {
        "table": str(args.checkpoint.name) if args.checkpoint else "random",
        "limits": {"bare_product/search": LIMIT, "peak_extra_gib": LIMIT_GIB},
        "rounds": args.rounds,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "dtype": "float32",
        "faiss": faiss.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    ratio = round(statistics.median(ratios), 3)
    print(f"search at {ratio:.3f} of the bare product's speed, {detail['peak_extra_gib']} GiB extra", file=sys.stderr)
    print(json.dumps({"name": "neighbors", "ratios": {"bare_product/search": ratio}, "detail": detail}))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
