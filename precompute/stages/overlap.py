"""Stage `overlap`: how far the neighbour lists of a token agree from table to table (figure 13).

The paper has the Jaccard overlap of the 10 nearest in each bank with the 10 nearest in the input embedding. Rank-biased
overlap, which sees the order of all 50, and the comparison of every two tables are ours.
"""

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from precompute.artifacts.overlap import MEASURES, OVERLAP_K, RBO_P
from precompute.moments import moments, sample_deviation
from precompute.parts import Parts
from precompute.search import jaccard, rank_biased_overlap
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.tables import table_name
from tide.frequency import NO_DECILE, NUM_DECILES

GROUPS = (*range(NUM_DECILES), NO_DECILE, None)  # None: all token ids
COLUMNS = {"a": "object", "b": "object", "measure": "object", "decile": "Int8", "mean": "f8", "sd": "f8", "n": "i8"}


def overlaps(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """How far two lists of every token agree, by name of the measure.

    Args:
        a: [V, k] ids, the nearest first.
        b: [V, k] likewise.

    Returns:
        jaccard, of the first `OVERLAP_K`, and rbo, of all: [V] float32, 0 (nothing in common) to 1 (the same).
    """
    return {
        "jaccard": jaccard(a[:, :OVERLAP_K], b[:, :OVERLAP_K]),
        "rbo": rank_biased_overlap(a, b, RBO_P),
    }


def random_overlaps(k: int, size: int) -> dict[str, float]:
    """What `overlaps` is on average of two lists that are drawn at random.

    The number of ids that two sets of m among N have in common is hypergeometric, m^2 / N on average; the rank-biased
    overlap is linear in it.

    Args:
        k: length of the lists.
        size: N, ids that each is drawn from: V - 1, all tokens but one.
    """
    m = min(OVERLAP_K, k)
    ways = [comb(m, common) * comb(size - m, m - common) for common in range(m + 1)]
    expected_jaccard = sum(way / comb(size, m) * common / (2 * m - common) for common, way in enumerate(ways))
    by_depth = sum(depth * RBO_P**depth for depth in range(1, k + 1))
    return {"jaccard": expected_jaccard, "rbo": (k * RBO_P**k + (1 - RBO_P) / RBO_P * by_depth) / size}


def pair_rows(a: str, b: str, measured: dict[str, np.ndarray], deciles: np.ndarray) -> pd.DataFrame:
    """Mean overlap of two tables, of all tokens and by decile.

    Args:
        a: name of one table.
        b: name of the other.
        measured: from `overlaps`.
        deciles: [V] integer, -1 where a token has none.

    Returns:
        A row for each measure and each of `GROUPS`: a, b, measure, decile (-1 none; missing: all token ids), mean, sd
        (sample standard deviation, NaN for n < 2), n (token ids).
    """
    groups = np.where(deciles == NO_DECILE, NUM_DECILES, deciles)
    frames = []
    for measure, values in measured.items():
        weights = (None, values.astype(np.float64), np.square(values, dtype=np.float64))
        n, total, squares = (np.bincount(groups, w, minlength=NUM_DECILES + 1) for w in weights)
        n, total, squares = (np.append(by_group, by_group.sum()) for by_group in (n, total, squares))
        mean, deviations = moments(total, squares, n)
        frame = {"a": a, "b": b, "measure": measure, "decile": pd.array(GROUPS, dtype="Int8")}
        frames.append(pd.DataFrame({**frame, "mean": mean, "sd": sample_deviation(deviations, n), "n": n}))
    return pd.concat(frames, ignore_index=True)


class Overlap(Stage):
    """One piece a table: it and those behind it."""

    name = "overlap"
    needs = ("neighbors", "frequency")

    def inputs(self, context: Context) -> dict[str, Any]:
        """The depth of the Jaccard overlap, and how fast weight falls with rank."""
        return {"jaccard_depth": OVERLAP_K, "rbo_p": RBO_P}

    def parameters(self, context: Context) -> dict[str, Any]:
        """The inputs, and the overlap of random lists."""
        k = context.artifacts.parameters("neighbors")["k"]
        return {**self.inputs(context), "random": random_overlaps(k, context.config.vocab_size - 1)}

    def pieces(self, context: Context) -> Sequence[str]:
        """All tables but the last, by name."""
        return [table_name(table) for table in context.tables.names[:-1]]

    def measure(self, context: Context, piece: str) -> Tables:
        """`pairs`: `pair_rows` of this table with each behind it; of the first, `tokens`: the overlaps themselves."""
        names = [table_name(table) for table in context.tables.names]
        others = names[names.index(piece) + 1 :]
        artifacts, deciles = context.artifacts, context.deciles
        ids, rows = artifacts.tensors("neighbors", piece).get_tensor("ids"), []
        kept = MEASURES if piece == names[0] else ()
        tokens = {name: np.empty((len(ids), len(others)), dtype=np.float32) for name in kept}
        with context.bar(len(others), f"overlap, {piece}", "tables") as bar:
            for column, other in enumerate(others):
                measured = overlaps(ids, artifacts.tensors("neighbors", other).get_tensor("ids"))
                rows.append(pair_rows(piece, other, measured, deciles))
                for name in kept:
                    tokens[name][:, column] = measured[name]
                bar.update()
        pairs = pd.concat(rows, ignore_index=True)
        return {"pairs": pairs, "tokens": tokens} if kept else {"pairs": pairs}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`pairs` of every two tables; `tokens`: jaccard and rbo [V, T-1], of the first table with every other."""
        if not parts.pieces:  # a tied Base model has one table
            return {"pairs": pd.DataFrame(columns=list(COLUMNS)).astype(COLUMNS)}
        pairs = pd.concat([parts.frame(piece, "pairs") for piece in parts.pieces], ignore_index=True)
        return {"pairs": pairs, "tokens": parts.file(parts.pieces[0], "tokens.safetensors")}
