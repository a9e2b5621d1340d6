"""`tide-evaluate` from end to end on tiny, untrained models."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from tests.conftest import toy_documents
from tide.cli import run_command
from tide.evaluation.__main__ import main
from tide.evaluation.report import read_report
from tide.training.data import encode_documents
from tide.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, make_model, tokenizer):
    """TIDE checkpoints with token counts, a Base checkpoint, and one of another tokenizer, untrained."""
    folder = tmp_path_factory.mktemp("checkpoints")
    counts = np.concatenate(list(encode_documents(iter(toy_documents(40)), tokenizer)))
    counts = np.bincount(counts, minlength=len(tokenizer))
    for name, num_banks in (("k2", 2), ("k4", 4), ("base", 0), ("other", 2)):
        make_model(vocab_size=len(tokenizer), num_memory_blocks=num_banks).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if num_banks:
            file = folder / name / "token_counts.safetensors"
            save_file({"counts": counts}, file, metadata={"corpus": f"toy text of {name}"})
    train_tokenizer(iter(toy_documents(5, seed=3)), vocab_size=300).save_pretrained(folder / "other")
    return folder


def evaluate(*arguments):
    return run_command(lambda: main([str(a) for a in arguments] + ["--device", "cpu", "--bootstrap", "50"]))


def test_models_are_printed_and_saved_beside_a_base(checkpoints, data_folder, tmp_path, capfd):
    texts = [data_folder / "heldout_c.txt", data_folder / "train_a.txt"]
    models = [checkpoints / "k2", checkpoints / "k4"]
    code = evaluate(*models, "--base", checkpoints / "base", "--text", *texts, "--out", tmp_path / "out",
                    "--max-tokens", 700, "--length", 32)  # fmt: skip
    stdout, stderr = capfd.readouterr()
    assert code == 0, stderr
    assert "k2 (K=2) predicts better than base (K=0) in" in stdout
    assert "by count in toy text of k2" in stdout
    assert "heldout_c.txt   pair" in stdout
    assert "k4 (K=4) heldout_c.txt" in stderr  # progress

    facts, tables = read_report(tmp_path / "out" / "report.json")
    assert facts["window_length"] == 32
    assert [(m["name"], m["num_memory_blocks"]) for m in facts["models"]] == [("base", 0), ("k2", 2), ("k4", 4)]
    assert facts["deciles"] == {"checkpoint": "k2", "counted": "toy text of k2"}
    whole = tables["losses"].query("bin_kind == 'all' and averaging == 'position' and model == 'k4'")
    assert dict(zip(whole["text"], whole["n"], strict=True)) == {
        "heldout_c.txt": 21 * 31, "train_a.txt": 21 * 31, "all": 2 * 21 * 31}  # fmt: skip
    assert set(tables["differences"]["model"]) == {"k2", "k4"}
    assert set(tables["repeat_differences"]["model"]) == {"k2", "k4"}
    for name, table in tables.items():
        saved = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        pd.testing.assert_frame_equal(saved, table, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_the_same_command_gives_the_same_report(checkpoints, data_folder, tmp_path):
    for out in ("one", "two"):
        assert evaluate(checkpoints / "k2", "--base", checkpoints / "base", "--text", data_folder, "--max-tokens", 300,
                        "--out", tmp_path / out) == 0  # fmt: skip
    assert (tmp_path / "one" / "report.json").read_text() == (tmp_path / "two" / "report.json").read_text()


def test_one_model_alone_without_counts(checkpoints, data_folder, capfd):
    assert evaluate(checkpoints / "base", "--text", data_folder, "--max-tokens", 300) == 0
    stdout = capfd.readouterr().out
    assert "heldout_c.txt" in stdout  # what the folder holds
    assert "train_a.txt" not in stdout
    assert "No tables by frequency: no checkpoint carries token counts." in stdout
    assert "better" not in stdout


def test_a_single_window_has_no_interval(checkpoints, data_folder, capfd):
    assert evaluate(checkpoints / "k2", "--base", checkpoints / "base", "--text", data_folder, "--max-tokens", 64) == 0
    stdout = capfd.readouterr().out
    assert "[" not in stdout
    assert "0 of 1 texts (unclear in heldout_c.txt)" in stdout
    assert "nan" not in stdout


def test_a_base_among_the_models_is_taken_once(checkpoints, data_folder, tmp_path):
    folders = [checkpoints / "base", checkpoints / "k2", checkpoints / "k2"]
    assert evaluate(*folders, "--base", checkpoints / "base", "--text", data_folder, "--max-tokens", 200,
                    "--out", tmp_path) == 0  # fmt: skip
    assert [m["name"] for m in json.loads((tmp_path / "report.json").read_text())["models"]] == ["base", "k2"]


def test_folders_of_one_name_are_told_apart_and_old_tables_go(checkpoints, data_folder, tmp_path):
    shutil.copytree(checkpoints / "base", tmp_path / "k2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tasks.parquet").write_text("of an earlier run")
    assert evaluate(checkpoints / "k2", "--base", tmp_path / "k2", "--text", data_folder, "--max-tokens", 200,
                    "--out", tmp_path / "out", "--dtype", "bfloat16") == 0  # fmt: skip
    facts, _ = read_report(tmp_path / "out" / "report.json")
    assert facts["base"] == str(tmp_path / "k2")
    assert facts["dtype"] == "bfloat16"
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "differences.parquet", "losses.parquet", "repeat_differences.parquet", "repeats.parquet", "report.json",
    ]  # fmt: skip


def test_texts_are_saved_before_tasks_can_fail(checkpoints, data_folder, tmp_path, monkeypatch):
    class Failing:
        @staticmethod
        def load_tasks(names, folder):
            return ["a task"]

        @staticmethod
        def score_tasks(*_):
            assert (tmp_path / "losses.parquet").is_file()
            raise KeyboardInterrupt

    monkeypatch.setattr("tide.evaluation.__main__.task_module", lambda: Failing)
    assert evaluate(checkpoints / "k2", "--text", data_folder, "--max-tokens", 200, "--tasks", "t",
                    "--out", tmp_path) == 130  # fmt: skip
    assert "losses" in read_report(tmp_path / "report.json")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{c}/nowhere", "--text", "{d}"], "nowhere"),
        (["{c}/k2", "--base", "{c}/base", "--text", "{d}/missing.txt"], "missing.txt: there is no such file"),
        (["{c}/k2", "--text", "{c}"], "holds no .txt file"),
        (["{c}/k2", "--text", "{d}", "--out", "{d}/train_a.txt"], "--out"),
        (["{c}/k2", "--text", "{d}", "--max-tokens", "9"], "less than one window"),
        (["{c}/k2", "--text", "{d}", "--length", "65"], "--length 65 is more than the 64 tokens"),
        (["{c}/k2", "--base", "{c}/base"], "give --text, --tasks or both"),
        (["{c}/k2", "--text", "{d}", "--task-folder", "{d}"], "give --tasks too"),
        (["{c}/k2", "--base", "{c}/other", "--text", "{d}"], "different tokenizers"),
    ],
)
def test_wrong_inputs_are_one_line(checkpoints, data_folder, capfd, arguments, message):
    code = evaluate(*(a.format(c=checkpoints, d=data_folder) for a in arguments))
    lines = capfd.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_tasks_without_lm_eval_name_the_extra(checkpoints, data_folder, capfd, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.delitem(__import__("sys").modules, "tide.evaluation.tasks", raising=False)
    monkeypatch.delattr("tide.evaluation.tasks", raising=False)
    assert evaluate(checkpoints / "k2", "--tasks", "paper") == 2
    assert 'pip install "tide-explorer[evaluate]"' in capfd.readouterr().err
