import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from tests.conftest import randomize, tiny_model
from tide.cli import UserError
from tide.model import TideForCausalLM
from tide.training.upcycle import (
    freeze_backbone,
    memory_parameters,
    source_config,
    source_name,
    source_tokenizer,
    upcycle,
)

VOCAB_SIZE = 61
IDS = torch.tensor([[5, 9, 17, 9, 33, 60, 5, 21, 9], [40, 41, 42, 40, 8, 8, 12, 55, 41]])
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ARCHITECTURES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "grouped queries": {"num_key_value_heads": 1},
    "its own head width": {"head_dim": 12},
    "llama 3 rope": {"rope_parameters": LLAMA_3_ROPE},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a coarse norm": {"rms_norm_eps": 0.1},
}


def save_llama(folder, dtype=torch.float32, max_shard_size="1GB", **fields):
    """A LLaMA checkpoint of a few thousand random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        **fields,
    )
    model = LlamaForCausalLM(config)
    randomize(model, seed=1)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture
def copy(llama, tmp_path):
    """A copy of the checkpoint to damage."""
    return shutil.copytree(llama, tmp_path / "llama")


@torch.no_grad()
def logits_of(model, ids=IDS):
    return model.eval()(ids).logits


def llama_logits(folder, ids=IDS):
    return logits_of(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), ids)


def train(model, steps, lr=1e-2):
    """Plain AdamW on one batch; returns the loss before every step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def backward(model):
    """Gradients of the loss by name, absent where there is none."""
    model.zero_grad(set_to_none=True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("num_banks", [0, 3])
@pytest.mark.parametrize("fields", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_the_logits_are_the_originals_bit_for_bit(tmp_path, fields, num_banks):
    folder = save_llama(tmp_path / "llama", **fields)
    model = upcycle(folder, num_banks)
    assert model.config.num_memory_blocks == num_banks
    assert torch.equal(logits_of(model), llama_logits(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_dtype_and_in_shards_become_float32(tmp_path, dtype):
    folder = save_llama(tmp_path / "llama", dtype=dtype, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = upcycle(folder, 2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(logits_of(model), llama_logits(folder))


@given(
    num_banks=st.integers(1, 6), seed=st.integers(0, 2**31), ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1)
)
@hypothesis_settings(max_examples=15)
def test_memory_is_silent_whatever_was_drawn(llama, num_banks, seed, ids):
    batch = torch.tensor([ids])
    assert torch.equal(logits_of(upcycle(llama, num_banks, seed=seed), batch), llama_logits(llama, batch))


def test_memory_is_silent_with_a_null_bias_too(llama):
    assert torch.equal(logits_of(upcycle(llama, 2, router_null_bias=True)), llama_logits(llama))


def test_what_is_saved_is_still_silent(llama, tmp_path):
    upcycle(llama, 2).save_pretrained(tmp_path / "tide")
    assert torch.equal(logits_of(TideForCausalLM.from_pretrained(tmp_path / "tide")), llama_logits(llama))


def test_it_generates_what_the_original_generates(llama):
    original = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(upcycle(llama, 2).generate(IDS, **kwargs), original.generate(IDS, **kwargs))


def test_the_configuration_is_the_originals(tmp_path):
    fields = {**ARCHITECTURES["llama 3 rope"], **ARCHITECTURES["biases"], "eos_token_id": [2, 7], "hidden_act": "gelu"}
    folder = save_llama(tmp_path / "llama", **fields)
    config = upcycle(folder, 2, z_loss_coefficient=0.5).config.to_dict()
    promised = source_config(folder, 2, z_loss_coefficient=0.5).to_dict()
    assert {**promised, "dtype": config["dtype"]} == config
    for name, value in LlamaConfig.from_pretrained(folder).to_dict().items():
        if name not in ("model_type", "architectures", "dtype"):
            assert config[name] == value, name
    assert (config["model_type"], config["num_memory_blocks"], config["z_loss_coefficient"]) == ("tide", 2, 0.5)


def test_a_configuration_in_the_older_notation_is_understood(tmp_path):
    """Llama 3's own config.json says rope_theta, rope_scaling and torch_dtype."""
    folder = save_llama(tmp_path / "llama", rope_parameters=LLAMA_3_ROPE)
    expected = llama_logits(folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": fields.pop("dtype")}
    file.write_text(json.dumps(fields))
    assert torch.equal(logits_of(upcycle(folder, 2)), expected)


def test_a_seed_draws_rows_and_routers_and_nothing_outside(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (dict(memory_parameters(upcycle(llama, 2, seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    for name in one:
        assert torch.equal(one[name], same[name])
        assert torch.equal(one[name], other[name]) == (name == "model.memory.norm.weight")
    rows = one["model.memory.weight"]
    assert rows.std().item() == pytest.approx(LlamaConfig().initializer_range, rel=0.1)
    assert abs(rows.mean().item()) < 0.002


def test_the_first_step_moves_gains_alone_and_the_next_ones_all(llama):
    model = upcycle(llama, 2)
    freeze_backbone(model)
    gradients = backward(model)
    assert gradients.keys() == {name for name, _ in memory_parameters(model)}
    for name, gradient in gradients.items():
        assert bool(gradient.any()) == (name == "model.memory.norm.weight"), name
    train(model, steps=2)
    gradients = backward(model)
    assert all(gradient.any() for gradient in gradients.values())
    seen = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    seen[IDS[:, :-1].flatten()] = True
    assert torch.equal(gradients["model.memory.weight"].flatten(1).any(dim=1), seen)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_a_frozen_backbone_learns_and_stays_as_it_was(tmp_path, fields):
    model = upcycle(save_llama(tmp_path / "llama", **fields), 2)
    freeze_backbone(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, steps=20)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    learned = {name for name, _ in memory_parameters(model)}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in learned), name


def test_without_freezing_the_backbone_learns_too(llama):
    model = upcycle(llama, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, steps=2)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_is_trained_with_a_frozen_backbone(make_model):
    model = make_model(router_null_bias=True)
    freeze_backbone(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    routers = {f"model.layers.{i}.router.{part}" for i in range(3) for part in ("proj.weight", "null_bias")}
    assert trained == {"model.memory.weight", "model.memory.norm.weight"} | routers


def test_nothing_is_left_to_train_without_memory(make_model):
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze_backbone(make_model(num_memory_blocks=0))


def injection_size(model):
    """Root mean square of what the model reads, M_k(v), over the tokens that it was trained on."""
    with torch.no_grad():
        return model.model.memory(IDS).pow(2).mean().sqrt().item()


def test_zero_rows_would_jump_in_the_first_step(llama):
    """A row that has moved by anything is normalised to unit size; a gain that has moved by lr reads as lr."""
    ours, zero_rows = upcycle(llama, 2), upcycle(llama, 2)
    torch.nn.init.ones_(zero_rows.model.memory.norm.weight)
    torch.nn.init.zeros_(zero_rows.model.memory.weight)
    assert torch.equal(logits_of(zero_rows), logits_of(ours))
    for model in (ours, zero_rows):
        freeze_backbone(model)
        train(model, steps=1, lr=1e-2)
    assert injection_size(ours) == pytest.approx(1e-2, rel=0.05)
    assert injection_size(zero_rows) > 0.9


@pytest.mark.parametrize(("bias", "is_silent"), [(20.0, False), (200.0, True)])
def test_a_router_biased_to_the_null_bank_would_not_be_silent_or_never_wake(llama, bias, is_silent):
    """Either the softmax leaves the banks some weight, or it underflows and leaves no gradient to any of them."""
    model = upcycle(llama, 2, router_null_bias=True)
    torch.nn.init.ones_(model.model.memory.norm.weight)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.router.null_bias, bias)
    assert torch.equal(logits_of(model), llama_logits(llama)) == is_silent
    freeze_backbone(model)
    assert any(gradient.any() for gradient in backward(model).values()) != is_silent


def test_a_base_checkpoint_gets_its_memory(tmp_path):
    base = tiny_model(num_memory_blocks=0, z_loss_coefficient=0.25)
    base.save_pretrained(tmp_path / "base")
    model = upcycle(tmp_path / "base", 3)
    assert (model.config.num_memory_blocks, model.config.z_loss_coefficient) == (3, 0.25)
    assert torch.equal(logits_of(model), logits_of(base))


@pytest.mark.parametrize("num_banks", [0, 3])
def test_a_checkpoint_with_as_many_banks_goes_on_as_it_is(tmp_path, num_banks):
    tide = tiny_model(num_memory_blocks=num_banks)
    tide.save_pretrained(tmp_path / "tide")
    model = upcycle(tmp_path / "tide", num_banks, seed=7)
    for (name, parameter), (_, expected) in zip(model.named_parameters(), tide.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def refused(source, match, num_banks=2):
    with pytest.raises(UserError, match=match) as caught:
        upcycle(source, num_banks)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(source) in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize("num_banks", [0, 2, 4])
def test_a_checkpoint_with_other_banks_is_refused(tmp_path, num_banks):
    tiny_model(num_memory_blocks=3).save_pretrained(tmp_path / "tide")
    refused(tmp_path / "tide", f"3 memory banks already, not {num_banks}", num_banks)


def test_another_architecture_is_refused(tmp_path):
    MistralConfig().save_pretrained(tmp_path)
    refused(tmp_path, "model type 'mistral'")


def test_quantised_weights_are_refused(copy):
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "awq"}}))
    refused(copy, "quantised")


@pytest.mark.parametrize("make_source", [lambda folder: folder, lambda folder: str(folder), lambda _: "../nowhere"])
def test_a_missing_folder(tmp_path, make_source):
    refused(make_source(tmp_path / "nowhere"), "does not exist")


def test_a_name_that_the_hub_does_not_know(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "cannot be read")


def test_a_folder_without_config(tmp_path):
    refused(tmp_path, r"holds no config\.json")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config(copy, text):
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    refused(copy, r"config\.json of .* cannot be read")


def test_missing_weights(copy):
    (copy / "model.safetensors").unlink()
    refused(copy, r"cannot be loaded .*model\.safetensors")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file(copy, kept):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    refused(copy, "cannot be loaded")


def edit_weights(folder, **changes):
    """Replaces weights by name, or takes those away whose new value is None."""
    weights = {**load_file(folder / "model.safetensors"), **changes}
    weights = {name: value for name, value in weights.items() if value is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lm_head.weight": None, "model.norm.weight": None}, r"lacks the weights lm_head\.weight and 1 more"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, r"against its config\.json, .* model\.layers\.2"),
        ({"model.norm.weight": torch.zeros(16)}, r"another shape .* model\.norm\.weight"),
    ],
    ids=["missing", "unknown", "another shape"],
)
def test_weights_that_are_not_the_configurations(copy, changes, match):
    """transformers would draw what is missing at random and say so in a warning."""
    edit_weights(copy, **changes)
    refused(copy, match)


def test_the_rotary_frequencies_that_old_checkpoints_carry_do_no_harm(copy):
    edit_weights(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert torch.equal(logits_of(upcycle(copy, 2)), llama_logits(copy))


def test_loading_says_nothing(llama, capfd):
    upcycle(llama, 2)
    assert capfd.readouterr() == ("", "")


def test_a_configuration_that_is_not_valid(copy):
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "wide"}))
    refused(copy, r"config\.json of .* is not valid \(.*hidden_size")


def test_a_name_belongs_to_the_weights_not_to_the_place(llama, copy):
    assert source_name(copy) == source_name(str(llama))
    edit_weights(copy, **{"model.norm.weight": torch.zeros(32)})
    assert source_name(copy) != source_name(llama)
    assert source_name("someone/model") == "someone/model"


def test_the_tokenizer_lies_with_the_checkpoint(copy, tokenizer):
    tokenizer.save_pretrained(copy)
    found = source_tokenizer(copy)
    assert found.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (found.bos_token_id, found.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_a_checkpoint_without_a_readable_tokenizer(copy, tokenizer, text):
    if text is not None:
        tokenizer.save_pretrained(copy)
        (copy / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="holds no tokenizer that transformers can read"):
        source_tokenizer(copy)
