"""Tables read from the files equal those of the loaded model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from precompute.measure import Cost
from precompute.tables import CheckpointTables
from tests.conftest import tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [False, True])
def test_rows_are_what_the_model_reads(tmp_path, tied, shards):
    model = tiny_model(tie_word_embeddings=tied)
    torch.nn.init.normal_(model.model.memory.norm.weight)
    if not tied:
        torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shards
    tables = CheckpointTables(tmp_path, model.config)
    memory = model.model.memory(torch.arange(61)).detach().numpy()
    assert tables.names == (("embedding", 0, 1, 2) if tied else ("embedding", "unembedding", 0, 1, 2))
    np.testing.assert_array_equal(tables.read("embedding", 3, 20), model.get_input_embeddings().weight[3:20].detach())
    np.testing.assert_array_equal(tables.read_banks(3, 20), memory[3:20])
    np.testing.assert_array_equal(tables.read_banks(3, 20, raw=True), model.model.memory.weight[3:20].detach())
    for bank in range(3):
        np.testing.assert_array_equal(tables.read(bank, 3, 20), memory[3:20, bank])
        np.testing.assert_array_equal(np.concatenate(list(tables.tiles(bank, 9))), memory[:, bank])
    if not tied:
        np.testing.assert_array_equal(tables.read("unembedding", 0, 61), model.lm_head.weight.detach())


@pytest.mark.parametrize("at_once", [1, 5_000])
def test_rows_are_the_same_however_many_are_mapped_at_once(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr("precompute.tables.MAPPED_BYTES", at_once)
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tables = CheckpointTables(tmp_path, model.config)
    memory = model.model.memory(torch.arange(61)).detach().numpy()
    np.testing.assert_array_equal(tables.read(1, 3, 60), memory[3:60, 1])
    read = tables.read("embedding", 0, 61)
    read[:] = 0  # a copy: what is read again is what the file holds
    np.testing.assert_array_equal(tables.read("embedding", 0, 61), model.get_input_embeddings().weight.detach())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory")
def test_reading_a_bank_takes_one_tile_of_it(tmp_path):
    model = tiny_model(vocab_size=60_000, num_memory_blocks=16)  # 123 MB in the file
    model.save_pretrained(tmp_path)
    tables = CheckpointTables(tmp_path, model.config)
    del model
    with Cost() as idle:
        pass
    with Cost() as cost:
        for bank in range(16):
            for _ in tables.tiles(bank, 1000):
                pass
        tables.read(3, 0, 60_000)  # 8 MB, all rows in one tile
    assert cost.peak_memory_mb - idle.peak_memory_mb < 60


def test_half_precision_weights_are_normed_in_float32(tmp_path):
    model = tiny_model().bfloat16()
    model.save_pretrained(tmp_path)
    read = CheckpointTables(tmp_path, model.config).read_banks(0, 61)
    expected = model.float().model.memory(torch.arange(61)).detach().numpy()
    np.testing.assert_array_equal(read, expected)


def test_a_model_without_banks_has_the_embedding_alone(tmp_path):
    model = tiny_model(num_memory_blocks=0)
    model.save_pretrained(tmp_path)
    tables = CheckpointTables(tmp_path, model.config)
    assert tables.names == ("embedding", "unembedding")
    assert tables.read_banks(0, 5).shape == (5, 0, 32)
