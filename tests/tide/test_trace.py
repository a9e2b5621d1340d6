"""The trace of one forward: shapes, that it is the same forward, and that its parts are what the layers did."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import VOCAB_SIZE, tiny_model
from tide import Intervention
from tide.trace import Recorder

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
    assert trace.attention.shape == trace.feed_forward.shape == (batch, length, layers, d)
    assert trace.replacement is None
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


def second_pass(model, trace):
    """What every layer's attention and feed-forward part make of the streams of a trace: [B, T, L, d] each."""
    attention, feed_forward = [], []
    rotary = model.model.rotary_emb(trace.hidden, torch.arange(trace.input_ids.shape[1])[None])
    for i, layer in enumerate(model.model.layers):
        h = trace.hidden[:, :, i]
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(h), position_embeddings=rotary, attention_mask=None
        )
        attention.append(attended)
        feed_forward.append(layer.mlp(layer.post_attention_layernorm(h + attended)))
    return torch.stack(attention, dim=2), torch.stack(feed_forward, dim=2)


@pytest.mark.parametrize("num_banks", [0, 3])
def test_the_parts_are_what_the_layers_computed(make_model, input_ids, num_banks):
    model = make_model(num_memory_blocks=num_banks)
    trace = model.trace(input_ids, intervention=Intervention.layers_off([1]))
    with torch.no_grad():
        attention, feed_forward = second_pass(model, trace)
    torch.testing.assert_close(trace.attention, attention, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace.feed_forward, feed_forward, rtol=1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 2**16),
    intervention=st.sampled_from(
        ["", "1", "0.1~mean", "*~random3", ".2~random1!", "uniform", "swap9.17", "*~mean@2-4"]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=15)
def test_every_layer_adds_attention_feed_forward_and_injection(seed, intervention, dtype):
    model, ids = tiny_model(seed).to(dtype), torch.tensor([[5, 9, 17, 9, 33]])
    mean_injection = torch.randn(3, 3, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    trace = model.trace(ids, intervention=Intervention.from_text(intervention), mean_injection=mean_injection)
    assert (trace.replacement is not None) == ("~" in intervention)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(trace.before_injection() + trace.injection(), trace.hidden[:, :, 1:], **tolerance)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_its_injection_the_stream_is_what_it_is_with_the_layer_off(make_model, input_ids, layer, dtype):
    model = make_model().to(dtype)
    plain, off = model.trace(input_ids), model.trace(input_ids, intervention=Intervention.layers_off([layer]))
    assert torch.equal(plain.before_injection()[:, :, layer], off.hidden[:, :, layer + 1])  # bit for bit


def test_the_base_model_injects_nothing(make_model, input_ids):
    trace = make_model(num_memory_blocks=0).trace(input_ids)
    assert (trace.injection() == 0).all()
    assert torch.equal(trace.before_injection(), trace.hidden[:, :, 1:])


def test_each_row_of_a_batch_keeps_its_own_replacement(make_model, input_ids):
    model, random = make_model(), Intervention.off([(1, 2)], replacement="random", seed=4)
    both = model.trace(input_ids, intervention=(Intervention(), random))
    alone = model.trace(input_ids[1:], intervention=random)
    assert (both.replacement[0] == 0).all()
    assert (both.replacement[:, :, [0, 2]] == 0).all()
    torch.testing.assert_close(both.replacement[1:], alone.replacement)
    size = both.replacement[1, :, 1].norm(dim=-1)
    plain = model.trace(input_ids[1:])
    torch.testing.assert_close(size, (plain.routing[0, :, 1, 2, None] * plain.memory[0, :, 2]).norm(dim=-1))


def test_without_parts_nothing_else_is_missing(make_model, input_ids):
    model, recorder = make_model(), Recorder(with_parts=False)
    random = Intervention.all_off(replacement="random")
    with torch.no_grad():
        model.model(input_ids, intervention=random, recorder=recorder, use_cache=False)
    lean, full = recorder.finish(model, input_ids, None), model.trace(input_ids, intervention=random)
    assert lean.attention is None
    assert lean.feed_forward is None
    for name in ("routing", "hidden", "memory", "replacement"):
        assert torch.equal(getattr(full, name), getattr(lean, name))
    assert torch.equal(full.injection(), lean.injection())
    for needs_parts in (lean.parts, lean.before_injection):
        with pytest.raises(ValueError, match="trace again with_parts=True"):
            needs_parts()


@pytest.mark.parametrize("position", [0, 4, 8, -1, -9, slice(2, 5), slice(0, -1), slice(None)])
def test_a_part_of_a_trace_is_that_part_of_all_that_follows(make_model, input_ids, position):
    trace = make_model().trace(input_ids, intervention=Intervention.all_off(replacement="random"))
    part = trace.at(position)
    where = position if isinstance(position, slice) else [position]
    for name in ("input_ids", "routing", "hidden", "memory", "attention", "feed_forward", "replacement", "logits"):
        assert torch.equal(getattr(part, name), getattr(trace, name)[:, where])
        assert getattr(part, name).untyped_storage().data_ptr() == getattr(trace, name).untyped_storage().data_ptr()
    torch.testing.assert_close(part.injection_ratio(), trace.injection_ratio()[:, where])
    torch.testing.assert_close(part.attribution(torch.tensor(3)), trace.attribution(torch.tensor(3))[:, where])


@pytest.mark.parametrize(
    ("position", "message"),
    [(9, "has positions 0..8, not 9"), (-10, "not -10"), (slice(0, 9, 2), "the slice has step 2")],
)
def test_positions_that_a_text_does_not_have_are_refused(make_model, input_ids, position, message):
    with pytest.raises(ValueError, match=message):
        make_model().trace(input_ids).at(position)


@pytest.mark.parametrize("target", [-100, -1, VOCAB_SIZE])
def test_targets_outside_the_vocabulary_are_refused(make_model, input_ids, target):
    targets = input_ids.clone()
    targets[1, 3] = target
    with pytest.raises(ValueError, match=f"id {target} is outside the vocabulary, 0..60"):
        make_model().trace(input_ids).attribution(targets)


def test_the_last_stream_unembeds_to_the_logits(make_model, input_ids):
    trace = make_model().trace(input_ids)
    assert torch.equal(trace.unembed(trace.hidden[:, :, -1]), trace.logits)


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
    followed = (trace.attribution(input_ids), trace.before_injection(), trace.unembed(trace.hidden[:, -1:]))
    recorded = (trace.routing, trace.hidden, trace.memory, trace.attention, trace.feed_forward, trace.logits)
    assert not any(t.requires_grad for t in recorded + followed)
