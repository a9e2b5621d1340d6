"""A forward that starts from a cached stream does what a whole one does, and the cache stays within its bytes."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.engine import LiveModel
from dashboard.engine.cache import ByteCache
from tests.conftest import tiny_model
from tests.dashboard.live_models import LAYERS, live_model, random_intervention, random_prompt, same_bits
from tide import Intervention

PROMPT = (5, 9, 17, 9, 33, 60, 5, 21, 9)


@pytest.fixture(scope="module")
def live():
    return live_model()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=80)
def test_a_resumed_run_is_a_whole_run_bit_for_bit(live, seed):
    rng = random.Random(seed)
    prompt, intervention = random_prompt(rng), random_intervention(rng)
    live.cache.clear()
    whole = live.run(prompt, intervention)
    assert whole.reused_from == 0
    live.cache.clear()
    live.run(prompt)
    resumed = live.run(prompt, intervention)
    expected = intervention.first_layer(LAYERS) if intervention else 0
    assert resumed.reused_from == expected
    assert same_bits(resumed, whole)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_resumed_run_computes_no_layer_below(live, layer, monkeypatch):
    live.cache.clear()
    live.run(PROMPT)
    ran = []
    for number, module in enumerate(live.model.model.layers):
        attend = module.self_attn.forward
        monkeypatch.setattr(
            module.self_attn, "forward", lambda n=number, f=attend, **given: (ran.append(n), f(**given))[1]
        )
    live.run(PROMPT, Intervention.off([(layer, 1)]))
    assert ran == list(range(layer, LAYERS))


def test_a_run_is_what_the_model_traces(live):
    intervention = Intervention.off([(1, 2)]) | Intervention.layers_off([2], replacement="random", seed=3)
    run, trace = live.run(PROMPT, intervention), live.model.trace(torch.tensor([PROMPT]), intervention)
    assert torch.equal(run.trace.hidden, trace.hidden)
    np.testing.assert_array_equal(run.routing, trace.routing[0].numpy())
    np.testing.assert_array_equal(run.injection_ratio, trace.injection_ratio()[0].numpy())
    torch.testing.assert_close(live.model.lm_head(run.stream), trace.logits[0])


def test_what_follows_from_a_kept_trace_needs_no_gradients(live):
    trace = live.run(PROMPT).trace
    assert trace.attribution(torch.tensor([[7]])).shape == (1, len(PROMPT), LAYERS, 3)


def test_a_base_model_runs_and_has_nothing_to_switch():
    base = LiveModel(tiny_model(num_memory_blocks=0))
    run = base.run(PROMPT)
    np.testing.assert_array_equal(run.routing, 1.0)
    np.testing.assert_array_equal(run.injection_ratio, 0.0)


def test_surprisal_is_the_models_loss_token_by_token(live):
    run = live.run(PROMPT, Intervention.layers_off([0]))
    logits = live.model(torch.tensor([PROMPT]), intervention=Intervention.layers_off([0])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(PROMPT[1:]), reduction="none")
    np.testing.assert_allclose(live.surprisal(run), expected.numpy(), rtol=1e-5)
    assert live.surprisal(run) is live.surprisal(run)
    assert live.surprisal(live.run(PROMPT[:1])).shape == (0,)


def test_surprisal_in_pieces_is_surprisal(live, monkeypatch):
    whole = live.surprisal(live.run(PROMPT))
    live.cache.clear()
    monkeypatch.setattr("dashboard.engine.live_model.UNEMBEDDED_AT_ONCE", 2 * live.model.config.vocab_size)
    np.testing.assert_allclose(live.surprisal(live.run(PROMPT)), whole, rtol=1e-6)


def test_two_artifact_folders_of_one_model_have_each_its_own_mean():
    one = live_model()
    intervention = Intervention.layers_off([1], replacement="mean")
    other = one.with_mean_injection(np.ones((3, 3, 32), dtype=np.float32))
    first, second = one.run(PROMPT, intervention), other.run(PROMPT, intervention)
    assert not torch.equal(first.stream, second.stream)
    for live in (one, other):  # in any order, as two sessions ask
        expected = live.model.trace(torch.tensor([PROMPT]), intervention, mean_injection=live._mean.injection)
        assert torch.equal(live.run(PROMPT, intervention).trace.hidden, expected.hidden)
    again = other.with_mean_injection(one._mean.injection.numpy().copy())
    assert again._mean.injection is one._mean.injection
    assert again.run(PROMPT, intervention) is first
    assert other.run(PROMPT) is one.run(PROMPT)
    assert other.cache is one.cache


def test_interventions_whose_texts_round_alike_are_not_one():
    live = live_model()
    runs = [live.run(PROMPT, Intervention.route("temperature", value)) for value in (0.51234561, 0.51234564)]
    assert runs[0] is not runs[1]


def test_the_bytes_of_a_run_are_those_of_its_tensors(live):
    run = live.run(PROMPT)
    tokens, width = len(PROMPT), 32
    stream = tokens * width
    floats = (LAYERS + 1) * stream + 2 * LAYERS * stream + 3 * stream + stream  # hidden, parts, memory, last stream
    floats += 2 * tokens * LAYERS * 4 + tokens * LAYERS  # routing on the device and here, ratios
    assert run.nbytes == 4 * floats + 8 * tokens


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=40),
    limit=st.integers(0, 100),
)
def test_a_cache_keeps_the_newest_that_fit(sizes, limit):
    cache, newest_first = ByteCache(limit), []
    for key, size in sizes:
        cache.put(key, (key, size), size)
        newest_first = [entry for entry in newest_first if entry[0] != key]
        if size <= limit:
            newest_first.insert(0, (key, size))
            while sum(size for _, size in newest_first) > limit:
                newest_first.pop()
        assert cache.nbytes == sum(size for _, size in newest_first) <= limit
        assert len(cache) == len(newest_first)
    for key, size in reversed(newest_first):
        assert cache.get(key) == (key, size)


def test_a_result_that_is_used_stays_when_others_go():
    cache = ByteCache(3)
    for key in "abc":
        cache.put(key, key, 1)
    cache.get("a")
    cache.put("d", "d", 1)
    assert [cache.get(key) for key in "abcd"] == ["a", None, "c", "d"]
