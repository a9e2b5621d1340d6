"""`memory="int8"` and `"int4"`: the tables in few bits, and what is read back from them."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM

from tests.conftest import tiny_model
from tide import TideForCausalLM, quantization
from tide.intervention import Intervention
from tide.quantization import QUANTIZATIONS, Quantization, QuantizedTable, packed, unpacked
from tide.table_file import TableFile

FORMS = list(QUANTIZATIONS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint in bfloat16, one of several files with an untied input embedding, and one of an odd width."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_model().bfloat16().save_pretrained(folder / "bfloat16")
    untied = tiny_model(tie_word_embeddings=False)
    torch.nn.init.normal_(untied.lm_head.weight)
    untied.save_pretrained(folder / "untied", max_shard_size="12KB")
    tiny_model(hidden_size=36, num_attention_heads=2, num_key_value_heads=2).save_pretrained(folder / "width 36")
    return folder


def rounded(folder, form):
    """The same checkpoint with its tables resident, every number rounded as the form does."""
    model = TideForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = model.model.memory.weight
    with torch.no_grad():
        weight.copy_(QUANTIZATIONS[form].rounded(weight))
    return model


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 70),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 1, 8, 32]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**16),
)
def test_a_number_is_a_whole_number_of_scales_and_near(rows, width, bits, group, scale, seed):
    most, numbers = 2 ** (bits - 1) - 1, np.random.default_rng(seed).normal(size=(rows, width)) * scale
    numbers[0] = 0
    numbers = numbers.astype(np.float32)
    way = Quantization(bits, group)
    codes, scales = way.quantize(torch.from_numpy(numbers))
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    made = way.dequantize(codes, scales).numpy()
    assert made.shape == numbers.shape
    assert (way.rounded(torch.from_numpy(numbers)).numpy() == made).all()
    for row, back, whole in zip(numbers, made, codes.numpy(), strict=True):
        for start in range(0, width, group or width):
            part = slice(start, start + (group or width))
            step = float(torch.tensor(np.abs(row[part]).max() / np.float32(most)).bfloat16())
            assert np.abs(whole[part]).max() <= most
            np.testing.assert_allclose(back[part], whole[part] * np.float32(step), rtol=1e-6)
            assert np.abs(back[part].astype(np.float64) - row[part]).max() <= step * (0.5 + most / 256)  # rounded scale


@given(width=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_two_codes_of_4_bits_are_a_byte(width, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(-7, 8, size=(5, 2, width), dtype=np.int8))
    together = packed(codes)
    assert together.shape == (5, 2, (width + 1) // 2)
    assert together.dtype == torch.uint8
    assert torch.equal(unpacked(together, width), codes)


def test_bytes_count_every_scale():
    int8, int4 = QUANTIZATIONS["int8"], QUANTIZATIONS["int4"]
    assert int8.bytes(10 * 128, 128) == 10 * (128 + 2)
    assert int4.bytes(10 * 128, 128) == 10 * (64 + 4 * 2)
    assert int4.bytes(10 * 40, 40) == 10 * (20 + 2 * 2)  # the last group of a row is a short one


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("folder", ["bfloat16", "untied", "width 36"])
def test_a_forward_is_that_of_the_rounded_tables(checkpoints, folder, form, input_ids):
    model = TideForCausalLM.from_pretrained(checkpoints / folder, dtype=torch.float32, memory=form)
    expected = rounded(checkpoints / folder, form)
    assert torch.equal(model(input_ids).logits, expected(input_ids).logits)
    off = Intervention.off([(1, 2)])
    a, b = (each.trace(input_ids, intervention=off) for each in (model, expected))
    for name in ("routing", "hidden", "memory", "logits"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(model.model.memory.rows(input_ids), expected.model.memory.rows(input_ids))
    assert torch.equal(model.generate(input_ids, max_new_tokens=5), expected.generate(input_ids, max_new_tokens=5))


@pytest.mark.parametrize("form", FORMS)
def test_the_tables_are_held_in_few_bits_alone(checkpoints, form):
    folder = checkpoints / "bfloat16"
    model, info = TideForCausalLM.from_pretrained(folder, memory=form, output_loading_info=True)
    config, memory = model.config, model.model.memory
    numbers = config.vocab_size * config.num_memory_blocks * config.hidden_size
    assert memory.weight is None
    assert memory.table.num_bytes == QUANTIZATIONS[form].bytes(numbers, config.hidden_size)
    resident = TideForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in resident.parameters()) - sum(p.numel() for p in model.parameters()) == numbers
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("form", FORMS)
def test_it_is_quantised_a_part_at_a_time(checkpoints, form, monkeypatch):
    file = TableFile.of_checkpoint(checkpoints / "bfloat16")
    whole = QuantizedTable.from_file(file, QUANTIZATIONS[form])
    most, read = [], TableFile.read
    monkeypatch.setattr(TableFile, "read", lambda self, ids: most.append(len(ids)) or read(self, ids))
    monkeypatch.setattr(quantization, "TILE_NUMBERS", 7 * file.shape[1] * file.shape[2])
    parts = QuantizedTable.from_file(file, QUANTIZATIONS[form])
    assert max(most) == 7
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_the_auto_classes_and_copies_take_it(checkpoints, auto, form, input_ids):
    model = auto.from_pretrained(checkpoints / "untied", memory=form)
    output = model(input_ids)[0]
    assert torch.equal(copy.deepcopy(model)(input_ids)[0], output)
    assert not model.get_input_embeddings().weight.is_meta  # an embedding is no memory: it is a weight as ever


def test_it_follows_the_models_dtype(checkpoints, input_ids):
    model = TideForCausalLM.from_pretrained(checkpoints / "bfloat16", dtype=torch.bfloat16, memory="int8")
    assert model.model.memory(input_ids).dtype == torch.bfloat16
    assert model.float().model.memory(input_ids).dtype == torch.float32


def test_a_base_model_has_nothing_to_quantise(tmp_path, input_ids):
    base = tiny_model(num_memory_blocks=0)
    base.save_pretrained(tmp_path)
    model = TideForCausalLM.from_pretrained(tmp_path, memory="int4")
    assert torch.equal(model(input_ids).logits, base.eval()(input_ids).logits)


def test_it_cannot_be_saved_without_its_tables(checkpoints, tmp_path):
    model = TideForCausalLM.from_pretrained(checkpoints / "bfloat16", memory="int4")
    with pytest.raises(ValueError, match=r"^This model's tables are not its weights; load it with memory='resident'"):
        model.save_pretrained(tmp_path)


def test_an_id_beyond_the_table_is_refused(checkpoints):
    model = TideForCausalLM.from_pretrained(checkpoints / "bfloat16", memory="int8")
    for beyond in (-1, model.config.vocab_size):
        with pytest.raises(IndexError):
            model.model.memory(torch.tensor([[3, beyond]]))
