"""Stage `geometry`: how the tables lie to one another, and how many directions each of them uses (figures 1 and 9).

Everything comes from the checkpoint's files; no model is loaded. Distances (figure 9), spectra and principal angles
are of M_k(v), what the model reads; norms (figure 1) are of the rows as they are stored. Spectra, effective ranks and
principal angles are ours: the paper does not show them. All V rows count, those of types never seen in text too.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from precompute.moments import moments, sample_deviation
from precompute.parts import Parts
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.tables import CheckpointTables, table_name
from tide.frequency import NO_DECILE, NUM_DECILES

PIECE_ROWS = 8192  # token ids of a piece: 1.6 GB of the file at K 24, d 2048 in bfloat16
TILE_ROWS = 256  # token ids whose K + 2 vectors are held at once, at most: 150 MB there
GRAM_ROWS = 2048  # rows of one table that are added to its Gram matrix at once; it decides the rounding of sums
SUBSPACE = 16  # directions of a table that are compared with another's; at most a quarter of d
NUM_GROUPS = NUM_DECILES + 1  # the deciles, then the tokens that have none
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
LEADING = (1, 10, 100)  # directions whose share of the variance is given


def read_vectors(tables: CheckpointTables, start: int, stop: int, raw: bool) -> np.ndarray:
    """The vectors of token ids start..stop-1 in every table: [stop - start, T, d] float32, in the order of `names`."""
    heads = [tables.read(name, start, stop) for name in tables.names if isinstance(name, str)]
    return np.concatenate([np.stack(heads, axis=1), tables.read_banks(start, stop, raw)], axis=1)


def cosine_distances(vectors: np.ndarray) -> np.ndarray:
    """1 - cosine between every two vectors of a token.

    Args:
        vectors: [n, T, d] float32. A row of zeros has cosine 0 with every row, itself included.

    Returns:
        [n, T, T] float32, 0 to 2, symmetric; off by less than 1e-6. A token's does not depend on the others in the
        tile.
    """
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1)
    return 1 - np.clip(unit @ unit.transpose(0, 2, 1), -1, 1)


def group_sums(values: np.ndarray, deciles: np.ndarray) -> dict[str, np.ndarray]:
    """Sums over the tokens of each group.

    Args:
        values: [n, ...].
        deciles: [n] integer, -1 where a token has none.

    Returns:
        sums and squares [11, ...] float64 and n [11] int64: the deciles 0..9, then the tokens without one.
    """
    values = values.astype(np.float64)
    groups = np.where(deciles == NO_DECILE, NUM_DECILES, deciles)
    members = [values[groups == group] for group in range(NUM_GROUPS)]
    return {
        "sums": np.stack([rows.sum(axis=0) for rows in members]),
        "squares": np.stack([np.square(rows).sum(axis=0) for rows in members]),
        "n": np.array([len(rows) for rows in members]),
    }


def norm_table(norms: np.ndarray, deciles: np.ndarray, names: Sequence[str]) -> pd.DataFrame:
    """The norms of each table by decile (figure 1).

    Args:
        norms: [T, V] float32.
        deciles: [V] integer, -1 where a token has none.
        names: of the tables.

    Returns:
        One row a (table, decile), the deciles 0..9 and -1: table, decile, mean, sd, n (token ids), and quantiles
        q05, q25, q50, q75, q95 (linear between neighbours).
    """
    rows = []
    for name, values in zip(names, norms.astype(np.float64), strict=True):
        for decile in (*range(NUM_DECILES), NO_DECILE):
            group = values[deciles == decile]
            sd = group.std(ddof=1) if len(group) > 1 else np.nan
            quantiles = np.quantile(group, list(QUANTILES.values())) if len(group) else [np.nan] * len(QUANTILES)
            rows.append((name, decile, group.mean() if len(group) else np.nan, sd, len(group), *quantiles))
    return pd.DataFrame(rows, columns=["table", "decile", "mean", "sd", "n", *QUANTILES])


def spectra(tiles: Iterable[np.ndarray], width: int, directions: int) -> dict[str, np.ndarray]:
    """Singular values of a table, as it is and without its mean row, and its leading directions.

    They come from the d x d Gram matrix, multiplied and summed in float64. That squares the condition: of the
    singular values, those below about 1e-7 of the largest uncentred one are noise.

    Args:
        tiles: its rows in order, [n, d] float32 each.
        width: d.
        directions: r, how many leading directions to give.

    Returns:
        uncentered and centered [min(V, d)] float64, descending; basis [d, r] float64, the first r right singular
        vectors of the centred table as columns.
    """
    gram, total, count = np.zeros((width, width)), np.zeros(width), 0
    for tile in tiles:
        rows = tile.astype(np.float64)
        gram += rows.T @ rows
        total += rows.sum(axis=0)
        count += len(rows)
    values, vectors = np.linalg.eigh(gram - np.outer(total, total) / count)
    rank = min(count, width)
    return {
        "uncentered": _roots(np.linalg.eigvalsh(gram))[:rank],
        "centered": _roots(values)[:rank],
        "basis": vectors[:, ::-1][:, :directions],
    }


def _roots(eigenvalues: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(eigenvalues[::-1], 0))


def rank_row(singular_values: np.ndarray) -> dict[str, float]:
    """How many directions a table uses, in three measures.

    Args:
        singular_values: [n], descending.

    Returns:
        effective_rank, exp of the entropy of the singular values as shares of their sum (Roy & Vetterli 2007), 1 to n;
        participation_ratio, 1 over the sum of the squared shares of the variance, 1 to n; top_1, top_10 and top_100,
        the share of the variance (squared singular values) in the first so many directions. All NaN for a table of
        zeros.
    """
    if not singular_values.any():
        return dict.fromkeys(("effective_rank", "participation_ratio", *(f"top_{m}" for m in LEADING)), np.nan)
    shares = singular_values / singular_values.sum()
    variance = singular_values**2 / (singular_values**2).sum()
    used = shares[shares > 0]
    return {
        "effective_rank": float(np.exp(-(used * np.log(used)).sum())),
        "participation_ratio": float(1 / (variance**2).sum()),
        **{f"top_{m}": float(variance[:m].sum()) for m in LEADING},
    }


def principal_cosines(bases: np.ndarray) -> np.ndarray:
    """Cosines of the principal angles between every two subspaces.

    Args:
        bases: [T, d, r], orthonormal columns.

    Returns:
        [T, T, r] float64, 0 to 1, descending: 1 is a direction in common. Two random subspaces of r directions have
        a mean squared cosine of r/d.
    """
    products = np.einsum("adr,bds->abrs", bases, bases)
    return np.clip(np.linalg.svd(products, compute_uv=False), 0, 1)


def subspace_size(hidden_size: int) -> int:
    """r, how many directions are compared at width d: 16, at most a quarter of d, at least one."""
    return max(1, min(SUBSPACE, hidden_size // 4))


class Geometry(Stage):
    """Pieces are runs of token ids, for distances and norms, and tables, for spectra."""

    name = "geometry"
    needs = ("frequency",)

    def inputs(self, context: Context) -> dict[str, Any]:
        """How many directions are compared, and the quantiles."""
        return {"subspace": subspace_size(context.config.hidden_size), "quantiles": list(QUANTILES.values())}

    def pieces(self, context: Context) -> Sequence[str]:
        """Runs of `PIECE_ROWS` token ids, then every table."""
        size = context.tables.vocab_size
        edges = [*range(0, size, PIECE_ROWS), size]
        rows = [f"rows-{a:08d}-{b:08d}" for a, b in itertools.pairwise(edges)]
        return [*rows, *(f"table-{table_name(table)}" for table in context.tables.names)]

    def measure(self, context: Context, piece: str) -> Tables:
        """`distances` and `norms` of a run of token ids, or `spectrum` of a table."""
        kind, name = piece.split("-", 1)
        if kind == "rows":
            start, stop = map(int, name.split("-"))
            return self._rows(context, start, stop)
        tables = context.tables
        table = next(table for table in tables.names if table_name(table) == name)
        with context.bar(tables.vocab_size, f"geometry, {name}", "rows") as bar:

            def tiles() -> Iterable[np.ndarray]:
                for tile in tables.tiles(table, GRAM_ROWS):
                    yield tile
                    bar.update(len(tile))

            return {"spectrum": spectra(tiles(), tables.hidden_size, subspace_size(tables.hidden_size))}

    def _rows(self, context: Context, start: int, stop: int) -> Tables:
        tables = context.tables
        count = len(tables.names)
        step = context.rows_within(count * 4 * (4 * tables.hidden_size + 3 * count), most=TILE_ROWS)
        distances = np.empty((stop - start, count, count), dtype=np.float32)
        norms = np.empty((count, stop - start), dtype=np.float32)
        with context.bar(stop - start, "geometry, distances", "token ids") as bar:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                here = slice(first - start, last - start)
                distances[here] = cosine_distances(read_vectors(tables, first, last, raw=False))
                norms[:, here] = np.linalg.norm(read_vectors(tables, first, last, raw=True), axis=-1).T
                bar.update(last - first)
        return {"distances": group_sums(distances, context.deciles[start:stop]), "norms": {"norms": norms}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`geometry`: tensors; `norms`: `norm_table`; `ranks`: `rank_row` of every table, centred and not."""
        names = [table_name(table) for table in context.tables.names]
        runs = [piece for piece in parts.pieces if piece.startswith("rows-")]
        norms = np.concatenate([parts.tensors(piece, "norms")["norms"] for piece in runs], axis=1)
        found = [parts.tensors(f"table-{name}", "spectrum") for name in names]
        spectrum = {kind: np.stack([one[kind] for one in found]) for kind in ("uncentered", "centered", "basis")}
        return {
            "geometry": {
                **_distance_tensors([parts.tensors(piece, "distances") for piece in runs]),
                "norms": norms,
                "uncentered": spectrum["uncentered"],
                "centered": spectrum["centered"],
                "principal_cosines": principal_cosines(spectrum["basis"]),
            },
            "norms": norm_table(norms, context.deciles, names),
            "ranks": _rank_table(spectrum, names),
        }


def _distance_tensors(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The groups', and last over all token ids: distance_mean and distance_sd [12, T, T], distance_n [12]."""
    sums, squares, n = (np.sum([piece[name] for piece in pieces], axis=0) for name in ("sums", "squares", "n"))
    sums, squares, n = (np.concatenate([values, values.sum(axis=0, keepdims=True)]) for values in (sums, squares, n))
    mean, deviations = moments(sums, squares, n)
    return {"distance_mean": mean, "distance_sd": sample_deviation(deviations, n), "distance_n": n}


def _rank_table(spectrum: Mapping[str, np.ndarray], names: Sequence[str]) -> pd.DataFrame:
    rows = [
        {"table": name, "centered": centered, **rank_row(values)}
        for centered in (True, False)
        for name, values in zip(names, spectrum["centered" if centered else "uncentered"], strict=True)
    ]
    return pd.DataFrame(rows)
