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


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    """Runs a module in two processes, as `torchrun --nproc-per-node 2 -m` does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*launcher, *arguments], cwd=ROOT, env=environment, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=140)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes; killed, it would leave them
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def in_one_process(data_folder, job) -> Path:
    AcceleratorState._reset_state(reset_partial_state=True)
    job.train(data_folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    return Path(job.out)


def log_of(folder):
    records = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != RATE} for record in records]


def assert_same_run(folder, other, loss=1e-5, weight=1e-4):
    """That two finished runs agree in losses, gradients, routing, tokens, summaries and weights up to rounding."""
    logs = list(zip(log_of(folder), log_of(other), strict=True))
    for record, expected in logs:
        assert record.keys() == expected.keys()
        for key in ("step", "tokens", "learning_rate"):
            assert record[key] == expected[key]
        assert record["loss"] == pytest.approx(expected["loss"], abs=loss)
        assert record["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
        assert record["null_weight"] == pytest.approx(expected["null_weight"], abs=2e-4)
    assert logs[-1][0]["loss"] < logs[0][0]["loss"] - 0.5  # it learns: equal is not equally idle

    for summary, expected in zip(read_summaries(folder), read_summaries(other), strict=True):
        for field in fields(Summary):
            actual, wanted = (np.asarray(getattr(s, field.name)) for s in (summary, expected))
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-9, err_msg=f"{field.name}, {summary.step}")

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
def command(data_folder, tokenizer, tmp_path_factory):
    """Arguments of `tide-train` but --out: a tiny LLaMA gets banks; four micro batches a step in one process."""
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=1, **shape)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "heldout.txt").write_text("\n\n".join(toy_documents(1)) + "\n")
    texts = ["--data", data_folder, "--heldout", folder / "heldout.txt"]
    sizes = ["--steps", STEPS, "--batch-size", 4, "--micro-batch-size", 1, "--sequence-length", SEQUENCE_LENGTH]
    rates = ["--lr", 1e-2, "--warmup-steps", 2, "--autocast", "float32", "--log-every", 1, "--device", "cpu"]
    return [str(a) for a in ["--from", folder, "--blocks", 2, *texts, *sizes, *rates]]


@pytest.fixture(scope="module")
def second(data_folder, first, command, tmp_path_factory):
    """A folder of runs of two more processes: resumed ones, FSDP that one process loads, the command."""
    out = tmp_path_factory.mktemp("second")
    for name in ("ddp-killed", "fsdp-stopped"):
        shutil.copytree(first / name, out / name)
    jobs = [
        Job(str(out / "ddp-killed"), resume=True),
        Job(str(out / "fsdp-stopped"), engine="fsdp", resume=True),
        Job(str(out / "fsdp-empty"), engine="fsdp-empty"),
        Job(str(out / "fsdp-empty-untied"), engine="fsdp-empty", tied=False),
    ]
    done = torchrun(*launched(data_folder, jobs, [*command, "--out", str(out / "command")]))
    assert done.returncode == 0, done.stderr[-4000:]
    (out / "stdout").write_text(done.stdout)
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
    assert [record["step"] for record in log_of(folder)][: STOP - 1] == list(
        range(1, STOP)
    )  # of the last step the other process may die before its line


@pytest.mark.parametrize(("name", "whole"), [("ddp-killed", "ddp"), ("fsdp-stopped", "fsdp")])
def test_two_processes_resume_to_exactly_what_they_would_have_trained(first, second, name, whole):
    assert [record["step"] for record in log_of(second / name)] == list(range(1, STEPS + 1))
    assert_identical(second / name, first / whole)


@pytest.mark.parametrize("name", ["ddp-killed", "fsdp-stopped"])
def test_one_process_goes_on_with_the_run_of_two(data_folder, tmp_path, alone, first, name):
    shutil.copytree(first / name, tmp_path / name)
    assert_same_run(in_one_process(data_folder, Job(str(tmp_path / name), resume=True)), alone[True])


def test_the_command_trains_in_two_processes_as_in_one(second, command, tmp_path, capfd):
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert "on 1 x cpu" in capfd.readouterr().out
    told = (second / "stdout").read_text()
    assert told.count("on 2 x cpu") == told.count("saved in") == 1  # the main process alone speaks
    assert_same_run(second / "command", tmp_path, weight=2e-3)  # saved in bfloat16


def test_a_batch_that_does_not_divide_among_the_processes_is_refused(data_folder, tmp_path):
    three = SimpleNamespace(num_processes=3, device=torch.device("cpu"))
    with pytest.raises(UserError, match="--batch-size 4 does not divide among 3 processes") as refusal:
        tiny_run(data_folder, tmp_path / "run", accelerator=three, batch_size=4)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()
