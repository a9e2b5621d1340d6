"""What TIDE shares with LLaMA: logits, cache, generation, padding, saving."""

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tide import Intervention, TideConfig, TideForCausalLM, TideModel

NEW_TOKENS = 8


def llama_with_the_weights_of(model: TideForCausalLM) -> LlamaForCausalLM:
    fields = model.config.to_dict()
    for name in ("model_type", "num_memory_blocks", "router_null_bias", "z_loss_coefficient"):
        fields.pop(name)
    llama = LlamaForCausalLM(LlamaConfig(**fields)).eval().to(model.dtype)
    llama.load_state_dict(model.state_dict(), strict=True)
    return llama


def without_memory(model: TideForCausalLM) -> TideForCausalLM:
    """The K = 0 model on the same backbone."""
    base = TideForCausalLM(TideConfig(**{**model.config.to_dict(), "num_memory_blocks": 0})).eval().to(model.dtype)
    report = base.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys
    return base


def greedy(model, input_ids, **kwargs):
    """Greedy continuation: tokens [B, T+N] and the logits of every step [B, N, V]."""
    output = model.generate(
        input_ids,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return output.sequences, torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_no_banks_is_llama_bit_for_bit(make_model, input_ids, dtype, tied):
    model = make_model(num_memory_blocks=0, tie_word_embeddings=tied).to(dtype)
    llama = llama_with_the_weights_of(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, llama(input_ids).logits)
    tokens, logits = greedy(model, input_ids, use_cache=True)
    llama_tokens, llama_logits = greedy(llama, input_ids, use_cache=True)
    assert torch.equal(tokens, llama_tokens)
    assert torch.equal(logits, llama_logits)


def test_no_banks_has_exactly_llamas_parameters(make_model):
    model = make_model(num_memory_blocks=0)
    assert set(model.state_dict()) == set(llama_with_the_weights_of(model).state_dict())


@pytest.mark.parametrize("null_bias", [False, True])
@pytest.mark.parametrize("by", ["layers", "pairs"])
def test_all_banks_off_is_the_backbone_alone_bit_for_bit(make_model, input_ids, null_bias, by):
    model = make_model(router_null_bias=null_bias)
    base = without_memory(model)
    layers, banks = range(model.config.num_hidden_layers), range(model.config.num_memory_blocks)
    off = Intervention.layers_off(layers) if by == "layers" else Intervention.off((i, k) for i in layers for k in banks)
    with torch.no_grad():
        assert torch.equal(model(input_ids, intervention=off).logits, base(input_ids).logits)
        assert not torch.equal(model(input_ids).logits, base(input_ids).logits)
    assert torch.equal(greedy(model, input_ids, intervention=off)[1], greedy(base, input_ids)[1])


@pytest.mark.parametrize("num_banks", [0, 1, 3])
def test_generation_with_a_cache_equals_without(make_model, input_ids, num_banks):
    model = make_model(num_memory_blocks=num_banks)
    tokens, logits = greedy(model, input_ids, use_cache=True)
    tokens_without, logits_without = greedy(model, input_ids, use_cache=False)
    assert torch.equal(tokens, tokens_without)
    torch.testing.assert_close(logits, logits_without, rtol=1e-4, atol=1e-4)


def test_generate_and_trainer_see_what_the_forward_takes(make_model, input_ids):
    """Both look into the signature; an argument hidden in **kwargs would be dropped or not used, in silence."""
    model = make_model()
    taken = set(inspect.signature(model.forward).parameters)
    assert {"attention_mask", "position_ids", "labels", "logits_to_keep", "intervention"} <= taken
    with torch.no_grad():
        all_logits, last = model(input_ids).logits, model(input_ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, all_logits[:, -1:])


def test_generate_masks_padding_by_itself_as_llama_does(make_model):
    model = make_model()
    padded = torch.tensor([[1, 1, 1, 40, 41]])
    mask = torch.tensor([[0, 0, 0, 1, 1]])
    assert torch.equal(greedy(model, padded)[0], greedy(model, padded, attention_mask=mask)[0])


def test_a_left_padded_batch_equals_its_rows_one_by_one(make_model):
    model, pad = make_model(), 1
    rows = [torch.tensor([[5, 9, 17, 33, 60, 21]]), torch.tensor([[40, 41]]), torch.tensor([[8, 12, 55]])]
    batch = torch.full((3, 6), pad)
    mask = torch.zeros_like(batch)
    for i, row in enumerate(rows):
        batch[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row, 1
    with torch.no_grad():
        together = model(batch, attention_mask=mask).logits
    tokens, logits = greedy(model, batch, attention_mask=mask)
    for i, row in enumerate(rows):
        with torch.no_grad():
            torch.testing.assert_close(together[i : i + 1, -row.shape[1] :], model(row).logits, rtol=1e-4, atol=1e-4)
        row_tokens, row_logits = greedy(model, row)
        assert torch.equal(tokens[i, 6:], row_tokens[0, row.shape[1] :])
        torch.testing.assert_close(logits[i], row_logits[0], rtol=1e-4, atol=1e-4)


def test_a_later_token_changes_nothing_before_it(make_model, input_ids):
    model = make_model()
    changed = input_ids.clone()
    changed[:, 5] = 30
    with torch.no_grad():
        a, b = model(input_ids).logits, model(changed).logits
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-2)


def test_input_embeddings_alone_cannot_address_the_memory(make_model, input_ids):
    model = make_model()
    with pytest.raises(ValueError, match="looks its memory up by token id: pass input_ids") as refusal:
        model(inputs_embeds=model.model.embed_tokens(input_ids))
    assert "\n" not in str(refusal.value)
    base = make_model(num_memory_blocks=0)
    embeddings = base.model.embed_tokens(input_ids)
    assert torch.equal(base(inputs_embeds=embeddings).logits, base(input_ids).logits)


@pytest.mark.parametrize(
    "fields", [{}, {"num_memory_blocks": 0}, {"tie_word_embeddings": True, "router_null_bias": True}]
)
def test_saved_equals_loaded(make_model, input_ids, tmp_path, fields):
    model = make_model(**fields)
    model.save_pretrained(tmp_path)
    loaded = TideForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    for name in ("num_memory_blocks", "router_null_bias", "z_loss_coefficient"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_a_checkpoint_loads_through_the_auto_classes(make_model, input_ids, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is TideConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is TideModel
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is TideForCausalLM
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_a_sharded_checkpoint_loads(make_model, input_ids, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        assert torch.equal(TideForCausalLM.from_pretrained(tmp_path).eval()(input_ids).logits, model(input_ids).logits)


def test_fresh_weights_are_small_and_every_router_starts_near_uniform(make_config, input_ids):
    model = TideForCausalLM(make_config(router_null_bias=True)).eval()
    assert model.model.memory.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    assert torch.equal(model.model.memory.norm.weight, torch.ones(3, 32))
    assert all(layer.router.null_bias == 0 for layer in model.model.layers)
    torch.testing.assert_close(model.trace(input_ids).routing, torch.full((2, 9, 3, 4), 0.25), atol=0.1, rtol=0)
