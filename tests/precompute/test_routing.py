from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import precompute.text
from precompute.blocks import Blocks, block_intervals
from precompute.measure import Cost
from precompute.parts import Parts
from precompute.stages.routing import (
    ONCE_CONTEXT,
    ONCE_TOKENS,
    columns,
    contexts_of_once,
    forward_tokens,
    group_statistics,
    token_statistics,
    window_sums,
)
from precompute.text import HeldOutText
from precompute.words import TokenEdges, word_positions
from tests.conftest import tiny_config, tiny_model
from tide.config import TideConfig

WINDOW = 16
FILES = (7 * WINDOW + 5, 0, 4 * WINDOW + 2, 3)  # tokens of four texts, one of them empty, one a single window
CUTS = (0, 3, 10)  # windows with which three pieces begin; the second one spans two texts
TEXTS = [("a", " b", "c", ".", "c-", "")[i % 6] for i in range(61)]
PREFIXES = {"decile": 10, "word": 5, "domain": 4}


@pytest.fixture(scope="module")
def text() -> HeldOutText:
    """Random tokens; ids 40..60 do not occur, but 50 does, once."""
    tokens = np.random.default_rng(0).integers(2, 40, size=sum(FILES)).astype(np.int32)
    tokens[3] = 50
    return HeldOutText(tokens, np.cumsum([0, *FILES]), ["one", "two", "three", "four"], WINDOW)


DECILES = np.arange(61) % 11 - 1
EDGES = TokenEdges.of(TEXTS, {39})


def statistics(
    model, text: HeldOutText, folder: Path, cuts=CUTS, tile: int = 7, most: int = 99
) -> dict[str, np.ndarray]:
    """The stage's numbers of a text that is measured in pieces."""
    config, blocks = model.config, Blocks.of(text.window_domains, most)
    names = [f"windows-{a}-{b}" for a, b in zip(cuts, [*cuts[1:], len(text.window_starts)], strict=True)]
    parts = Parts(folder, "routing", "key", names)
    parts.prepare()
    for name in reversed(names):
        with Cost() as cost:
            made = window_sums(model, text, text.windows_of(name), DECILES, EDGES, blocks, batch_tokens=48)
        parts.write(name, made, cost)
    sizes = (config.num_hidden_layers, config.num_memory_blocks, config.hidden_size)
    groups = (parts.tensors(name, "groups") for name in names)
    files = [parts.file(name, "tokens.safetensors") for name in names]
    return {
        **token_statistics(files, config.vocab_size, (sizes[0], sizes[1] + 3), tile),
        **group_statistics(groups, blocks, len(text.domains), sizes),
    }


@pytest.fixture(scope="module")
def measured(text, tmp_path_factory):
    """The stage's numbers, and of every single position the columns and the groups that went into them."""
    model = tiny_model()
    made = statistics(model, text, tmp_path_factory.mktemp("routing"))
    values, words = [], []
    for start, length in zip(text.window_starts, text.window_lengths, strict=True):  # one window at a time
        ids = text.read(start, start + length)[None]
        trace = model.trace(torch.from_numpy(ids))
        weights = trace.routing[0].double()
        entropy = -(weights * weights.log()).sum(-1, keepdim=True)
        injected = (weights[..., :-1, None] * trace.memory[0, :, None].double()).sum(2)
        ratio = injected.norm(dim=-1, keepdim=True) / trace.hidden[0, :, :-1].double().norm(dim=-1, keepdim=True)
        values.append(torch.cat([weights, entropy, ratio], dim=-1).numpy())
        words.append(word_positions(ids, EDGES)[0])
    tokens = text.read(0, len(text))
    groups = {
        "decile": DECILES[tokens],
        "word": np.concatenate(words),
        "domain": np.repeat(np.arange(4), FILES),
    }
    return made, tokens, groups, np.concatenate(values)


def split(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"": values[..., :-2], "entropy_": values[..., -2], "injection_ratio_": values[..., -1]}


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:Mean of empty", "ignore:invalid value")
def check(made: dict[str, np.ndarray], prefix: str, group, here: np.ndarray) -> None:
    """Mean, deviation and n of a group against all that is in it."""
    assert made[f"{prefix}n"][group] == len(here)
    for what, expected in (("mean", here.mean(axis=0)), ("sd", here.std(axis=0, ddof=1))):
        for measure, part in split(expected).items():
            stored = made[f"{prefix}{measure}{what}"]
            assert stored.dtype == np.float32
            np.testing.assert_allclose(stored[group], part, rtol=2e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:Mean of empty", "ignore:invalid value")
def test_by_token_id(measured):
    made, tokens, _, values = measured
    for token_id in range(61):
        check(made, "", token_id, values[tokens == token_id])


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:Mean of empty", "ignore:invalid value")
@pytest.mark.parametrize("by", PREFIXES)
def test_by_group(measured, by):
    made, _, groups, values = measured
    for group in range(PREFIXES[by]):
        check(made, f"{by}_", group, values[groups[by] == group])


def test_overall(measured):
    made, _, _, values = measured
    whole = {name: array if name == "overall_n" else array[None] for name, array in made.items() if "overall" in name}
    check(whole, "overall_", 0, values)


@pytest.mark.parametrize("by", PREFIXES)
@pytest.mark.parametrize("measure", ["", "entropy_", "injection_ratio_"])
def test_group_means_weighted_by_n_add_up_to_the_overall_mean(measured, by, measure):
    made, tokens, groups, _ = measured
    n, mean = made[f"{by}_n"].astype(float), np.nan_to_num(made[f"{by}_{measure}mean"].astype(float))
    total = np.tensordot(n, mean, axes=1)
    rest = groups[by] < 0  # tokens without a decile
    token_mean = made[f"{measure}mean"].astype(float)
    total += token_mean[tokens[rest]].sum(axis=0)
    np.testing.assert_allclose(total / len(tokens), made[f"overall_{measure}mean"], atol=2e-6)


def test_a_token_seen_once_has_a_mean_and_no_spread(measured):
    made = measured[0]
    assert made["n"][50] == 1
    for measure in ("", "entropy_", "injection_ratio_"):
        assert np.isfinite(made[f"{measure}mean"][50]).all()
        assert np.isnan(made[f"{measure}sd"][50]).all()
        assert np.isnan(made[f"{measure}mean"][60]).all()


def test_mean_weights_sum_to_one(measured):
    made = measured[0]
    seen = made["n"] > 0
    np.testing.assert_allclose(made["mean"][seen].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("by", ["decile", "word", "overall"])
def test_intervals_are_those_of_the_windows(measured, text, by):
    made, tokens, groups, values = measured
    group = groups.get(by, np.zeros_like(tokens))
    ends = block_intervals(*by_window(text, values, group, PREFIXES.get(by, 1)), text.window_domains)
    for what, end in zip(("low", "high"), ends, strict=True):
        for measure, part in split(end).items():
            stored = made[f"{by}_{measure}{what}"]
            np.testing.assert_allclose(stored, part.reshape(stored.shape), rtol=2e-6, atol=1e-6)
    assert np.isfinite(made[f"{by}_low"]).all()


def test_intervals_of_a_text_are_those_of_its_windows(measured, text):
    made, _, groups, values = measured
    total, n = by_window(text, values, groups["domain"], 4)
    for domain in range(4):
        inside = text.window_domains == domain
        low, high = block_intervals(total[inside, domain, None], n[inside, domain, None], text.window_domains[inside])
        np.testing.assert_allclose(made["domain_low"][domain], low[0, ..., :-2], atol=1e-6)
        np.testing.assert_allclose(made["domain_injection_ratio_high"][domain], high[0, ..., -1], rtol=2e-6)
    assert np.isnan(made["domain_low"][[1, 3]]).all()  # an empty text, and one of a single window
    assert np.isfinite(made["domain_low"][[0, 2]]).all()


def by_window(text: HeldOutText, values: np.ndarray, group: np.ndarray, num_groups: int):
    """Sums [W, G, L, K+3] and numbers [W, G] of positions."""
    total, n = np.zeros((14, num_groups, *values.shape[1:])), np.zeros((14, num_groups))
    window = np.repeat(np.arange(14), text.window_lengths)
    np.add.at(total, (window[group >= 0], group[group >= 0]), values[group >= 0])
    np.add.at(n, (window[group >= 0], group[group >= 0]), 1)
    return total, n


def test_the_interval_is_wider_where_a_text_is_shorter(text, measured, tmp_path):
    made = measured[0]
    part = HeldOutText(text._tokens[: 3 * WINDOW], np.array([0, 3 * WINDOW]), ["one"], WINDOW)
    short = statistics(tiny_model(), part, tmp_path, cuts=(0,))
    width, wider = (s["overall_high"] - s["overall_low"] for s in (made, short))
    assert np.median(wider / width) > 1.2


@pytest.mark.parametrize("most", [99, 6])  # of 6 blocks, some lie in two pieces
def test_pieces_and_tiles_hardly_matter(text, tmp_path, most):
    pieces = statistics(tiny_model(), text, tmp_path / "pieces", most=most)
    whole = statistics(tiny_model(), text, tmp_path / "whole", cuts=(0,), tile=61, most=most)
    for name, array in pieces.items():
        np.testing.assert_allclose(whole[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_blocks_of_several_windows_change_the_intervals_alone(text, measured, tmp_path):
    fewer = statistics(tiny_model(), text, tmp_path, most=6)
    changed = {name for name, array in measured[0].items() if not np.array_equal(array, fewer[name], equal_nan=True)}
    intervals = {name for name in changed if name.endswith(("low", "high"))}
    assert {"decile_low", "word_high", "domain_low", "overall_high"} <= intervals
    for name in changed - intervals:  # the order of summation
        np.testing.assert_allclose(fewer[name], measured[0][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_mean_injection_is_that_of_single_positions(measured, text):
    model, tokens = tiny_model(), measured[1]
    total = np.zeros((3, 3, 32))
    for start, length in zip(text.window_starts, text.window_lengths, strict=True):
        trace = model.trace(torch.from_numpy(text.read(start, start + length)[None]))
        for routing, memory in zip(trace.routing[0].double(), trace.memory[0].double(), strict=True):
            for layer in range(3):
                for bank in range(3):
                    total[layer, bank] += (routing[layer, bank] * memory[bank]).numpy()
    assert measured[0]["mean_injection"].dtype == np.float32
    np.testing.assert_allclose(measured[0]["mean_injection"], total / len(tokens), atol=1e-6)


def test_a_model_without_banks_injects_nothing(text, tmp_path):
    made = statistics(tiny_model(num_memory_blocks=0), text, tmp_path)
    assert made["mean_injection"].shape == (3, 0, 32)
    seen = made["n"] > 0
    assert (made["mean"][seen] == 1).all()
    assert made["mean"].shape == (61, 3, 1)
    for measure in ("entropy", "injection_ratio"):
        assert (made[f"overall_{measure}_mean"] == 0).all()
        assert (made[f"{measure}_mean"][seen] == 0).all()
        assert (made[f"overall_{measure}_sd"] == 0).all()


def test_a_token_whose_embedding_is_zero_has_no_ratio_in_layer_0():
    for banks in (0, 3):
        model = tiny_model(num_memory_blocks=banks)
        model.get_input_embeddings().weight.data[7] = 0
        ratio = columns(model.trace(torch.tensor([[7, 5]])))[0, ..., -1]
        assert ratio[0, 0] == 0
        assert torch.isfinite(ratio).all()


def test_a_long_window_is_compared_in_stretches_like_a_short_one():
    model = tiny_model(max_position_embeddings=256)
    trace = model.trace(torch.from_numpy(np.random.default_rng(0).integers(61, size=(2, 150))))
    torch.testing.assert_close(columns(trace)[..., -1], trace.injection_ratio())


def test_a_large_model_gets_smaller_batches():
    assert forward_tokens(tiny_config()) == 4096
    large = TideConfig.from_preset("1b", num_memory_blocks=24)
    assert 256 < forward_tokens(large) < 4096


@given(st.lists(st.lists(st.integers(0, 40), max_size=150), min_size=1, max_size=4).filter(any), st.integers(1, 90))
def test_contexts_end_in_a_token_that_occurs_once_and_begin_with_a_window(files, window):
    starts = np.cumsum([0, *map(len, files)])
    tokens = np.concatenate([np.array(file, dtype=np.int32) for file in files])
    text = HeldOutText(tokens, starts, [str(i) for i in range(len(files))], window)
    n = np.bincount(tokens, minlength=61)
    contexts = contexts_of_once(text, n)
    offset = np.concatenate([np.arange(len(file)) % window for file in files])
    wanted = [t for t in np.flatnonzero(n == 1) if offset[np.flatnonzero(tokens == t)[0]] < ONCE_CONTEXT]
    assert contexts.shape == (min(len(wanted), ONCE_TOKENS), ONCE_CONTEXT)
    ends = []
    for context in contexts:
        ids = context[context >= 0]
        assert (context[len(ids) :] == -1).all()
        place = int(np.flatnonzero(tokens == ids[-1])[0])
        assert ids.tolist() == tokens[place - offset[place] : place + 1].tolist()
        ends.append(int(ids[-1]))
    assert len(set(ends)) == len(ends)
    assert set(ends) <= set(wanted)


def test_contexts_do_not_depend_on_how_the_text_is_read(text, monkeypatch):
    n = np.bincount(text.read(0, len(text)), minlength=61)
    n[:40] = 1  # many to choose from
    whole = contexts_of_once(text, n)
    monkeypatch.setattr(precompute.text, "PIECE_TOKENS", 40)
    assert len(text.pieces()) > 2
    assert (contexts_of_once(text, n) == whole).all()


def test_the_routing_of_a_token_seen_once_is_that_of_its_context(measured, text):
    made = measured[0]
    contexts = [context[context >= 0] for context in contexts_of_once(text, made["n"])]
    assert 50 in [int(context[-1]) for context in contexts]
    for context in contexts:
        live = tiny_model().trace(torch.from_numpy(context[None].astype(np.int64))).routing[0, -1].numpy()
        np.testing.assert_allclose(made["mean"][context[-1]], live, atol=1e-5)
