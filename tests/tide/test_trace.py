"""The trace of one forward: shapes, that it is the same forward, and that its parts add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import VOCAB_SIZE, tiny_model
from tide import Intervention

OFF = Intervention.off([(0, 1), (2, 0)]) | Intervention.layers_off([1])


@pytest.mark.parametrize("num_banks", [0, 1, 3])
def test_shapes_of_the_contract(make_model, input_ids, num_banks):
    trace = make_model(num_memory_blocks=num_banks).trace(input_ids)
    batch, length, layers, d = 2, 9, 3, 32
    assert torch.equal(trace.input_ids, input_ids)
    assert trace.routing.shape == (batch, length, layers, num_banks + 1)
    assert trace.hidden.shape == (batch, length, layers + 1, d)
    assert trace.memory.shape == (batch, length, num_banks, d)
    assert trace.logits.shape == (batch, length, VOCAB_SIZE)
    assert trace.injection().shape == (batch, length, layers, d)
    assert trace.injection_ratio().shape == (batch, length, layers)
    assert trace.attribution(input_ids).shape == (batch, length, layers, num_banks)


@pytest.mark.parametrize("intervention", [None, OFF])
def test_it_is_the_same_forward(make_model, input_ids, intervention):
    model = make_model()
    trace = model.trace(input_ids, intervention=intervention)
    with torch.no_grad():
        assert torch.equal(trace.logits, model(input_ids, intervention=intervention).logits)
        assert torch.equal(trace.hidden[:, :, 0], model.model.embed_tokens(input_ids))
        assert torch.equal(trace.memory, model.model.memory(input_ids))
        assert torch.equal(model.lm_head(model.model.norm(trace.hidden[:, :, -1])), trace.logits)


def test_hidden_is_what_transformers_calls_hidden_states(make_model, input_ids):
    model = make_model()
    trace = model.trace(input_ids)
    with torch.no_grad():
        theirs = model(input_ids, output_hidden_states=True).hidden_states
    assert len(theirs) == 4
    for layer in range(3):  # the last of theirs is after the final norm
        assert torch.equal(trace.hidden[:, :, layer], theirs[layer])


def test_without_logits_everything_else_is_the_same(make_model, input_ids):
    model = make_model()
    full, lean = model.trace(input_ids), model.trace(input_ids, with_logits=False)
    assert lean.logits is None
    for name in ("routing", "hidden", "memory"):
        assert torch.equal(getattr(full, name), getattr(lean, name))


def test_a_padded_row_traces_as_alone(make_model):
    model = make_model()
    padded, mask = torch.tensor([[1, 1, 40, 41, 42]]), torch.tensor([[0, 0, 1, 1, 1]])
    together, alone = model.trace(padded, attention_mask=mask), model.trace(padded[:, 2:])
    for name in ("routing", "hidden", "memory", "logits"):
        torch.testing.assert_close(getattr(together, name)[:, 2:], getattr(alone, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("intervention", [None, OFF])
def test_injection_is_the_weighted_sum_of_the_memory(make_model, input_ids, intervention):
    trace = make_model().trace(input_ids, intervention=intervention)
    expected = sum(trace.routing[..., k, None] * trace.memory[:, :, None, k] for k in range(3))
    torch.testing.assert_close(trace.injection(), expected)
    ratio = expected.norm(dim=-1) / trace.hidden[:, :, :-1].norm(dim=-1)
    torch.testing.assert_close(trace.injection_ratio(), ratio)


def parts_of_the_last_stream(model, input_ids, intervention):
    """What every layer's attention and feed-forward added, from a second pass through the layers: [B, T, 2L, d]."""
    trace, parts = model.trace(input_ids, intervention=intervention), []
    positions = torch.arange(input_ids.shape[1])[None]
    rotary = model.model.rotary_emb(trace.hidden[:, :, 0], positions)
    for i, layer in enumerate(model.model.layers):
        h = trace.hidden[:, :, i]
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(h), position_embeddings=rotary, attention_mask=None
        )
        parts += [attended, layer.mlp(layer.post_attention_layernorm(h + attended))]
    return torch.stack(parts, dim=2)


@given(seed=st.integers(0, 2**16), num_banks=st.integers(0, 4), tied=st.booleans(), with_off=st.booleans())
@settings(max_examples=15)
def test_attributions_of_all_parts_add_up_to_the_logit(seed, num_banks, tied, with_off):
    model = tiny_model(seed, num_memory_blocks=num_banks, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(VOCAB_SIZE, (2, 2, 6), generator=generator)
    intervention = Intervention.layers_off([1]) if with_off else None
    trace = model.trace(ids, intervention=intervention)
    with torch.no_grad():
        rest = parts_of_the_last_stream(model, ids, intervention).sum(2) + trace.hidden[:, :, 0]
    rest = (rest * trace.target_direction(targets)).sum(-1)  # embedding, attention and feed-forward
    banks = trace.attribution(targets).sum(dim=(-2, -1))
    logit = trace.logits.gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(banks + rest, logit, rtol=1e-4, atol=1e-4)


def test_attribution_is_each_banks_share_of_the_injection(make_model, input_ids):
    trace = make_model().trace(input_ids)
    read = trace.target_direction(input_ids)
    expected = torch.einsum("btd,btld->btl", read, trace.injection())
    torch.testing.assert_close(trace.attribution(input_ids).sum(-1), expected, rtol=1e-4, atol=1e-5)


def test_a_bank_that_is_off_contributes_nothing(make_model, input_ids):
    attribution = make_model().trace(input_ids, intervention=OFF).attribution(input_ids)
    assert (attribution[:, :, 0, 1] == 0).all()
    assert (attribution[:, :, 1] == 0).all()
    assert (attribution[:, :, 0, 0] != 0).all()


def test_one_target_token_serves_every_position(make_model, input_ids):
    trace = make_model().trace(input_ids)
    assert torch.equal(trace.attribution(torch.tensor(7)), trace.attribution(torch.full_like(input_ids, 7)))


def test_a_trace_needs_no_gradients(make_model, input_ids):
    trace = make_model().trace(input_ids)
    assert not any(t.requires_grad for t in (trace.routing, trace.hidden, trace.memory, trace.logits))
