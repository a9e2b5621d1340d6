"""The tables of an export, made of the artifacts alone: each one data frame or, where it may be large, parts of it.

Parts have the same columns and types, and there is at least one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from precompute.artifacts import Artifacts
from precompute.artifacts.overlap import MEASURES as OVERLAPS
from precompute.artifacts.routing import MEASURES
from precompute.tables import table_name
from precompute.tidy import long_table

PART_ROWS = 500_000  # of a large table at once, about 30 MB
Frames = pd.DataFrame | Iterator[pd.DataFrame]


def stored(stage: str, name: str | None = None) -> Callable[[Artifacts], pd.DataFrame]:
    """A table that is stored as it is."""
    return lambda artifacts: artifacts.frame(stage, name)


def parts(size: int, rows_each: int) -> Iterator[tuple[int, int]]:
    """Runs start, stop of 0..size-1, of each of which come so many rows; one empty run where there is nothing."""
    step = max(1, PART_ROWS // max(rows_each, 1))
    for start in range(0, max(size, 1), step):
        yield start, min(start + step, size)


def named(artifacts: Artifacts) -> list[str]:
    """Names of the stored tables, in their order."""
    return [table_name(table) for table in artifacts.tables]


# --- The text and the routers ------------------------------------------------------------------------------------


def text(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """The held-out text, token by token."""
    tokens = artifacts.tensors("text", "tokens")
    starts, ids = tokens.get_tensor("file_starts"), tokens.get_slice("tokens")
    domains = np.array(artifacts.domains, dtype=object)
    for start, stop in parts(int(starts[-1]), 1):
        positions = np.arange(start, stop)
        files = np.searchsorted(starts, positions, side="right") - 1
        yield pd.DataFrame({"position": positions, "domain": domains[files], "token_id": ids[start:stop]})


def routing_by_token(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """Routing weights of the tokens that the text holds."""
    layers, banks = range(artifacts.num_layers), range(artifacts.num_banks + 1)
    for ids, values in _of_seen_tokens(artifacts, ("mean", "sd"), len(layers) * len(banks)):
        yield long_table({"token_id": ids, "layer": layers, "bank": banks}, **values)


def routing_measures_by_token(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """Entropy and size of the injection of the tokens that the text holds."""
    layers = range(artifacts.num_layers)
    for measure in MEASURES:
        for ids, values in _of_seen_tokens(artifacts, (f"{measure}_mean", f"{measure}_sd"), len(layers)):
            columns = {name.removeprefix(f"{measure}_"): array for name, array in values.items()}
            yield long_table({"measure": [measure], "token_id": ids, "layer": layers}, **columns)


def _of_seen_tokens(
    artifacts: Artifacts, names: tuple[str, ...], rows_each: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Ids of the tokens that the text holds, and their rows of some tensors [V, ...], and n, in parts."""
    tensors = artifacts.tensors("routing")
    n = tensors.get_tensor("n")
    for start, stop in parts(artifacts.vocab_size, rows_each):
        inside = np.flatnonzero(n[start:stop] > 0)
        values = {name: tensors.get_slice(name)[start:stop][inside] for name in names}
        axes = next(iter(values.values())).ndim - 1
        yield start + inside, {**values, "n": n[start:stop][inside].reshape(-1, *[1] * axes)}


def by_group(groups: Callable[[Artifacts, str | None], pd.DataFrame]) -> Callable[[Artifacts], pd.DataFrame]:
    """A table of `RoutingReader` for every grouping."""

    def frame(artifacts: Artifacts) -> pd.DataFrame:
        found = [(by, groups(artifacts, by)) for by in (None, "decile", "domain", "word")]
        frames = [rows.assign(by=by or "all", group=rows["group"].astype(str)) for by, rows in found]
        return _keys_first(pd.concat(frames, ignore_index=True), ["by", "group"])

    return frame


def mean_injection(artifacts: Artifacts) -> pd.DataFrame:
    """The mean vector that every (layer, bank) injects."""
    mean = artifacts.mean_injection()
    layers, banks, width = mean.shape
    return long_table({"layer": range(layers), "bank": range(banks), "dimension": range(width)}, mean=mean)


def _keys_first(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    return frame[[*keys, *frame.columns.difference(keys, sort=False)]]


# --- What the banks specialise in --------------------------------------------------------------------------------


def top_contexts(artifacts: Artifacts) -> pd.DataFrame:
    """The strongest positions of every (layer, bank), by weight and by size."""
    most = artifacts.parameters("specialisation")["top_contexts"]
    frames = []
    for by, banks in (("weight", artifacts.num_banks + 1), ("size", artifacts.num_banks)):
        for layer in range(artifacts.num_layers):
            for bank in range(banks):
                rows = artifacts.top_contexts(layer, bank, by, most)  # type: ignore[arg-type]
                frames.append(rows.assign(by=by, layer=layer, bank=bank, rank=np.arange(1, len(rows) + 1)))
    return _keys_first(pd.concat(frames, ignore_index=True), ["by", "layer", "bank", "rank"])


def null_contexts(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """The positions where every token takes most and least of the memory."""
    tensors, layers = artifacts.tensors("specialisation", "tokens"), [*range(artifacts.num_layers), -1]
    n = tensors.get_tensor("n")
    for end in ("lowest", "highest"):
        for start, stop in parts(artifacts.vocab_size, len(layers)):
            inside = np.flatnonzero(n[start:stop] > 0)
            names = {"null_weight": f"null_{end}", "position": f"null_{end}_position"}
            values = {name: tensors.get_slice(where)[start:stop][inside] for name, where in names.items()}
            yield long_table(
                {"end": [end], "token_id": start + inside, "layer": layers}, **values, n=n[start:stop][inside, None]
            )


def mass_split(artifacts: Artifacts) -> pd.DataFrame:
    """How the mass of every (layer, bank) splits, for every grouping."""
    frames = []
    for of in ("weight", "size"):
        for by in ("decile", "domain", "kind", "before"):
            rows = artifacts.mass_split(by, of)  # type: ignore[arg-type]
            frames.append(rows.assign(of=of, by=by, group=rows["group"].astype(str)))
    return _keys_first(pd.concat(frames, ignore_index=True), ["of", "by"])


def token_kinds(artifacts: Artifacts) -> pd.DataFrame:
    """The kind of every token id."""
    names = np.array(artifacts.parameters("specialisation")["kinds"], dtype=object)
    return pd.DataFrame({"token_id": np.arange(artifacts.vocab_size), "kind": names[artifacts.token_kinds()]})


# --- The tables --------------------------------------------------------------------------------------------------


def neighbors(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """The stored neighbours of every token in every table."""
    for name in named(artifacts):
        tensors = artifacts.tensors("neighbors", name)
        ids, cosines = tensors.get_slice("ids"), tensors.get_slice("cosines")
        vocab_size, k = ids.get_shape()
        for start, stop in parts(vocab_size, k):
            axes: dict[str, Any] = {"table": [name], "token_id": range(start, stop), "rank": range(1, k + 1)}
            yield long_table(axes, neighbor_id=ids[start:stop], cosine=cosines[start:stop])


def overlap(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """Overlap of the neighbours of every token in every other table with those in the input embedding."""
    others = named(artifacts)[1:]
    for start, stop in parts(artifacts.vocab_size if others else 0, len(others)):
        values = {name: np.empty((0, len(others)), dtype=np.float32) for name in OVERLAPS}
        if others:
            tensors = artifacts.tensors("overlap", "tokens")
            values = {name: tensors.get_slice(name)[start:stop] for name in OVERLAPS}
        yield long_table({"token_id": range(start, stop), "table": others}, **values)


def cosine_distance(artifacts: Artifacts) -> pd.DataFrame:
    """Mean cosine distance of every two tables, over all tokens and over those of a decile."""
    groups = {"all": None, **{str(decile): decile for decile in (*range(10), -1)}}
    frames = [artifacts.cosine_distance(decile).assign(group=name) for name, decile in groups.items()]
    return _keys_first(pd.concat(frames, ignore_index=True), ["group"])


def norms(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """The norm of every row."""
    lengths = artifacts.tensors("geometry").get_slice("norms")
    for start, stop in parts(artifacts.vocab_size, len(artifacts.tables)):
        yield long_table({"token_id": range(start, stop), "table": named(artifacts)}, norm=lengths[:, start:stop].T)


def spectrum(artifacts: Artifacts) -> pd.DataFrame:
    """Singular values, of the tables as they are and without their mean row."""
    return pd.concat([artifacts.spectrum(c).assign(centered=c) for c in (True, False)], ignore_index=True)


def principal_cosines(artifacts: Artifacts) -> pd.DataFrame:
    """Cosines of the principal angles of every two tables."""
    cosines = artifacts.tensors("geometry").get_tensor("principal_cosines")
    axes = {"a": named(artifacts), "b": named(artifacts), "index": range(cosines.shape[2])}
    return long_table(axes, cosine=cosines)


def maps(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """Where every token lies in every table's map."""
    for table, name in zip(artifacts.tables, named(artifacts), strict=True):
        places = artifacts.map_of(table)
        axes: dict[str, Any] = {"table": [name], "token_id": range(len(places))}
        yield long_table(axes, x=places[:, 0], y=places[:, 1])


def movement(artifacts: Artifacts) -> Iterator[pd.DataFrame]:
    """How far every token lies from its place in the input embedding's map."""
    moved, others = artifacts.tensors("maps").get_tensor("movement"), named(artifacts)[1:]  # (V, T-1)
    for start, stop in parts(len(moved), len(others)):
        yield long_table({"token_id": range(start, stop), "table": others}, distance=moved[start:stop])


def trustworthiness(artifacts: Artifacts) -> pd.DataFrame:
    """How far each map's neighbours are neighbours in its table."""
    return artifacts.trustworthiness().assign(table=named(artifacts))
