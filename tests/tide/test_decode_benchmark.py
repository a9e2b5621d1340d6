"""The decode benchmark: one backbone for all, and a last line that a script can read."""

import json

import pytest
import torch

from benchmarks import decode
from tide.cli import run_command
from tide.config import PRESETS

TINY = {**PRESETS["demo"], "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "demo", TINY)


def test_a_run_ends_with_one_json_line(capfd):
    code = run_command(lambda: decode.main(["--tokens", "5", "--repeats", "3", "--device", "cpu", "--prompt", "4"]))
    stdout, stderr = capfd.readouterr()
    assert code == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert set(result) == {"name", "ratios", "detail"}
    assert result["name"] == "decode"
    assert set(result["ratios"]) == {"k0/hf", "k8/k0", "k24/k0"}
    assert all(ratio > 0 for ratio in result["ratios"].values())
    detail = result["detail"]
    assert set(detail["ms_per_token"]) == {"hf", "k0", "k8", "k24"}
    for values in [*detail["ms_per_token"].values(), *detail["ratio_spread"].values()]:
        assert values["n"] == 3
        assert 0 < values["min"] <= values["median"] <= values["max"]
    assert {"torch", "transformers", "device", "threads", "preset", "dtype"} <= set(detail)


def test_all_models_share_the_tensors_of_one_backbone():
    models = decode.build_models("demo", torch.device("cpu"), torch.float32)
    backbone = {name: p.data_ptr() for name, p in models["hf"].named_parameters()}
    for name in ("k0", "k8", "k24"):
        own = {key: p.data_ptr() for key, p in models[name].named_parameters()}
        assert {key: own[key] for key in backbone} == backbone
        assert models[name].lm_head.weight.data_ptr() == backbone["model.embed_tokens.weight"]  # tied
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(models["k0"](ids).logits, models["hf"](ids).logits)
        assert not torch.equal(models["k8"](ids).logits, models["hf"](ids).logits)


def test_every_round_runs_every_model_and_the_order_moves(monkeypatch):
    order = []
    monkeypatch.setattr(decode, "decode_ms", lambda model, prompt, tokens: order.append(model) or 1.0)
    decode.measure({name: name for name in "abcd"}, torch.zeros(1, 1), tokens=9, repeats=3)
    assert "".join(order[4:]) == "abcd" + "bcda" + "cdab"  # after the warm-up


def test_the_clock_leaves_the_prefill_out_and_takes_the_median(monkeypatch):
    clock = decode.TokenClock(torch.device("cpu"))
    times = iter([0.0, 5.0, 5.001, 5.003, 5.103])  # prompt, then four tokens, the last of them held up
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(times))
    for _ in range(5):
        clock.put(torch.zeros(1))
    clock.end()
    assert clock.decode_ms == pytest.approx(2.0)


def test_ratios_are_taken_within_a_round():
    taken = {"hf": [1.0, 10.0, 1.0], "k0": [1.0, 10.0, 2.0], "k8": [2.0, 20.0, 4.0], "k24": [3.0, 30.0, 6.0]}
    ratios, spread = decode.report(taken)
    assert ratios == {"k0/hf": 1.0, "k8/k0": 2.0, "k24/k0": 3.0}
    assert spread["ratio_spread"]["k0/hf"] == {"median": 1.0, "min": 1.0, "max": 2.0, "n": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "250"], "more than the 256 positions"),
        (["--device", "warp"], "--device warp is not usable"),
        (["--repeats", "0"], "0 is below 1"),
    ],
)
def test_wrong_inputs_are_one_line(capfd, arguments, message):
    assert run_command(lambda: decode.main(arguments)) == 2
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("error: ")
    assert message in stderr
