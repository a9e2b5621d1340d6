"""Forwards that start from a trace do what whole ones do, and refuse what they cannot start from."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tide import Intervention
from tide.intervention import Off, Rule
from tide.resume import ResumedForwards

LAYERS, BANKS, LENGTH = 3, 3, 9


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def mean_injection():
    return torch.randn(LAYERS, BANKS, 32, generator=torch.Generator().manual_seed(3))


def changed_in(layer, rng):
    """One to three edits in one layer, none of them a swap."""

    def edit():
        positions = rng.choice([None, frozenset(rng.sample(range(LENGTH), 3))])
        if rng.random() < 0.3:
            return Rule(*rng.choice([("uniform", 0), ("only", 1), ("temperature", 0.5)]), layer, positions)
        bank, how = rng.choice([None, *range(BANKS)]), rng.choice(["zero", "mean", "random"])
        return Off(layer, bank, positions, how, rng.randrange(5), rng.random() < 0.3)

    return Intervention(tuple(edit() for _ in range(rng.randint(1, 3))))


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 3), count=st.integers(1, 4))
@settings(max_examples=40)
@torch.no_grad()
def test_resumed_forwards_end_as_whole_forwards_do(model, mean_injection, seed, batch, count):
    rng = random.Random(seed)
    input_ids = torch.tensor([[rng.randrange(61) for _ in range(LENGTH)] for _ in range(batch)])
    layer = rng.randrange(LAYERS)
    interventions = [changed_in(layer, rng) for _ in range(count)]
    resumed = ResumedForwards(model, model.trace(input_ids, with_logits=False), mean_injection)
    streams = resumed.run(layer, interventions)
    assert streams.shape == (count, batch, LENGTH, 32)
    for stream, intervention in zip(streams, interventions, strict=True):
        whole = model.model(input_ids, intervention=intervention, mean_injection=mean_injection)
        torch.testing.assert_close(stream, whole.last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", range(LAYERS))
@torch.no_grad()
def test_where_nothing_is_changed_the_stream_is_the_unchanged_one_bit_for_bit(model, input_ids, layer):
    resumed = ResumedForwards(model, model.trace(input_ids, with_logits=False))
    assert torch.equal(resumed.run(layer, [Intervention()])[0], model.model(input_ids).last_hidden_state)


@torch.no_grad()
def test_layers_below_are_not_computed_and_the_layer_itself_neither(model, input_ids, monkeypatch):
    resumed = ResumedForwards(model, model.trace(input_ids, with_logits=False))
    ran = []
    for number, module in enumerate(model.model.layers):
        attend = module.self_attn.forward
        monkeypatch.setattr(
            module.self_attn, "forward", lambda n=number, f=attend, **given: (ran.append(n), f(**given))[1]
        )
    resumed.run(1, [Intervention.layers_off([1])])
    assert ran == [2]


@pytest.mark.parametrize("text", ["1", ".2", "*", "2_1.0", "swap5.9", "uniform", "null:0"])
def test_an_intervention_that_acts_elsewhere_is_refused(model, input_ids, text):
    resumed = ResumedForwards(model, model.trace(input_ids, with_logits=False))
    with pytest.raises(ValueError, match=r"does not change layer 2 alone\.$"):
        resumed.run(2, [Intervention.layers_off([2]), Intervention.from_text(text)])


def test_a_trace_without_parts_is_refused(model, input_ids):
    with pytest.raises(ValueError, match="with_parts=True"):
        ResumedForwards(model, model.trace(input_ids, with_parts=False))
