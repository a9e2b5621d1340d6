"""The engine's benchmarks at a tiny size: what they compare agrees, and a script can read their last line."""

import json

import pytest
import torch

from benchmarks import live_gpu, sweep
from tests.conftest import tiny_model
from tide.cli import run_command
from tide.config import PRESETS

TINY = {**PRESETS["demo"], "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}


def last_line(capfd, main, arguments):
    code = run_command(lambda: main(arguments))
    stdout, stderr = capfd.readouterr()
    assert code == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert set(result) == {"name", "ratios", "detail"}
    assert all(ratio > 0 for ratio in result["ratios"].values())
    return result


def test_both_sides_of_the_sweep_benchmark_find_the_same(capfd, monkeypatch):
    monkeypatch.setattr(sweep, "load", lambda shape: tiny_model())
    result = last_line(capfd, sweep.main, ["--prompt", "6", "--rounds", "2", "--shapes", "demo", "smollm2"])
    assert result["name"] == "sweep"
    assert set(result["ratios"]) == {"demo", "smollm2"}
    detail = result["detail"]["demo"]
    assert detail["switch_offs"] == 3 * (3 + 1)
    assert detail["naive_forwards_per_round"] == 3
    assert detail["largest_difference_nats"] < 1e-5
    assert detail["ratio_spread"]["naive"]["n"] == 2


def test_the_large_model_benchmark_runs_on_the_cpu(capfd, monkeypatch):
    monkeypatch.setitem(PRESETS, "demo", TINY)
    arguments = ["--preset", "demo", "--device", "cpu", "--prompt", "9", "--tokens", "3", "--rounds", "2"]
    result = last_line(capfd, live_gpu.main, arguments)
    assert set(result["ratios"]) == {"forward/limit", "switch/limit", "decode k8/k0"}
    assert result["detail"]["ms"]["switch"]["n"] == 2
    assert result["detail"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--prompt", "4096"], "more than the 2048 positions"), (["--device", "warp"], "--device warp is not usable")],
)
def test_wrong_inputs_are_one_line(capfd, arguments, message):
    assert run_command(lambda: live_gpu.main(arguments)) == 2
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert message in stderr


def test_smollm2_has_the_shape_that_the_claim_names():
    with torch.device("meta"):
        config = sweep.load("smollm2").config
    assert (config.num_hidden_layers, config.hidden_size, config.num_memory_blocks) == (30, 576, 8)
