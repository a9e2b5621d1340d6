"""Stage `neighbors`: the nearest tokens of every token in every table (table 6), and an index of each for live queries.

Neighbours are of M_k(v), what the model reads. Rows come from the checkpoint's files in tiles; no model is loaded, and
one index is all that is held of a table.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from precompute.parts import Parts
from precompute.search import (
    BUDGET_BYTES,
    RECALL_SAMPLE,
    Tiles,
    build_index,
    load_faiss,
    neighbors_of_rows,
    on_gpu,
    sampled_recall,
    write_index,
)
from precompute.stage import Context, Stage
from precompute.store import OwnForm, Tables
from precompute.tables import table_name

if TYPE_CHECKING:
    import faiss

STORED_K = 50  # neighbours of a token, fewer where V is smaller
RECALL_DEPTHS = (10, 50)
TILE_ROWS = 16_384  # at most: 134 MB at d 2048
TILE_BYTES = 32  # of memory for each value of a tile while it is read, normalised and written into an index


def neighbor_lists(
    index: "faiss.Index", k: int, budget_bytes: int = BUDGET_BYTES, bar: tqdm | None = None
) -> dict[str, np.ndarray]:
    """The nearest tokens of every token.

    Args:
        index: of one table, from `precompute.search`.
        k: at most V - 1.
        budget_bytes: memory beyond the index and what is returned.
        bar: is moved on by one a row.

    Returns:
        ids [V, k] int32 and cosines [V, k] float32, the nearest first, equal cosines by id; the token itself left out.
    """
    ids = np.empty((index.ntotal, k), dtype=np.int32)
    cosines = np.empty((index.ntotal, k), dtype=np.float32)
    for rows, found_ids, found_cosines in neighbors_of_rows(index, k, bar=bar, budget_bytes=budget_bytes):
        ids[rows], cosines[rows] = found_ids, found_cosines
    return {"ids": ids, "cosines": cosines}


def recall_table(name: str, kind: str, ids: np.ndarray, tiles: Iterable[np.ndarray]) -> pd.DataFrame:
    """How many of the exact neighbours are among those that were found.

    Args:
        name: of the table.
        kind: of the index.
        ids: [V, k], the neighbours that were found.
        tiles: the table; walked twice, unless the index is exact.

    Returns:
        Columns table, k (the nearest that are compared), recall (0 to 1), n (tokens: evenly spaced rows; all V of an
        exact index, whose recall is 1 by construction).
    """
    size, most = ids.shape
    depths = sorted({min(depth, most) for depth in RECALL_DEPTHS})
    recalls = [1.0] * len(depths) if kind == "flat" else sampled_recall(ids, tiles, depths)
    n = size if kind == "flat" else min(RECALL_SAMPLE, size)
    return pd.DataFrame({"table": name, "k": depths, "recall": recalls, "n": n})


class Neighbors(Stage):
    """One piece a table."""

    name = "neighbors"
    format = 2

    def check(self, context: Context) -> None:
        """FAISS must be installed.

        Raises:
            UserError: as `load_faiss`.
        """
        load_faiss()

    def inputs(self, context: Context) -> dict[str, Any]:
        """How many neighbours, found how."""
        return {
            "k": min(STORED_K, context.config.vocab_size - 1),
            "metric": "cosine",
            "index": context.job.index,
            "recall_sample": RECALL_SAMPLE,
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """One a table, by its name."""
        return [table_name(table) for table in context.tables.names]

    def measure(self, context: Context, piece: str) -> Tables:
        """The lists, the index and the recall of one table.

        Raises:
            UserError: when memory for a single row is lacking, or a value of the table is not finite.
        """
        (table,) = (table for table in context.tables.names if table_name(table) == piece)
        size, kind, device = context.tables.vocab_size, context.job.index, torch.device(context.job.device)
        tile_rows = context.rows_within(TILE_BYTES * context.tables.hidden_size, most=TILE_ROWS)
        tiles = Tiles(lambda: context.tables.tiles(table, tile_rows))
        index = build_index(tiles, size, kind)
        searched = on_gpu(index, device.index or 0) if device.type == "cuda" else index
        with context.bar(size, f"neighbors, {piece}", "rows") as bar:
            lists = neighbor_lists(searched, self.inputs(context)["k"], context.job.max_memory // 2, bar)
        held = [index]

        def write(path: Path) -> None:
            write_index(held.pop(), path)  # a run holds what it got of a piece until it has the next one

        # The file's whole name is its key: the lists have the name without suffix.
        return {
            piece: lists,
            f"{piece}.faiss": OwnForm("", write),
            "recall": recall_table(piece, kind, lists["ids"], tiles),
        }

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`NAME`: ids, cosines; `NAME.faiss`; `recall`: table, k, recall, n."""
        recalls = pd.concat([parts.frame(piece, "recall") for piece in parts.pieces], ignore_index=True)
        return {name: file for name, file in parts.files().items() if file.suffix != ".parquet"} | {"recall": recalls}
