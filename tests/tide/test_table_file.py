"""`memory="disk"`: the same numbers, from the checkpoint's file."""

import copy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from precompute.measure import Cost
from tests.conftest import tiny_model
from tide import TideForCausalLM
from tide.intervention import Intervention
from tide.table_file import MEMORY_WEIGHT, FileEmbedding, TableFile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint a dtype, one of several files, and one with an untied input embedding in several files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for dtype in DTYPES:
        tiny_model().to(dtype).save_pretrained(folder / str(dtype))
    tiny_model().save_pretrained(folder / "sharded", max_shard_size="12KB")
    untied = tiny_model(tie_word_embeddings=False)
    torch.nn.init.normal_(untied.lm_head.weight)
    untied.save_pretrained(folder / "untied", max_shard_size="12KB")
    for name in ("sharded", "untied"):
        assert len(list((folder / name).glob("*.safetensors"))) > 2
    return folder


def both(folder, dtype=torch.float32):
    return [TideForCausalLM.from_pretrained(folder, dtype=dtype, memory=memory) for memory in ("resident", "disk")]


@given(stored=st.sampled_from(DTYPES), ids=st.sets(st.integers(0, 60), max_size=61))
def test_rows_are_those_of_the_file(checkpoints, stored, ids):
    file = checkpoints / str(stored) / "model.safetensors"
    ids = torch.tensor(sorted(ids), dtype=torch.int64)
    rows = TableFile(file).read(ids)
    assert rows.dtype == stored
    assert torch.equal(rows, load_file(file)[MEMORY_WEIGHT][ids])


@pytest.mark.parametrize("folder", [*map(str, DTYPES), "sharded", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_is_bit_for_bit_that_of_the_resident_memory(checkpoints, folder, dtype, input_ids):
    resident, disk = both(checkpoints / folder, dtype)
    assert disk.model.memory.weight is None
    assert torch.equal(disk(input_ids).logits, resident(input_ids).logits)
    off = Intervention.off([(1, 2)])
    a, b = (model.trace(input_ids, intervention=off) for model in (disk, resident))
    for name in ("routing", "hidden", "memory", "logits"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(disk.model.memory.rows(input_ids), resident.model.memory.rows(input_ids))
    assert torch.equal(disk.generate(input_ids, max_new_tokens=5), resident.generate(input_ids, max_new_tokens=5))


@pytest.mark.parametrize("folder", ["torch.float32", "untied"])
def test_tables_on_disk_are_no_weights_of_the_model(checkpoints, folder):
    resident, disk = both(checkpoints / folder)
    config = resident.config
    tables = config.num_memory_blocks + (not config.tie_word_embeddings)
    numbers = config.vocab_size * tables * config.hidden_size
    assert sum(p.numel() for p in resident.parameters()) - sum(p.numel() for p in disk.parameters()) == numbers
    info = TideForCausalLM.from_pretrained(checkpoints / folder, memory="disk", output_loading_info=True)[1]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("folder", ["sharded", "untied"])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_the_auto_classes_take_it(checkpoints, auto, folder, input_ids):
    model, kept = (auto.from_pretrained(checkpoints / folder, memory=memory) for memory in ("disk", "resident"))
    assert torch.equal(model(input_ids)[0], kept(input_ids)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_model_leaves_its_untied_embedding_on_disk(tmp_path, input_ids, tied):
    base = tiny_model(num_memory_blocks=0, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path)
    disk = TideForCausalLM.from_pretrained(tmp_path, memory="disk")
    assert torch.equal(disk(input_ids).logits, base(input_ids).logits)
    assert isinstance(disk.get_input_embeddings(), FileEmbedding) != tied


def test_an_embedding_on_disk_follows_the_model(checkpoints, input_ids):
    disk = both(checkpoints / "untied")[1]
    assert disk.get_input_embeddings()(input_ids).dtype == torch.float32
    assert disk.to(torch.bfloat16).get_input_embeddings()(input_ids).dtype == torch.bfloat16
    wanted = both(checkpoints / "untied")[0].to(torch.bfloat16)(input_ids)
    assert torch.equal(disk(input_ids).logits, wanted.logits)


def test_threads_and_copies_share_the_file(checkpoints, input_ids):
    resident, disk = both(checkpoints / "torch.float32")
    models = [disk, copy.deepcopy(disk)] * 8
    with ThreadPoolExecutor(8) as pool:
        for logits in pool.map(lambda model: model(input_ids).logits, models):
            assert torch.equal(logits, resident(input_ids).logits)


def test_it_cannot_be_saved_without_its_tables(checkpoints, tmp_path):
    with pytest.raises(
        ValueError, match=r"^This model's tables are not its weights; load it with memory='resident' to save"
    ):
        both(checkpoints / "sharded")[1].save_pretrained(tmp_path / "saved")
    tiny_model(num_memory_blocks=0, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="tables are not its weights"):
        TideForCausalLM.from_pretrained(tmp_path / "base", memory="disk").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_id_beyond_the_table_is_refused(checkpoints):
    disk = both(checkpoints / "torch.float32")[1]
    for bad in (61, -1):
        with pytest.raises(IndexError, match=r"not all in 0\.\.60"):
            disk.model.memory(torch.tensor([[3, bad]]))


def test_a_file_without_the_table_and_a_shortened_one_are_named(checkpoints, tmp_path, input_ids):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / "torch.float32", folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: w for name, w in weights.items() if name != MEMORY_WEIGHT}, file)
    with pytest.raises(ValueError, match=r"model\.safetensors holds no table model\.memory\.weight"):
        TideForCausalLM.from_pretrained(folder, memory="disk")
    save_file({**weights, MEMORY_WEIGHT: weights[MEMORY_WEIGHT].long()}, file)
    with pytest.raises(ValueError, match="holds no table"):
        TableFile(file)
    save_file({MEMORY_WEIGHT: weights[MEMORY_WEIGHT]}, file)
    table = TableFile(file)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(OSError, match="shorter than its header says"):
        table.read(torch.tensor([60]))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory")
def test_a_forward_takes_the_rows_it_reads_and_no_more(tmp_path):
    model = tiny_model(vocab_size=40_000, num_memory_blocks=24, tie_word_embeddings=False)  # 123 MB in the file
    model.save_pretrained(tmp_path)
    del model
    with Cost() as idle:
        pass
    with Cost() as cost:
        disk = TideForCausalLM.from_pretrained(tmp_path, memory="disk")
        with torch.no_grad():
            disk.model(torch.arange(100, 4000, 70).unsqueeze(0))
    assert cost.peak_memory_mb - idle.peak_memory_mb < 60
