import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precompute import Artifacts
from precompute.pipeline import run
from precompute.probe import probe_windows
from precompute.stage import Context
from precompute.stages import compression
from precompute.stages.compression import (
    PERCENTS,
    compressed_forms,
    probe_losses,
    projection,
    rank,
    right_singular_vectors,
    truncation_error,
)
from tests.conftest import tiny_config
from tide.checkpoint import load_checkpoint
from tide.cli import UserError
from tide.quantization import QUANTIZATIONS

FORMS = ["none", "int8", "int4", *(f"svd-{percent}" for percent in PERCENTS)]


@pytest.fixture(scope="module")
def own(job, tmp_path_factory):
    return replace(job, probe_tokens=500, out=tmp_path_factory.mktemp("compression") / "artifacts")


@pytest.fixture(scope="module")
def context(own):
    run(own, ["compression"])
    return Context(own)


@pytest.fixture(scope="module")
def table(context):
    return Artifacts.open(context.job.out).compression().set_index("form")


# --- Low rank ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 4096), st.sampled_from(PERCENTS))
def test_the_rank_is_that_of_figure_12(width, percent):
    assert rank(percent, width) == math.ceil((100 - percent) * width / 100)  # ceil((1 - p) d), without its rounding
    assert 1 <= rank(percent, width) <= width


@pytest.mark.parametrize("tile_rows", [7, 10_000])
@pytest.mark.parametrize("kept", [1, 13, 32])
def test_projections_are_the_truncated_svd(context, tile_rows, kept):
    found = [right_singular_vectors(context.tables, bank, tile_rows, torch.device("cpu")) for bank in range(3)]
    project = projection([of.vectors[:, :kept] for of in found])
    error = size = 0.0
    for bank in range(3):
        rows = torch.from_numpy(context.tables.read(bank, 0, context.config.vocab_size, raw=True))
        u, s, vh = torch.linalg.svd(rows.double(), full_matrices=False)
        torch.testing.assert_close(found[bank].energies, s**2)
        expected = (u[:, :kept] * s[:kept] @ vh[:kept]).float()
        torch.testing.assert_close(project(bank, rows), expected, rtol=1e-4, atol=1e-5)
        error += float((expected - rows).double().square().sum())
        size += float(rows.double().square().sum())
    energies = np.stack([of.energies.numpy() for of in found])
    assert truncation_error(energies, kept) == pytest.approx(math.sqrt(error / size), abs=1e-6)


def test_a_memory_of_zeros_has_no_error():
    assert truncation_error(np.zeros((2, 4)), 1) == 0


# --- The stage ---------------------------------------------------------------------------------------------------


def test_forms_and_their_bytes(table, context):
    assert table.index.tolist() == FORMS
    numbers = context.config.vocab_size * 3 * 32
    assert table.loc["none", "bytes"] == 4 * numbers  # a float32 checkpoint
    assert table.loc["int8", "bytes"] == numbers + 2 * numbers // 32
    assert table.loc["int4", "bytes"] == numbers // 2 + 2 * numbers // 32
    assert table.loc["svd-50", "bytes"] == 4 * 3 * 16 * (context.config.vocab_size + 32)
    assert table.loc[["svd-0", "svd-90"], "rank"].tolist() == [32, 4]
    half = compressed_forms(tiny_config(dtype="bfloat16")).set_index("form")
    assert half.loc["none", "bytes"] == 2 * 61 * 3 * 32


def test_the_less_is_kept_the_larger_the_error(table):
    error = table["error"]
    assert error["none"] == 0
    assert error["svd-0"] < 1e-5
    assert error[[f"svd-{percent}" for percent in PERCENTS]].is_monotonic_increasing
    assert 0 < error["int8"] < 0.02 < error["int4"] < 0.2
    assert abs(table.loc["svd-0", "difference"]) < 1e-5
    assert abs(table.loc["int8", "difference"]) < abs(table.loc["svd-90", "difference"])


@pytest.mark.parametrize("form", ["int4", "svd-70"])
def test_losses_are_those_of_a_model_with_the_tables_put_in(table, context, form):
    text, tables = context.text, context.tables
    model, _ = load_checkpoint(context.job.checkpoint)
    whole = np.stack([tables.read(k, 0, context.config.vocab_size, raw=True) for k in range(3)], axis=1)
    if form == "int4":
        new = QUANTIZATIONS["int4"].rounded(torch.from_numpy(whole))
    else:
        low_rank = []
        for bank in range(3):
            u, s, vh = np.linalg.svd(whole[:, bank], full_matrices=False)
            low_rank.append(u[:, :10] * s[:10] @ vh[:10])
        new = torch.from_numpy(np.stack(low_rank, axis=1))
    windows = probe_windows(text, 500).tolist()
    unchanged = probe_losses(model, text, windows, lambda steps: None)
    with torch.no_grad():
        model.model.memory.weight.copy_(new)
    losses = probe_losses(model, text, windows, lambda steps: None)
    np.testing.assert_allclose(table.loc[form, "loss"], losses.mean(dtype=np.float64), atol=1e-5)
    np.testing.assert_allclose(table.loc["none", "loss"], unchanged.mean(dtype=np.float64), atol=1e-6)
    error = np.linalg.norm(new.numpy() - whole) / np.linalg.norm(whole)
    np.testing.assert_allclose(table.loc[form, "error"], error, rtol=1e-4)


def test_the_memory_is_put_back_whatever_happens(context, monkeypatch):
    memory = context.model.model.memory
    table, stage = memory.table, compression.Compression()
    stage.measure(context, "int8")
    assert memory.table is table

    def stop(*_):
        assert memory.table is not table
        raise KeyboardInterrupt

    monkeypatch.setattr(compression, "probe_losses", stop)
    with pytest.raises(KeyboardInterrupt):
        stage.measure(context, "int8")
    assert memory.table is table


@pytest.mark.parametrize("piece", ["int4", "vectors-1", "svd-40"])
def test_pieces_of_a_stopped_run_make_the_same_file(own, context, tmp_path, monkeypatch, piece):
    again, measure = replace(own, out=tmp_path / "artifacts"), compression.Compression.measure
    monkeypatch.setattr(compression.Compression, "measure", lambda s, c, p: measure(s, c, p) if p != piece else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(again, ["compression"])
    monkeypatch.undo()
    run(again, ["compression"])
    file = "compression/compression.parquet"
    assert (again.out / file).read_bytes() == (own.out / file).read_bytes()


def test_the_reader_answers_by_text_and_bin(context):
    artifacts = Artifacts.open(context.job.out)
    bins = {bin: artifacts.compression(bin=bin) for bin in ("rare", "mid", "common", "none")}
    n = sum(rows["n"].iloc[0] for rows in bins.values() if len(rows))
    assert n == artifacts.compression(text="text")["n"].iloc[0]
    with pytest.raises(ValueError, match="There is no bin '3'"):
        artifacts.compression(bin="3")
    with pytest.raises(ValueError, match="There is no text 'poem'"):
        artifacts.compression(text="poem")


def test_a_base_model_is_refused_by_name(own, tmp_path):
    base = replace(own, checkpoint=own.base, base=None, out=tmp_path)
    with pytest.raises(UserError, match=r"base is a Base model \(K = 0\) without memory to compress; give a TIDE"):
        run(base, ["compression"])
