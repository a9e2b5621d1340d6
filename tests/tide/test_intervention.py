"""Interventions: what they switch off, what they leave alone, and that they never touch the model."""

import threading
from dataclasses import FrozenInstanceError
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tide import Intervention

LAYERS, BANKS = 3, 3  # of the tiny model

PAIRS = st.frozensets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, BANKS - 1)))
INTERVENTIONS = st.builds(
    lambda pairs, layers: Intervention.off(pairs) | Intervention.layers_off(layers),
    PAIRS,
    st.frozensets(st.integers(0, LAYERS - 1), max_size=2),
)


def logits_of(model, ids, intervention=None):
    with torch.no_grad():
        return model(ids, intervention=intervention).logits


def test_the_empty_intervention_equals_none_bit_for_bit(make_model, input_ids):
    model = make_model()
    assert torch.equal(logits_of(model, input_ids, Intervention()), logits_of(model, input_ids))
    assert not Intervention()
    assert Intervention.off([]) == Intervention.layers_off([]) == Intervention()


def test_it_is_a_frozen_hashable_value():
    a, b = Intervention.off([(2, 0), (0, 1)]), Intervention.off([(0, 1), (2, 0), (2, 0)])
    assert a == b
    assert len({a, b, Intervention.layers_off([1])}) == 2
    with pytest.raises(FrozenInstanceError):
        a.layers = frozenset({1})


@given(a=INTERVENTIONS, b=INTERVENTIONS)
def test_combining_switches_off_what_either_does(a, b):
    both = a | b
    assert both == b | a
    assert a | Intervention() == a
    for layer in range(LAYERS):
        expected = set(a.off_in(layer, BANKS)) | set(b.off_in(layer, BANKS))
        assert set(both.off_in(layer, BANKS)) == expected


@given(intervention=INTERVENTIONS, seed=st.integers(0, 2**16))
@settings(max_examples=20)
def test_a_bank_that_is_off_hands_its_weight_to_null_and_the_rest_stay(intervention, seed):
    routing = torch.randn(2, 5, BANKS + 1, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    before = routing.clone()
    for layer in range(LAYERS):
        off = intervention.off_in(layer, BANKS)
        on = [k for k in range(BANKS) if k not in off]
        effective = intervention.apply(layer, routing)
        assert torch.equal(routing, before)  # the router's own weights are not written to
        assert (effective[..., off] == 0).all()
        assert torch.equal(effective[..., on], before[..., on])
        torch.testing.assert_close(effective[..., -1], before[..., -1] + before[..., off].sum(-1))
        torch.testing.assert_close(effective.sum(-1), torch.ones(2, 5))


@given(intervention=INTERVENTIONS, seed=st.integers(0, 100))
@settings(max_examples=15)
def test_a_forward_injects_what_the_banks_that_are_on_hold(intervention, seed):
    model, ids = tiny_model(seed), torch.tensor([[7, 8, 9, 8]])
    trace = model.trace(ids, intervention=intervention)
    for layer in range(LAYERS):
        on = [k for k in range(BANKS) if k not in intervention.off_in(layer, BANKS)]
        injection = sum(
            (trace.routing[:, :, layer, k, None] * trace.memory[:, :, k] for k in on), torch.zeros(1, 4, 32)
        )
        torch.testing.assert_close(trace.injection()[:, :, layer], injection)
    assert torch.equal(trace.logits, logits_of(model, ids, intervention))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_is_off_injects_nothing_and_the_layers_below_do_not_notice(make_model, input_ids, layer):
    model = make_model()
    plain, off = model.trace(input_ids), model.trace(input_ids, intervention=Intervention.layers_off([layer]))
    assert (off.injection()[:, :, layer] == 0).all()
    assert (off.routing[:, :, layer, -1] - 1).abs().max() < 1e-6  # all null
    assert torch.equal(off.hidden[:, :, : layer + 1], plain.hidden[:, :, : layer + 1])
    assert torch.equal(off.routing[:, :, :layer], plain.routing[:, :, :layer])
    assert not torch.allclose(off.hidden[:, :, layer + 1], plain.hidden[:, :, layer + 1], atol=1e-3)
    torch.testing.assert_close(
        plain.hidden[:, :, layer + 1] - off.hidden[:, :, layer + 1],
        plain.injection()[:, :, layer],
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_layer_off_equals_all_of_its_pairs_off(make_model, input_ids):
    model = make_model()
    by_pairs = Intervention.off((1, bank) for bank in range(BANKS))
    assert torch.equal(logits_of(model, input_ids, Intervention.layers_off([1])), logits_of(model, input_ids, by_pairs))


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (Intervention.layers_off([3]), "names layer 3, but the model has layers 0..2"),
        (Intervention.layers_off([-1]), "names layer -1, but the model has layers 0..2"),
        (Intervention.off([(7, 0)]), "names layer 7, but the model has layers 0..2"),
        (Intervention.off([(1, 3)]), "names bank 3 in layer 1, but the model has banks 0..2"),  # 3 is the null bank
        (Intervention.off([(1, -1)]), "names bank -1 in layer 1, but the model has banks 0..2"),
    ],
)
def test_layers_and_banks_that_do_not_exist_are_refused(make_model, input_ids, intervention, message):
    model = make_model()
    for call in (model, model.trace, partial(model.generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match=message) as refusal:
            call(input_ids, intervention=intervention)
        assert "\n" not in str(refusal.value)


def test_the_base_model_has_no_banks_to_switch_off(make_model, input_ids):
    base = make_model(num_memory_blocks=0)
    with pytest.raises(ValueError, match="the model has no memory banks"):
        base(input_ids, intervention=Intervention.off([(0, 0)]))
    assert torch.equal(logits_of(base, input_ids, Intervention.layers_off([0])), logits_of(base, input_ids))


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_equals_stepwise_greedy_decoding_under_the_same_intervention(make_model, input_ids, use_cache):
    model, off = make_model(), Intervention.off([(0, 0), (2, 1)]) | Intervention.layers_off([1])
    tokens = model.generate(input_ids, intervention=off, max_new_tokens=8, do_sample=False, use_cache=use_cache)
    expected = input_ids
    for _ in range(8):
        expected = torch.cat([expected, logits_of(model, expected, off)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, expected)
    assert not torch.equal(tokens, model.generate(input_ids, max_new_tokens=8, do_sample=False))


def test_threads_with_different_interventions_share_one_model(make_model, input_ids):
    model = make_model()
    interventions = [None, Intervention.layers_off([0]), Intervention.off([(1, 2)]), Intervention.layers_off([1, 2])]
    serial = [model.trace(input_ids, intervention=i) for i in interventions]
    barrier, wrong = threading.Barrier(len(interventions)), []

    def session(number):
        barrier.wait()
        for _ in range(20):
            trace = model.trace(input_ids, intervention=interventions[number])
            same = torch.equal(trace.logits, serial[number].logits) and torch.equal(
                trace.routing, serial[number].routing
            )
            if not same:
                wrong.append(number)

    threads = [threading.Thread(target=session, args=(i,)) for i in range(len(interventions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def state_of(model):
    """Everything that modules carry: their attributes by identity, and every weight's value."""
    attributes = {
        name: {key: id(value) for key, value in vars(module).items() if not key.startswith("_")}
        for name, module in model.named_modules()
    }
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    return attributes, keys, {name: value.clone() for name, value in model.state_dict().items()}


def hooks_of(model):
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and key.startswith("_") and value
    ]


def test_no_hooks_and_no_module_state_after_any_use(make_model, input_ids):
    model = make_model()
    attributes, keys, weights = state_of(model)
    off = Intervention.off([(0, 1)]) | Intervention.layers_off([2])
    logits_of(model, input_ids, off)
    model.trace(input_ids, intervention=off).attribution(input_ids)
    model.generate(input_ids, intervention=off, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="layer 9"):
        model(input_ids, intervention=Intervention.layers_off([9]))
    after_attributes, after_keys, after_weights = state_of(model)
    assert hooks_of(model) == []
    assert after_keys == keys
    assert after_attributes == attributes
    assert all(torch.equal(value, weights[name]) for name, value in after_weights.items())
