"""`tide-train` at the keyboard: every wrong input is one line on stderr and exit code 2."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from tests.conftest import toy_documents
from tide.cli import run_command
from tide.training import __main__ as command
from tide.training.__main__ import main
from tide.training.recipe import Recipe
from tide.training.tokenizer import train_tokenizer

TINY = ["--steps", "2", "--batch-size", "2", "--micro-batch-size", "2", "--sequence-length", "8", "--device", "cpu"]
TINY += ["--autocast", "float32"]  # bfloat16 is a hundred times slower on processors without it


def run(capfd, *arguments):
    code = run_command(lambda: main([str(a) for a in arguments]))
    return code, capfd.readouterr().err


def assert_refused(result, message):
    code, stderr = result
    assert code == 2
    assert stderr.endswith("\n")
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("error: ")
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.fixture
def heldout(data_folder, tmp_path):
    """A few windows of the held-out text: every summary of a run reads it whole."""
    text = (data_folder / "heldout_c.txt").read_text(encoding="utf-8")
    (tmp_path / "heldout.txt").write_text(text[:400], encoding="utf-8")
    return tmp_path / "heldout.txt"


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A data folder with a tokenizer and no text yet."""
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blocks", "-1"], "--blocks: -1 is below 0"),
        (["--blocks", "many"], "'many' is not a whole number"),
        (["--preset", "7b"], "invalid choice: '7b'"),
        (["--steps", "0"], "steps is 0; it must be at least 1"),
        (["--lr", "-1"], "peak_lr is -1.0"),
        (["--batch-size", "0"], "batch_size is 0; it must be at least 1"),
        (["--recipe", "papers"], "There is no recipe 'papers': give demo, paper or a recipe.json file"),
        (["--from", "nowhere", "--preset", "demo"], "--preset and --from exclude each other"),
        (["--log-with", "paper"], "invalid choice: 'paper'"),
        (["--keep", "0"], "--keep: 0 is below 1"),
        (["--heldout", "nowhere.txt"], "nowhere.txt"),
        (["--text-column"], "expected one argument"),
        (["--save-every", "0"], "--save-every: 0 is below 1"),
        (["--log-every", "-5"], "--log-every: -5 is below 1"),
        (["--seed", "-1"], "seed is -1"),
        (["--device", "warp"], "--device warp is not usable"),
        (["--device", "meta9"], "--device meta9 is not usable"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_options(capfd, data_folder, tmp_path, options, message):
    out = tmp_path / "out"
    assert_refused(run(capfd, "--data", data_folder, "--out", out, *TINY, *options), message)
    assert not out.exists()


def test_a_missing_option(capfd, data_folder):
    assert_refused(run(capfd, "--data", data_folder), "--out")


def test_no_data_folder(capfd, tmp_path):
    assert_refused(run(capfd, "--data", tmp_path / "nowhere", "--out", tmp_path / "out"), "nowhere is no folder")


def test_a_data_folder_without_text(capfd, folder, tmp_path):
    assert_refused(
        run(capfd, "--data", folder, "--out", tmp_path / "out", *TINY), "holds no .txt, .jsonl, .json or .parquet file"
    )


@pytest.mark.parametrize("text", ["", "\n\n\n"])
def test_empty_text(capfd, folder, tmp_path, text):
    (folder / "train_a.txt").write_text(text)
    assert_refused(run(capfd, "--data", folder, "--out", tmp_path / "out", *TINY), "holds no text")


def test_too_little_text(capfd, folder, tmp_path):
    (folder / "train_a.txt").write_text("The fox.\n")
    assert_refused(run(capfd, "--data", folder, "--out", tmp_path / "out", *TINY), "fewer than one batch")


def test_binary_data(capfd, folder, tmp_path):
    (folder / "train_a.txt").write_bytes(bytes(range(256)) * 100)
    assert_refused(run(capfd, "--data", folder, "--out", tmp_path / "out", *TINY), "train_a.txt is not UTF-8 text")


def test_no_tokenizer(capfd, tmp_path):
    (tmp_path / "train_a.txt").write_text("The fox.\n")
    result = run(capfd, "--data", tmp_path, "--out", tmp_path / "out")
    assert_refused(result, "holds no tokenizer.json; make one with")


def test_a_broken_tokenizer(capfd, folder, tmp_path):
    (folder / "train_a.txt").write_text("The fox.\n")
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": ')
    assert_refused(run(capfd, "--data", folder, "--out", tmp_path / "out"), "holds no tokenizer that transformers can")


def test_a_tokenizer_that_is_larger_than_the_model(capfd, data_folder, tmp_path):
    tokenizer = train_tokenizer(iter(toy_documents(5)), vocab_size=300)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(16_384)])
    tokenizer.save_pretrained(tmp_path / "large")
    result = run(capfd, "--data", data_folder, "--tokenizer", tmp_path / "large", "--out", tmp_path / "out", *TINY)
    assert_refused(result, "the preset demo has room for 16,384")


def test_an_output_folder_that_is_a_file(capfd, data_folder, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert_refused(run(capfd, "--data", data_folder, "--out", tmp_path / "out", *TINY), "cannot be made a folder")


def test_a_run_with_other_settings_in_the_output_folder(capfd, data_folder, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"steps": 9}}))
    result = run(capfd, "--data", data_folder, "--out", tmp_path, *TINY, "--resume")
    assert_refused(result, "holds a run with other settings (recipe: steps is 9, not 2); choose another --out")


def test_the_command_trains_and_says_what_it_trains(capfd, data_folder, heldout, tmp_path):
    """In a process of its own, as a person runs it."""
    arguments = ["--data", data_folder, "--heldout", heldout, "--out", tmp_path / "out", "--blocks", "1", *TINY]
    command, environment = [sys.executable, "-m", "tide.training", *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "memory 2,097,152" in done.stdout  # 16,384 ids * d 128
    assert f"saved in {tmp_path / 'out'}" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert len((tmp_path / "out" / "summaries.jsonl").read_text().splitlines()) == 3  # steps 0, 1 and 2
    assert_refused(run(capfd, *arguments), "holds a finished run")


@pytest.mark.parametrize(
    ("times", "autocast", "told"), [(80, "bfloat16", True), (1, "bfloat16", False), (80, "float32", False)]
)
def test_a_processor_that_is_slow_in_bfloat16_is_told(
    capfd, data_folder, heldout, tmp_path, monkeypatch, times, autocast, told
):
    monkeypatch.setattr(command, "bfloat16_slowdown", lambda device: times)
    options = [*TINY, "--heldout", heldout, "--blocks", "0", "--autocast", autocast, "--max-tokens", "200"]
    code, stderr = run(capfd, "--data", data_folder, "--out", tmp_path / "out", *options)
    assert code == 0
    note = "note: this cpu takes 80 times as long for a product in bfloat16 as in float32; --autocast float32 is faster"
    assert (note in stderr) == told


def test_the_two_precisions_are_timed():
    assert command.bfloat16_slowdown(torch.device("cpu"), size=16) > 0


def test_help_explains_every_setting_and_says_where_it_comes_from(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for setting in fields(Recipe):
        assert f"--{setting.name.replace('_', '-')}" in text
        assert f"[paper recipe: {setting.default}, {setting.metadata['source']}]" in text


def test_data_that_brings_no_tokenizer(capfd, tmp_path):
    result = run(capfd, "--data", "hf:someone/somewhere", "--out", tmp_path / "out")
    assert_refused(result, "brings no tokenizer; give --tokenizer")


def test_a_batch_is_as_large_as_asked(capfd, data_folder, heldout, tmp_path):
    """--batch-size 3 with micro batches of 2: the last one is smaller, none is lost."""
    options = [*TINY, "--batch-size", "3", "--heldout", heldout, "--blocks", "0"]
    code, _ = run(capfd, "--data", data_folder, "--out", tmp_path / "out", *options)
    assert code == 0
    (last,) = (json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines())
    assert last["tokens"] == 2 * 3 * 8


def test_a_training_text_beside_others_is_named_by_its_file(capfd, data_folder, heldout, tmp_path):
    options = [*TINY, "--heldout", heldout, "--blocks", "0"]
    code, _ = run(capfd, "--data", data_folder / "train_a.txt", "--out", tmp_path / "out", *options)
    assert code == 0
