"""The memory banks and the routers: lookup, norm, routing weights, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tide.model
from tests.conftest import VOCAB_SIZE, tiny_model
from tide import memory
from tide.model import TideForCausalLM, mix


@given(num_banks=st.integers(1, 5), null_bias=st.booleans(), seed=st.integers(0, 2**16))
@settings(max_examples=20)
def test_routing_rows_are_positive_and_sum_to_one(num_banks, null_bias, seed):
    model = tiny_model(seed, num_memory_blocks=num_banks, router_null_bias=null_bias)
    ids = torch.randint(VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(seed))
    routing = model.trace(ids).routing
    assert routing.shape == (2, 7, 3, num_banks + 1)
    assert (routing > 0).all()
    torch.testing.assert_close(routing.sum(-1), torch.ones(2, 7, 3), rtol=0, atol=1e-6)


def test_routing_is_float32_in_a_bfloat16_model(make_model, input_ids):
    routing = make_model().to(torch.bfloat16).trace(input_ids).routing
    assert routing.dtype == torch.float32
    torch.testing.assert_close(routing.sum(-1), torch.ones(2, 9, 3), rtol=0, atol=1e-6)  # bfloat16 would miss by 1e-3


def test_the_null_bias_moves_weight_to_the_null_bank_alone(make_model, input_ids):
    model = make_model(router_null_bias=True, num_hidden_layers=1)
    before = model.trace(input_ids).routing
    with torch.no_grad():
        model.model.layers[0].router.null_bias += 2.0
    after = model.trace(input_ids).routing
    assert (after[..., -1] > before[..., -1]).all()
    ratio = after[..., :-1] / before[..., :-1]  # the banks keep their proportions
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_a_large_null_bias_is_the_base_model(make_model, input_ids):
    """The exact null that a linear router without bias cannot promise."""
    model = make_model(router_null_bias=True)
    for layer in model.model.layers:
        layer.router.null_bias.data.fill_(1e4)
    base = make_model(num_memory_blocks=0)
    base.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, base(input_ids).logits)


def test_a_lookup_is_rmsnorm_of_the_tokens_own_rows(make_model, input_ids):
    memory = make_model().model.memory
    with torch.no_grad():
        rows, read = memory.rows(input_ids), memory(input_ids)
    assert rows.shape == read.shape == (2, 9, 3, 32)
    assert torch.equal(rows, memory.weight[input_ids])
    expected = rows / (rows.pow(2).mean(-1, keepdim=True) + memory.norm.eps).sqrt() * memory.norm.weight
    torch.testing.assert_close(read, expected)


def test_each_bank_has_its_own_gain(make_model, input_ids):
    memory = make_model().model.memory
    before = memory(input_ids).detach()
    with torch.no_grad():
        memory.norm.weight[1] *= 2
    after = memory(input_ids).detach()
    assert torch.equal(after[..., 1, :], 2 * before[..., 1, :])
    assert torch.equal(after[..., [0, 2], :], before[..., [0, 2], :])


def test_the_k_rows_of_a_token_are_one_contiguous_read(make_model):
    weight = make_model().model.memory.weight
    assert weight.shape == (VOCAB_SIZE, 3, 32)
    assert weight.is_contiguous()
    assert weight[7].is_contiguous()


def test_mix_is_the_weighted_sum_without_the_null_bank():
    routing, memory = torch.rand(2, 5, 4), torch.randn(2, 5, 3, 8)
    expected = sum(routing[..., k, None] * memory[..., k, :] for k in range(3))
    torch.testing.assert_close(mix(routing, memory), expected)
    routing[..., -1] = 1e9
    torch.testing.assert_close(mix(routing, memory), expected)


def gradients(model, input_ids, checkpointing=False):
    model.train()
    if checkpointing:
        # Its name changes within the versions of transformers that we support.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.zero_grad()
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_rows_in_the_batch_and_every_router_learn_and_absent_rows_do_not(make_model, input_ids):
    model = make_model(router_null_bias=True)
    grads = gradients(model, input_ids)
    rows = grads["model.memory.weight"]  # the last token of each row predicts nothing, but occurs earlier too
    present = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    present[input_ids.unique()] = True
    assert (rows[present].abs().sum(-1) > 0).all()  # every bank of every token
    assert (rows[~present] == 0).all()
    for layer in range(3):
        router = f"model.layers.{layer}.router"
        assert (grads[f"{router}.proj.weight"].abs().sum(-1) > 0).all()  # every slot, null included
        assert grads[f"{router}.null_bias"] != 0
    assert (grads["model.memory.norm.weight"].abs().sum(-1) > 0).all()
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("num_banks", [0, 3])
def test_gradient_checkpointing_gives_the_same_gradients(make_model, input_ids, num_banks):
    plain = gradients(make_model(num_memory_blocks=num_banks), input_ids)
    checkpointed = gradients(make_model(num_memory_blocks=num_banks), input_ids, checkpointing=True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)


def cast_in_every_layer(monkeypatch):
    """Leaves the cast of M to autocast, which repeats it at every layer's product."""
    monkeypatch.setattr(tide.model, "as_autocast_reads", lambda memory: memory)


def test_under_autocast_m_is_cast_once_with_the_same_logits_and_nearly_the_same_gradients(
    make_model, input_ids, monkeypatch
):
    def run():
        model = make_model().train()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids, labels=input_ids, use_cache=False)
            memory = model.trace(input_ids).memory
        output.loss.backward()
        return output.logits, memory, {name: p.grad for name, p in model.named_parameters()}

    logits, memory, grads = run()
    cast_in_every_layer(monkeypatch)
    expected_logits, uncast, expected = run()
    assert (memory.dtype, uncast.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(memory, uncast.bfloat16())
    assert torch.equal(logits, expected_logits)
    for name, gradient in grads.items():
        assert gradient.dtype == torch.float32
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < (5e-3 if "memory" in name else 1e-6), name  # the sum over layers is rounded to bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_autocast_m_and_all_that_follows_is_what_it_was(make_model, input_ids, monkeypatch, dtype):
    def run():
        model = make_model().to(dtype)
        return model.trace(input_ids).memory, model(input_ids).logits, gradients(model, input_ids)

    memory, logits, grads = run()
    cast_in_every_layer(monkeypatch)
    expected_memory, expected_logits, expected = run()
    assert memory.dtype == dtype
    assert torch.equal(memory, expected_memory)
    assert torch.equal(logits, expected_logits)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in grads.items())


def test_the_memory_is_looked_up_once_a_forward(make_model, input_ids, monkeypatch):
    calls = []
    model = make_model()
    lookup = memory.side_by_side
    monkeypatch.setattr(memory, "side_by_side", lambda table, ids: calls.append(ids) or lookup(table, ids))
    model(input_ids)
    assert len(calls) == 1


def test_resident_storage_is_the_default_and_another_one_is_refused_in_one_sentence(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = TideForCausalLM.from_pretrained(tmp_path, memory="resident")
    assert torch.equal(loaded.model.memory.weight, model.model.memory.weight)
    with pytest.raises(
        ValueError, match=r"^There is no memory storage 'ssd'; choose one of resident, int8, int4, disk"
    ):
        TideForCausalLM.from_pretrained(tmp_path, memory="ssd")
