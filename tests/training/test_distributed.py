"""Several processes train what one process trains: DDP and FSDP on two CPU processes, their states and their ends."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import toy_documents
from tests.training.launch import SAVE_EVERY, SEQUENCE_LENGTH, STEPS, Job, launched
from tests.training.tiny_run import tiny_run
from tide import TideForCausalLM
from tide.cli import UserError
from tide.training.__main__ import main
from tide.training.summaries import Summary, read_summaries

ROOT = Path(__file__).parents[2]
STOP = SAVE_EVERY + 2  # between two regular states
RATE = "tokens_per_second"  # the one number of the log that is not the run's but the machine's


def torchrun(*arguments) -> subprocess.CompletedProcess:
    """Runs a module in two processes, as `torchrun --nproc-per-node 2 -m` does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = launcher + [str(a) for a in arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def in_one_process(data_folder, job) -> Path:
    AcceleratorState._reset_state(reset_partial_state=True)
    job.train(data_folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    return Path(job.out)


def log_of(folder):
    records = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != RATE} for record in records]


def steps_and_losses(folder):
    return [record["step"] for record in log_of(folder)], [record["loss"] for record in log_of(folder)]


def assert_same_run(folder, other, loss=1e-5, weight=1e-4):
    """That two finished runs agree in losses, gradients, routing, tokens, summaries and weights up to rounding."""
    logs = list(zip(log_of(folder), log_of(other), strict=True))
    for record, expected in logs:
        assert record.keys() == expected.keys()
        assert [record[key] for key in ("step", "tokens", "learning_rate")] == [
            expected[key] for key in ("step", "tokens", "learning_rate")
        ]
        assert record["loss"] == pytest.approx(expected["loss"], abs=loss)
        assert record["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)
        assert record["null_weight"] == pytest.approx(expected["null_weight"], abs=2e-4)
    assert logs[-1][0]["loss"] < logs[0][0]["loss"] - 0.5  # it learns: equal is not equally idle

    for summary, expected in zip(read_summaries(folder), read_summaries(other), strict=True):
        for field in fields(Summary):
            actual, wanted = (np.asarray(getattr(s, field.name)) for s in (summary, expected))
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6, err_msg=f"{field.name}, {summary.step}")

    counts, expected_counts = (load_file(f / "token_counts.safetensors")["counts"] for f in (folder, other))
    assert np.array_equal(counts, expected_counts)
    weights, expected_weights = (loaded(f).state_dict() for f in (folder, other))
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=0, atol=weight, msg=name)


def loaded(folder):
    """The checkpoint of a finished run, whole."""
    model, info = TideForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def assert_identical(folder, other):
    """That two finished runs are the same, bit for bit; a resumed run repeats no line of log and summaries."""
    assert log_of(folder) == log_of(other)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (folder / "token_counts.safetensors").read_bytes() == (other / "token_counts.safetensors").read_bytes()
    assert (folder / "summaries.jsonl").read_text() == (other / "summaries.jsonl").read_text()
    assert not list(folder.glob("state-*"))


@pytest.fixture(scope="module")
def alone(data_folder, tmp_path_factory):
    """Folders of what one process trains: whole runs, tied and untied."""
    out = tmp_path_factory.mktemp("alone")
    return {tied: in_one_process(data_folder, Job(str(out / str(tied)), tied=tied)) for tied in (True, False)}


@pytest.fixture(scope="module")
def first(data_folder, alone, tmp_path_factory):
    """A folder of runs of two processes: whole ones, one that was stopped and one whose second process was killed."""
    out = tmp_path_factory.mktemp("first")
    jobs = [
        Job(str(out / "ddp")),
        Job(str(out / "fsdp"), engine="fsdp"),
        Job(str(out / "fsdp-untied"), engine="fsdp", tied=False),
        Job(str(out / "fsdp-stopped"), engine="fsdp", stop_at=STOP),
        Job(str(out / "ddp-killed"), dies_at=STOP),
    ]
    done = torchrun(*launched(data_folder, jobs))
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def second(data_folder, first, tmp_path_factory):
    """A folder of runs of two more processes: the unfinished ones resumed, and FSDP with one loading process."""
    out = tmp_path_factory.mktemp("second")
    for name in ("ddp-killed", "fsdp-stopped"):
        shutil.copytree(first / name, out / name)
    jobs = [
        Job(str(out / "ddp-killed"), resume=True),
        Job(str(out / "fsdp-stopped"), engine="fsdp", resume=True),
        Job(str(out / "fsdp-empty"), engine="fsdp-empty"),
        Job(str(out / "fsdp-empty-untied"), engine="fsdp-empty", tied=False),
    ]
    done = torchrun(*launched(data_folder, jobs))
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def test_two_processes_with_ddp_train_as_one_does(alone, first):
    assert_same_run(first / "ddp", alone[True])


@pytest.mark.parametrize(("name", "tied"), [("fsdp", True), ("fsdp-untied", False)])
def test_two_processes_with_fsdp_train_as_one_does(alone, first, name, tied):
    assert_same_run(first / name, alone[tied])


@pytest.mark.parametrize(("name", "tied"), [("fsdp-empty", True), ("fsdp-empty-untied", False)])
def test_fsdp_trains_the_weights_that_the_main_process_alone_has_made(alone, second, name, tied):
    assert_same_run(second / name, alone[tied])


def test_a_kill_of_one_process_leaves_the_latest_state_and_the_log(first):
    folder = first / "ddp-killed"
    assert [state.name for state in folder.glob("state-*")] == [f"state-{SAVE_EVERY:07d}"]
    steps, _ = steps_and_losses(folder)
    assert steps[: STOP - 1] == list(range(1, STOP))  # of the last step the other process may die before its line


@pytest.mark.parametrize(("name", "whole"), [("ddp-killed", "ddp"), ("fsdp-stopped", "fsdp")])
def test_two_processes_resume_to_exactly_what_they_would_have_trained(first, second, name, whole):
    assert [record["step"] for record in log_of(second / name)] == list(range(1, STEPS + 1))
    assert_identical(second / name, first / whole)


@pytest.mark.parametrize("name", ["ddp-killed", "fsdp-stopped"])
def test_one_process_goes_on_with_the_run_of_two(data_folder, tmp_path, alone, first, name):
    shutil.copytree(first / name, tmp_path / name)
    assert_same_run(in_one_process(data_folder, Job(str(tmp_path / name), resume=True)), alone[True])


def test_the_command_in_two_processes_accumulates_to_the_same_run(data_folder, tokenizer, tmp_path, capfd):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    (tmp_path / "heldout.txt").write_text("\n\n".join(toy_documents(2, seed=9)) + "\n")
    sizes = ["--steps", 8, "--batch-size", 4, "--micro-batch-size", 1, "--sequence-length", SEQUENCE_LENGTH]
    rates = ["--lr", 1e-2, "--warmup-steps", 2, "--autocast", "float32", "--log-every", 1, "--device", "cpu"]
    texts = ["--data", data_folder, "--heldout", tmp_path / "heldout.txt"]
    arguments = ["--from", tmp_path / "llama", "--blocks", 2, *texts, *sizes, *rates]

    assert main([str(a) for a in [*arguments, "--out", tmp_path / "one"]]) == 0
    assert "on 1 x cpu" in capfd.readouterr().out
    done = torchrun("tide.training", *arguments, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("on 2 x cpu") == 1  # the main process speaks
    assert done.stdout.count("saved in") == 1
    assert_same_run(tmp_path / "two", tmp_path / "one", weight=2e-3)  # saved in bfloat16


def test_a_batch_that_does_not_divide_among_the_processes_is_refused(data_folder, tmp_path):
    three = SimpleNamespace(num_processes=3, device=torch.device("cpu"))
    with pytest.raises(UserError, match="--batch-size 4 does not divide among 3 processes") as refusal:
        tiny_run(data_folder, tmp_path / "run", accelerator=three, batch_size=4)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()
