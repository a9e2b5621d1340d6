"""Numerics of the stage `maps`: a UMAP of every table in which a token keeps its place where its neighbours allow.

The input embedding is laid out first, then each bank beside it: its tokens attract and repel each other as in any
UMAP, and each is attracted by its own place in the input embedding's map, as strongly as by its nearest neighbour.
Without this anchor, UMAP's places are arbitrary and movement between two maps means nothing: the same table laid out
twice moves by 0.75 standard deviations. The paper has no maps; this is ours, chosen by measurement (docs/artifacts.md).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from precompute.parts import Parts
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.tables import EMBEDDING, table_name
from tide.cli import UserError

if TYPE_CHECKING:
    from scipy.sparse import coo_matrix

NEIGHBORS = 15  # UMAP's default, the token itself counted; with 30 or 50 the maps were less trustworthy
MIN_DIST, SPREAD = 0.1, 1.0  # UMAP's defaults: how close to each other neighbours may lie
EPOCHS = 200  # UMAP's default for large data
SEED = 0

ANCHOR_STRENGTH = 1.0  # membership of the edge to the own place: that of the nearest neighbour
ALIGNED_LEARNING_RATE = 0.25  # UMAP's is 1; from places that are right for most tokens smaller steps do better
NEGATIVE_SAMPLES = 2.5  # UMAP's 5 over 2: in an aligned map an edge moves one of its ends, UMAP's moves both
SPECTRAL_AT_LEAST = 16  # tokens; fewer start at random places, which does as well

TRUST_K = 15  # neighbours in the map that are checked
TRUST_SAMPLE = 1000  # tokens whose neighbours' ranks are counted: a standard error of under 0.006
TILE_ROWS = 8192  # of a table, that are ranked at a time
SAME_COSINE = 1e-6  # cosines closer than this are equal but for float32 rounding


def load_umap():
    """UMAP, whose import takes several seconds.

    Raises:
        UserError: when it is not installed.
    """
    try:
        import umap
    except ImportError as error:
        raise UserError("The stage maps needs UMAP, which is not installed; run `pip install umap-learn`.") from error
    return umap


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Sets torch's number of threads back, which Numba changes: other stages must give the same bits after a map."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- Maps ----------------------------------------------------------------------------------------------------


@_threads_kept()
def reference_map(ids: np.ndarray, cosines: np.ndarray, seed: int = SEED) -> np.ndarray:
    """A UMAP of the input embedding, by which the banks' maps are laid out.

    Args:
        ids: [V, n] int, the nearest tokens of every token, the nearest first, itself left out (stage `neighbors`).
        cosines: [V, n] float32, their cosine similarity.
        seed: of all random choices. The same input, versions and machine give the same bytes.

    Returns:
        [V, 2] float32, places in UMAP's own unit.

    Raises:
        UserError: when UMAP is not installed.
    """
    umap = load_umap().umap_
    random = np.random.RandomState(seed)
    graph = _fuzzy_graph(ids, cosines)
    a, b = umap.find_ab_params(SPREAD, MIN_DIST)
    places, _ = umap.simplicial_set_embedding(
        data=None,
        graph=graph,
        n_components=2,
        initial_alpha=1.0,
        a=a,
        b=b,
        gamma=1.0,
        negative_sample_rate=5,
        n_epochs=EPOCHS,
        init=_spectral_start(graph, random),
        random_state=random,
        metric="cosine",
        metric_kwds={},
        densmap=False,
        densmap_kwds={},
        output_dens=False,
        parallel=False,  # in parallel the order of steps, and so the map, would change from run to run
    )
    return places


@_threads_kept()
def aligned_map(ids: np.ndarray, cosines: np.ndarray, reference: np.ndarray, seed: int = SEED) -> np.ndarray:
    """A UMAP of a table in which every token is attracted by its place in the reference map.

    UMAP's own optimiser runs over a graph of 2 V vertices: the tokens, which start at their reference places and
    attract and repel each other, and the reference places, which hold still and attract one token each. UMAP's
    attraction fades with distance, so a token whose neighbours agree on another place goes there.

    Args:
        ids: [V, n] int, as for `reference_map`, of this table.
        cosines: [V, n] float32.
        reference: [V, 2] float32, from `reference_map`.
        seed: of all random choices. The same input, versions and machine give the same bytes.

    Returns:
        [V, 2] float32, in the unit and orientation of `reference`.

    Raises:
        UserError: when UMAP is not installed.
    """
    umap = load_umap()
    graph = _fuzzy_graph(ids, cosines)
    size = len(reference)
    tokens = np.arange(size, dtype=np.int32)
    heads = np.concatenate([graph.row, tokens])
    tails = np.concatenate([graph.col, size + tokens])
    strengths = np.concatenate([graph.data, np.full(size, ANCHOR_STRENGTH, dtype=np.float32)])
    used = strengths >= strengths.max() / EPOCHS  # as UMAP does: weaker edges would never be drawn

    places = np.concatenate([reference, reference]).astype(np.float32, order="C")  # (2 V, 2): tokens, then anchors
    a, b = umap.umap_.find_ab_params(SPREAD, MIN_DIST)
    int32 = np.iinfo(np.int32)
    umap.layouts.optimize_layout_euclidean(
        places,
        places,
        heads[used],
        tails[used],
        EPOCHS,
        size,  # tokens repel tokens, not anchors
        umap.umap_.make_epochs_per_sample(strengths[used], EPOCHS),
        a,
        b,
        np.random.RandomState(seed).randint(int32.min + 1, int32.max - 1, 3).astype(np.int64),
        initial_alpha=ALIGNED_LEARNING_RATE,
        negative_sample_rate=NEGATIVE_SAMPLES,
        move_other=False,  # only heads move; an anchor is never one, and a token is, in every edge's other direction
    )
    return places[:size].copy()


def _fuzzy_graph(ids: np.ndarray, cosines: np.ndarray) -> "coo_matrix":
    """UMAP's fuzzy graph of a table: symmetric, [V, V], memberships in (0, 1]."""
    umap = load_umap().umap_
    size, stored = ids.shape
    k = min(NEIGHBORS, stored + 1)
    # UMAP counts the point itself as its first neighbour.
    with_self = np.column_stack([np.arange(size), ids[:, : k - 1]]).astype(np.int32)
    distances = np.maximum(1 - cosines[:, : k - 1], 0)  # rounding makes cosines of more than 1
    distances = np.column_stack([np.zeros(size), distances]).astype(np.float32)
    graph, _, _ = umap.fuzzy_simplicial_set(
        with_self, k, random_state=None, metric="cosine", knn_indices=with_self, knn_dists=distances
    )
    graph = graph.tocoo()
    graph.eliminate_zeros()
    return graph


def _spectral_start(graph: "coo_matrix", random: np.random.RandomState) -> np.ndarray:
    """Where the tokens of the reference map begin: [V, 2] float32.

    UMAP lays connected parts out by the centroids of their vectors, which are not here, or else by numbers that no
    seed decides. Here the largest part is laid out by its spectrum and the tokens of others, few, begin anywhere.
    """
    from scipy.sparse.csgraph import connected_components

    umap = load_umap()
    start = random.uniform(-10, 10, (graph.shape[0], 2))
    _, parts = connected_components(graph, directed=False)
    largest = np.flatnonzero(parts == np.bincount(parts).argmax())
    if len(largest) >= SPECTRAL_AT_LEAST:
        layout = umap.spectral.spectral_layout(None, graph.tocsr()[largest][:, largest], 2, random)
        start[largest] = umap.umap_.noisy_scale_coords(layout, random, max_coord=10, noise=0.0001)
    return start.astype(np.float32)


# --- Measures ------------------------------------------------------------------------------------------------


def in_deviations(places: np.ndarray) -> np.ndarray:
    """All maps in the unit of the reference map's standard deviation, by one transform, so that places compare.

    Args:
        places: [K+1, V, 2], the reference first.

    Returns:
        [K+1, V, 2] float32: the reference has mean 0 and, both axes taken together, standard deviation 1.
    """
    reference = places[0].astype(np.float64)
    center = reference.mean(axis=0)
    deviation = np.sqrt(((reference - center) ** 2).mean())
    return ((places - center) / (deviation or 1)).astype(np.float32)


def movement(coordinates: np.ndarray) -> np.ndarray:
    """How far every token lies from its place in the reference map.

    Args:
        coordinates: [K+1, V, 2], from `in_deviations`.

    Returns:
        [V, K] float32, in standard deviations of the reference map's coordinates.
    """
    return np.linalg.norm(coordinates[1:] - coordinates[:1], axis=2).T.astype(np.float32)


def trust_sample(vocab_size: int, seed: int = SEED) -> np.ndarray:
    """The tokens for which `trustworthiness` is computed: [S] int64, in order, S at most `TRUST_SAMPLE`."""
    size = min(TRUST_SAMPLE, vocab_size)
    return np.sort(np.random.RandomState(seed).choice(vocab_size, size, replace=False)).astype(np.int64)


def trustworthiness(
    coordinates: np.ndarray, sample: np.ndarray, tiles: Callable[[], Iterable[np.ndarray]], k: int = TRUST_K
) -> np.ndarray:
    """Whether the neighbours that a map shows are neighbours in the table (Venna and Kaski 2001), token by token.

    The mean over all tokens is scikit-learn's `trustworthiness` with cosine distance: 1 where the k nearest in the
    map are the k nearest in the table, 0.5 for places at random. Neighbours are sought and ranked among all V tokens;
    only the tokens they are sought for are a sample. Tokens of equal cosine share the best of their ranks.

    Args:
        coordinates: [V, 2], any unit.
        sample: [S], token ids.
        tiles: begins the table anew: its rows, [n, d] float32 at a time, in order. It is read twice.
        k: neighbours in the map, fewer where V is less than 2 k + 1.

    Returns:
        [S] float32.
    """
    size = len(coordinates)
    k = max(1, min(k, (size - 1) // 2))
    near = _nearest_in_map(coordinates, sample, k)
    wanted = _unit_rows(tiles(), np.concatenate([sample, near.ravel()]))
    own, others = wanted[: len(sample)], wanted[len(sample) :].reshape(len(sample), k, -1)
    cosines = np.einsum("sd,skd->sk", own, others) + SAME_COSINE

    ranks, start = np.ones(near.shape), 0  # in the table: one more than the tokens that are nearer
    for tile in tiles():
        found = own @ _unit(tile).T  # (S, n)
        inside = np.flatnonzero((sample >= start) & (sample < start + len(tile)))
        found[inside, sample[inside] - start] = -np.inf  # the token itself is no neighbour
        for column in range(k):
            ranks[:, column] += (found > cosines[:, [column]]).sum(axis=1)
        start += len(tile)
    penalty = np.maximum(ranks - k, 0).sum(axis=1)
    return (1 - 2 / (k * (2 * size - 3 * k - 1)) * penalty).astype(np.float32)


def _nearest_in_map(coordinates: np.ndarray, sample: np.ndarray, k: int) -> np.ndarray:
    """The k tokens nearest to each of a sample in a map, itself left out: [S, k]."""
    from scipy.spatial import KDTree

    _, found = KDTree(coordinates).query(coordinates[sample], k + 1)
    # Behind all others comes the token itself or, where k + 1 others share its place, the last of them.
    order = np.argsort(found == sample[:, None], axis=1, kind="stable")[:, :k]
    return np.take_along_axis(found, order, axis=1)


def _unit_rows(tiles: Iterable[np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Chosen rows of a table, scaled to length one: [N, d] float32."""
    chosen, start = [], 0
    order = np.argsort(ids, kind="stable")
    for tile in tiles:
        inside = order[(ids[order] >= start) & (ids[order] < start + len(tile))]
        chosen.append(_unit(tile[ids[inside] - start]))
        start += len(tile)
    rows = np.concatenate(chosen)
    out = np.empty_like(rows)
    out[order] = rows
    return out


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length one; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


class Maps(Stage):
    """A piece a table; the input embedding's comes first, since the others are laid out beside it."""

    name = "maps"
    needs = ("neighbors",)

    def check(self, context: Context) -> None:
        """UMAP must be installed.

        Raises:
            UserError: as `load_umap`.
        """
        load_umap()

    def inputs(self, context: Context) -> dict[str, Any]:
        """What decides the layouts and their measures."""
        return {
            "neighbors": NEIGHBORS,
            "min_dist": MIN_DIST,
            "spread": SPREAD,
            "epochs": EPOCHS,
            "anchor_strength": ANCHOR_STRENGTH,
            "aligned_learning_rate": ALIGNED_LEARNING_RATE,
            "negative_samples": NEGATIVE_SAMPLES,
            "trust_k": TRUST_K,
            "trust_sample": TRUST_SAMPLE,
            "seed": SEED,
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """Names of tables."""
        return [table_name(table) for table in context.tables.names]

    def rounds(self, context: Context) -> Sequence[Sequence[str]]:
        """The input embedding, then all others."""
        return [EMBEDDING], [piece for piece in self.pieces(context) if piece != EMBEDDING]

    def measure(self, context: Context, piece: str) -> Tables:
        """`map`: places [V, 2] of one table, and trustworthiness [S] of these."""
        stored = context.artifacts.tensors("neighbors", piece)
        ids, cosines = (stored.get_tensor(name)[:, : NEIGHBORS - 1] for name in ("ids", "cosines"))
        if piece == EMBEDDING:
            places = reference_map(ids, cosines)
        else:
            assert context.parts is not None
            places = aligned_map(ids, cosines, context.parts.tensors(EMBEDDING, "map")["places"])
        table = context.tables.names[self.pieces(context).index(piece)]
        sample = trust_sample(len(places))
        rows = context.rows_within(4 * (2 * context.config.hidden_size + len(sample)), most=TILE_ROWS)
        trust = trustworthiness(places, sample, lambda: context.tables.tiles(table, rows))
        return {"map": {"places": places, "trustworthiness": trust}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`maps`: coordinates, movement, trustworthiness and sample, as docs/artifacts.md has them."""
        made = [parts.tensors(piece, "map") for piece in self.pieces(context)]
        coordinates = in_deviations(np.stack([one["places"] for one in made]))
        return {
            "maps": {
                "coordinates": coordinates,
                "movement": movement(coordinates),
                "trustworthiness": np.stack([one["trustworthiness"] for one in made]),
                "sample": trust_sample(coordinates.shape[1]).astype(np.int32),
            }
        }
