"""The stage `specialisation` against a few lines of brute force, and what its reader answers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from precompute import Artifacts
from precompute.kinds import KINDS
from precompute.pipeline import run
from precompute.stages.specialisation import (
    CONTEXTS_PER_TOKEN,
    LEAST_BEFORE,
    TOP_CONTEXTS,
    Groups,
    combine,
    specialists_of,
)
from precompute.text import HeldOutText
from tests.conftest import tiny_model
from tide.checkpoint import load_checkpoint
from tide.cli import UserError

V, L, K, WINDOW = 61, 3, 3, 20


class Everything:
    """Every position's weights and sizes, one window a forward."""

    def __init__(self, model, text: HeldOutText):
        self.tokens = text.read(0, len(text))
        weights, sizes, before, domain = [], [], [], []
        for batch in text.batches(range(len(text.window_starts)), 1):
            trace = model.trace(torch.from_numpy(batch.input_ids))
            weights.append(trace.routing[0].numpy())
            injected = trace.routing[0, ..., :-1, None] * trace.memory[0].unsqueeze(1)  # (T, L, K, d)
            sizes.append(injected.norm(dim=-1).numpy())
            before += range(batch.input_ids.shape[1])
            domain += batch.domains.tolist() * batch.input_ids.shape[1]
        self.weights, self.sizes = np.concatenate(weights), np.concatenate(sizes)
        self.before, self.domain = np.array(before), np.array(domain)

    def top(self, values: np.ndarray) -> list[int]:
        """Positions of the highest values [N], by the rules of the lists."""
        chosen: list[int] = []
        for place in sorted(np.flatnonzero(self.before >= LEAST_BEFORE), key=lambda i: (-values[i], i)):
            if [self.tokens[i] for i in chosen].count(self.tokens[place]) < CONTEXTS_PER_TOKEN:
                chosen.append(int(place))
        return chosen[:TOP_CONTEXTS]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def text() -> HeldOutText:
    """Two files of 25 windows; token ids 50 and up do not occur, few do often."""
    tokens = np.random.default_rng(0).geometric(0.08, 987).clip(max=50) - 1
    return HeldOutText(tokens.astype(np.int32), np.array([0, 333, 987]), ["a", "b"], WINDOW)


@pytest.fixture(scope="module")
def groups() -> Groups:
    rng = np.random.default_rng(1)
    return Groups(rng.integers(-1, 10, V).astype(np.int8), rng.integers(0, len(KINDS), V).astype(np.int8), 2, WINDOW)


@pytest.fixture(scope="module")
def tables(model, text, groups):
    part = specialists_of(model, text, range(len(text.window_starts)), groups, batch_tokens=1)
    return combine([part], L, K, groups.kinds)


@pytest.fixture(scope="module")
def everything(model, text) -> Everything:
    return Everything(model, text)


def test_contexts_are_those_of_a_full_sort(tables, everything, model):
    contexts = tables["contexts"]
    norms = model.model.memory(torch.arange(V)).norm(dim=-1).detach().numpy()
    for layer in range(L):
        for bank in range(K + 1):
            places = everything.top(everything.weights[:, layer, bank])
            assert contexts["weight_position"][layer, bank].tolist() == places
            assert contexts["weight_token_id"][layer, bank].tolist() == everything.tokens[places].tolist()
            assert (contexts["weight_weight"][layer, bank] == everything.weights[places, layer, bank]).all()
            sizes = everything.sizes[places, layer, bank] if bank < K else 0
            np.testing.assert_allclose(contexts["weight_size"][layer, bank], sizes, rtol=1e-5)
        for bank in range(K):
            places = contexts["size_position"][layer, bank]
            sizes = everything.weights[:, layer, bank] * norms[everything.tokens, bank]
            by_hand = everything.top(sizes)
            np.testing.assert_allclose(contexts["size_size"][layer, bank], sizes[by_hand], rtol=1e-5)
            np.testing.assert_allclose(contexts["size_size"][layer, bank], sizes[places], rtol=1e-5)
            np.testing.assert_allclose(
                contexts["size_weight"][layer, bank], everything.weights[places, layer, bank], rtol=1e-5
            )


def test_null_contexts_are_the_extremes_of_every_token(tables, everything):
    tokens = tables["tokens"]
    null = everything.weights[..., -1]
    null = np.concatenate([null, null.mean(axis=1, dtype=np.float64, keepdims=True).astype(np.float32)], axis=1)
    for token in range(V):
        places = np.flatnonzero((everything.tokens == token) & (everything.before >= LEAST_BEFORE))
        assert tokens["n"][token] == len(places)
        for end, extreme in (("lowest", np.argmin), ("highest", np.argmax)):
            found, positions = tokens[f"null_{end}"][token], tokens[f"null_{end}_position"][token]
            if not len(places):
                assert np.isnan(found).all()
                assert (positions == -1).all()
                continue
            assert positions.tolist() == places[extreme(null[places], axis=0)].tolist()
            assert (found == null[positions, np.arange(L + 1)]).all()
    assert (tokens["n"] == 0).any()


def test_norms_are_those_of_the_bank_vectors(tables, everything, model):
    norms = model.model.memory(torch.arange(V)).norm(dim=-1).detach().numpy()
    occurs = np.isin(np.arange(V), everything.tokens)
    np.testing.assert_allclose(tables["tokens"]["norm"][occurs], norms[occurs], rtol=1e-5)
    assert np.isnan(tables["tokens"]["norm"][~occurs]).all()


def test_sums_are_those_over_the_positions_of_each_group(tables, everything, groups):
    deciles = groups.deciles[everything.tokens]
    of_position = {
        "decile": np.where(deciles < 0, 10, deciles),
        "domain": everything.domain,
        "kind": groups.kinds[everything.tokens],
        "before": np.array([int(before).bit_length() for before in everything.before]),
    }
    for grouping, group in of_position.items():
        n = tables["groups"][f"{grouping}_n"]
        assert n.sum() == len(everything.tokens)
        for number in range(len(n)):
            inside = group == number
            assert n[number] == inside.sum()
            for name, values in (("weight", everything.weights), ("size", everything.sizes)):
                values = values[inside].astype(np.float64)
                sums, squares = (tables["groups"][f"{grouping}_{name}_{what}"][number] for what in ("sum", "squares"))
                np.testing.assert_allclose(sums, values.sum(axis=0), rtol=1e-5, atol=1e-12)
                np.testing.assert_allclose(squares, (values**2).sum(axis=0), rtol=1e-5, atol=1e-12)


def test_pieces_make_what_the_whole_makes(model, text, groups, tables):
    count = len(text.window_starts)
    cuts = [0, 7, 18, 19, count]  # the second file begins within the second piece
    parts = [
        specialists_of(model, text, range(start, stop), groups, batch_tokens=1)
        for start, stop in itertools.pairwise(cuts)
    ]
    combined = combine(parts, L, K, groups.kinds)
    for file in ("contexts", "tokens"):
        for name, array in tables[file].items():
            np.testing.assert_array_equal(combined[file][name], array, err_msg=name)
    for name, array in tables["groups"].items():
        np.testing.assert_allclose(combined["groups"][name], array, rtol=1e-12, err_msg=name)


def test_batches_find_the_same(model, text, groups, tables):
    part = specialists_of(model, text, range(len(text.window_starts)), groups, batch_tokens=300)
    batched = combine([part], L, K, groups.kinds)
    for file in ("contexts", "groups", "tokens"):
        for name, array in tables[file].items():
            if not name.endswith(("position", "token_id")):  # equal to rounding, so that neighbours may change places
                np.testing.assert_allclose(batched[file][name], array, rtol=1e-3, err_msg=name)


def test_a_text_shorter_than_the_least_context_has_sums_alone(model, groups):
    short = HeldOutText(np.arange(LEAST_BEFORE, dtype=np.int32), np.array([0, LEAST_BEFORE]), ["a"], WINDOW)
    part = specialists_of(model, short, [0], replace(groups, num_domains=1))
    made = combine([part], L, K, groups.kinds)
    assert (made["contexts"]["weight_position"] == -1).all()
    assert np.isnan(made["contexts"]["size_size"]).all()
    assert not made["tokens"]["n"].any()
    np.testing.assert_allclose(made["groups"]["domain_weight_sum"].sum(axis=-1), LEAST_BEFORE, rtol=1e-5)


@pytest.fixture(scope="module")
def artifacts(job, tmp_path_factory) -> Artifacts:
    out = tmp_path_factory.mktemp("specialisation") / "out"
    assert "specialisation" in run(replace(job, out=out), ["specialisation", "routing"])
    return Artifacts.open(out)


@pytest.fixture(scope="module")
def measured(artifacts, job) -> Everything:
    return Everything(load_checkpoint(job.checkpoint)[0], HeldOutText.open(artifacts))


def test_reading_contexts(artifacts, measured):
    table = artifacts.top_contexts(1, 2, k=6)
    assert list(table) == ["position", "token_id", "weight", "size", "domain", "before"]
    np.testing.assert_allclose(table["weight"], measured.weights[table["position"], 1, 2], rtol=1e-4)
    best = measured.weights[measured.top(measured.weights[:, 1, 2]), 1, 2]
    np.testing.assert_allclose(table["weight"], best[:6], rtol=1e-4)
    assert table["before"].tolist() == measured.before[table["position"]].tolist()
    for row in table.itertuples():
        ids, place = artifacts.context(row.position)
        assert ids[place] == row.token_id
        assert row.domain == artifacts.domain_of(row.position)
    assert artifacts.top_contexts(0, 3)["size"].eq(0).all()  # null injects nothing
    by_size = artifacts.top_contexts(2, 0, by="size")
    assert by_size["size"].is_monotonic_decreasing
    np.testing.assert_allclose(by_size["size"], measured.sizes[by_size["position"], 2, 0], rtol=1e-4)


def test_reading_tokens_by_size(artifacts, measured):
    table = artifacts.top_tokens_by_size(1, 0, k=8, n_min=2)
    means = {}
    for token in np.unique(measured.tokens):
        sizes = measured.sizes[measured.tokens == token, 1, 0].astype(np.float64)
        if len(sizes) >= 2:
            means[token] = (sizes.mean(), sizes.std(ddof=1), len(sizes))
    best = sorted((mean for mean, _, _ in means.values()), reverse=True)[:8]
    np.testing.assert_allclose(table["mean"], best, rtol=1e-4)
    for row in table.itertuples():
        np.testing.assert_allclose((row.mean, row.sd, row.n), means[row.token_id], rtol=1e-3, atol=1e-6)
        assert row.weight * row.norm == pytest.approx(row.mean, rel=1e-5)


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_reading_null_contexts(artifacts, measured, layer):
    null = measured.weights[..., -1].mean(axis=1) if layer is None else measured.weights[:, layer, -1]
    token = int(np.bincount(measured.tokens).argmax())
    table = artifacts.null_contexts(token, layer)
    places = (measured.tokens == token) & (measured.before >= LEAST_BEFORE)
    assert table["end"].tolist() == ["lowest", "highest"]
    assert table["n"].tolist() == [places.sum()] * 2
    np.testing.assert_allclose(table["null_weight"], [null[places].min(), null[places].max()], rtol=1e-4)
    np.testing.assert_allclose(table["null_weight"], null[table["position"]], rtol=1e-4)
    assert (measured.tokens[table["position"]] == token).all()


def test_a_token_that_does_not_occur_has_no_contexts(artifacts):
    table = artifacts.null_contexts(artifacts.vocab_size - 1)
    assert list(table) == ["end", "position", "null_weight", "domain", "before", "n"]
    assert table.empty


@pytest.mark.parametrize("by", ["decile", "domain", "kind", "before"])
@pytest.mark.parametrize("of", ["weight", "size"])
def test_reading_the_split(artifacts, measured, by, of):
    table = artifacts.mass_split(by, of)
    values = measured.weights if of == "weight" else measured.sizes
    edges = {"0": (0, 0), "1": (1, 1)} | {f"{2**b}-{2 ** (b + 1) - 1}": (2**b, 2 ** (b + 1) - 1) for b in range(1, 6)}
    is_in = {
        "decile": lambda group: artifacts.bins[measured.tokens] == group,
        "domain": lambda group: np.array(artifacts.domains)[measured.domain] == group,
        "kind": lambda group: artifacts.token_kinds()[measured.tokens] == KINDS.index(group),
        "before": lambda group: (edges[group][0] <= measured.before) & (measured.before <= edges[group][1]),
    }[by]
    assert len(table) == L * values.shape[2] * table["group"].nunique()
    np.testing.assert_allclose(table.groupby(["layer", "bank"])["share"].sum(), 1)
    np.testing.assert_allclose(table.groupby(["layer", "bank"])["share_of_positions"].sum(), 1)
    for row in table[table["layer"] == 1].itertuples():
        inside, cell = is_in(row.group), values[:, 1, row.bank].astype(np.float64)
        assert row.n == inside.sum()
        assert row.share == pytest.approx(cell[inside].sum() / cell.sum(), rel=1e-4)
        assert row.share_of_positions == pytest.approx(inside.mean())
        if row.n > 1:
            assert row.lift == pytest.approx(cell[inside].mean() / cell.mean(), rel=1e-4)
            assert row.mean == pytest.approx(cell[inside].mean(), rel=1e-4)
            assert row.sd == pytest.approx(cell[inside].std(ddof=1), rel=1e-3, abs=1e-6)
        elif not row.n:
            assert np.isnan([row.lift, row.mean, row.sd]).all()


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda a: a.top_contexts(3, 0), "no layer 3"),
        (lambda a: a.top_contexts(0, 4), "no bank 4"),
        (lambda a: a.top_contexts(0, 3, by="size"), "no bank 3"),
        (lambda a: a.top_contexts(0, 0, by="norm"), "'weight', 'size'"),
        (lambda a: a.top_contexts(0, 0, k=21), "20 are stored"),
        (lambda a: a.top_tokens_by_size(0, 3), "no bank 3"),
        (lambda a: a.null_contexts(330), "no token id 330"),
        (lambda a: a.null_contexts(5, 3), "no layer 3"),
        (lambda a: a.mass_split("token"), "'decile', 'domain', 'kind', 'before'"),
        (lambda a: a.mass_split(of="norm"), "'weight', 'size'"),
    ],
)
def test_what_is_not_there_is_refused(artifacts, ask, match):
    with pytest.raises(ValueError, match=match):
        ask(artifacts)


def test_a_base_model_is_refused_in_a_sentence(job, tmp_path):
    with pytest.raises(UserError, match="no memory banks"):
        run(replace(job, checkpoint=job.base, base=None, out=tmp_path / "out"), ["specialisation"])
