"""Evaluation: losses per position, windows of text, tables that compare two models."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import save_file

from tests.conftest import VOCAB_SIZE, toy_documents
from tide import Intervention, evaluation
from tide.cli import UserError, run_command
from tide.evaluation import compare, heldout_windows, main, perplexity, token_losses
from tide.training.data import encode_documents


@pytest.fixture
def windows():
    return np.random.default_rng(0).integers(VOCAB_SIZE, size=(5, 12))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 99])
@pytest.mark.parametrize("max_bytes", [1, 7 * 4 * VOCAB_SIZE, 2**28])
def test_losses_are_transformers_own_position_by_position(make_model, windows, batch_size, max_bytes, monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_LOGITS_BYTES", max_bytes)
    model = make_model(z_loss_coefficient=0.0)
    losses = token_losses(model, windows, batch_size)
    assert losses.shape == (5, 11)
    assert losses.dtype == np.float32
    ids = torch.from_numpy(windows)
    with torch.no_grad():
        logits = model(ids).logits
        mean = model(ids, labels=ids).loss
    expected = -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert losses.mean() == pytest.approx(mean.item(), rel=1e-5)
    assert perplexity(losses) == pytest.approx(mean.exp().item(), rel=1e-5)


def test_the_z_loss_is_no_part_of_it(make_model, windows):
    with_z, without = make_model(z_loss_coefficient=1.0), make_model(z_loss_coefficient=0.0)
    assert np.array_equal(token_losses(with_z, windows, 5), token_losses(without, windows, 5))


def test_losses_under_an_intervention(make_model, windows):
    off = Intervention.layers_off([0])
    plain, ablated = (token_losses(make_model(), windows, 5, intervention=i) for i in (None, off))
    with torch.no_grad():
        logits = make_model()(torch.from_numpy(windows), intervention=off).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, torch.from_numpy(windows[:, 1:]), reduction="none")
    np.testing.assert_allclose(ablated, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(plain, ablated, atol=1e-2)


@pytest.mark.parametrize("length", [2, 7, 64])
def test_windows_hold_every_token_of_the_stream_once_and_in_order(data_folder, tokenizer, length):
    file = data_folder / "heldout_c.txt"
    stream = np.concatenate(list(encode_documents(iter(toy_documents(60, seed=2)), tokenizer)))
    windows = heldout_windows(file, tokenizer, length)
    assert windows.dtype == np.int64
    assert windows.shape == (len(stream) // length, length)
    assert np.array_equal(windows.ravel(), stream[: windows.size])
    assert len(stream) - windows.size < length
    assert windows[0, 0] == tokenizer.bos_token_id


def test_windows_stop_at_max_tokens(data_folder, tokenizer):
    file = data_folder / "heldout_c.txt"
    some, all_of_them = heldout_windows(file, tokenizer, 8, max_tokens=43), heldout_windows(file, tokenizer, 8)
    assert np.array_equal(some, all_of_them[:5])


def test_a_text_that_fills_no_window_is_refused(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("At night.\n")
    with pytest.raises(UserError, match=r"short\.txt gives \d+ tokens, less than one window of 64"):
        heldout_windows(tmp_path / "short.txt", tokenizer, 64)
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        heldout_windows(tmp_path / "nowhere.txt", tokenizer, 64)


@pytest.fixture
def losses():
    """Two texts of random losses under two models, and bins of which some are -1."""
    rng = np.random.default_rng(1)
    ids = {"a.txt": rng.integers(VOCAB_SIZE, size=(9, 20)), "b.txt": rng.integers(VOCAB_SIZE, size=(4, 20))}
    tide = {name: rng.gamma(2.0, size=(len(w), 19)).astype(np.float32) for name, w in ids.items()}
    base = {name: tide[name] + rng.normal(0.3, 0.5, size=tide[name].shape).astype(np.float32) for name in ids}
    return tide, base, ids, rng.integers(-1, 10, size=VOCAB_SIZE).astype(np.int8)


def test_means_spreads_and_the_paired_difference(losses):
    tide, base, ids, bins = losses
    table = compare(tide, base, ids, bins)["text"].set_index("text")
    assert list(table.index) == ["a.txt", "b.txt", "all"]
    for name in ("a.txt", "b.txt", "all"):
        t, b = (
            np.concatenate([x.ravel() for key, x in loss.items() if name in (key, "all")]).astype(np.float64)
            for loss in (tide, base)
        )
        row = table.loc[name]
        assert row["n"] == len(t)
        assert row["tide_mean"] == pytest.approx(t.mean())
        assert row["base_sd"] == pytest.approx(b.std(ddof=1))
        assert row["tide_perplexity"] == pytest.approx(perplexity(t))
        assert row["difference_mean"] == pytest.approx((b - t).mean())
        # Paired: the spread of the differences, not that of two independent means.
        assert row["difference_se"] == pytest.approx((b - t).std(ddof=1) / len(t) ** 0.5)
        assert row["difference_se"] < np.hypot(t.std(), b.std()) / len(t) ** 0.5


@pytest.mark.parametrize("by", ["decile", "group"])
def test_bins_partition_the_positions(losses, by):
    tide, base, ids, bins = losses
    tables = compare(tide, base, ids, bins)
    whole = tables["text"].set_index("text")
    for name, part in tables[by].groupby("text", observed=True):
        assert part[by].is_unique
        assert part["n"].sum() == whole.loc[name, "n"]
        weighted = (part["n"] * part["difference_mean"]).sum() / part["n"].sum()
        assert weighted == pytest.approx(whole.loc[name, "difference_mean"])


def test_the_bin_is_that_of_the_predicted_token(losses):
    tide, base, ids, bins = losses
    table = compare(tide, base, ids, bins)["decile"].set_index(["text", "decile"])
    for decile in range(-1, 10):
        here = bins[ids["a.txt"][:, 1:]] == decile
        assert table.loc[("a.txt", decile), "n"] == here.sum()
        assert table.loc[("a.txt", decile), "tide_mean"] == pytest.approx(tide["a.txt"][here].mean())


def test_groups_are_those_of_the_paper(losses):
    tide, base, ids, bins = losses
    tables = compare(tide, base, ids, bins)
    assert list(tables["group"]["group"][:4]) == ["rare", "mid", "common", "none"]
    n = tables["decile"].set_index(["text", "decile"])["n"].loc["all"]
    groups = tables["group"].set_index(["text", "group"])["n"].loc["all"]
    for group, deciles in {"rare": [0, 1, 2], "mid": [3, 4, 5, 6], "common": [7, 8, 9], "none": [-1]}.items():
        assert groups[group] == n[deciles].sum()


def test_without_bins_there_are_no_tables_by_frequency(losses):
    tide, base, ids, _ = losses
    assert list(compare(tide, base, ids, None)) == ["text"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, make_model, tokenizer):
    """A TIDE checkpoint with token counts and a Base checkpoint, untrained."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, num_banks in (("tide", 2), ("base", 0)):
        make_model(vocab_size=len(tokenizer), num_memory_blocks=num_banks).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    counts = np.concatenate(list(encode_documents(iter(toy_documents(40)), tokenizer)))
    counts = np.bincount(counts, minlength=len(tokenizer))
    save_file({"counts": counts}, folder / "tide" / "token_counts.safetensors", metadata={"corpus": "toy text"})
    return folder


def evaluate(*arguments):
    return run_command(lambda: main([str(a) for a in arguments]))


def test_the_command_prints_and_writes_the_tables(checkpoints, data_folder, tmp_path, capfd):
    texts = [data_folder / "heldout_c.txt", data_folder / "train_a.txt"]
    out = tmp_path / "report.json"
    code = evaluate(checkpoints / "tide", "--base", checkpoints / "base", "--text", *texts, "--out", out,
                    "--max-tokens", 700, "--length", 32, "--device", "cpu")  # fmt: skip
    stdout, stderr = capfd.readouterr()
    assert code == 0, stderr
    assert "By frequency decile in toy text" in stdout
    assert "TIDE heldout_c.txt" in stderr  # progress
    report = json.loads(out.read_text())
    assert report["window_length"] == 32
    table = pd.DataFrame(report["tables"]["text"])
    assert list(table["text"]) == ["heldout_c.txt", "train_a.txt", "all"]
    assert list(table["n"]) == [21 * 31, 21 * 31, 2 * 21 * 31]
    assert {"tide_mean", "tide_sd", "base_mean", "base_sd", "difference_mean", "difference_se"} <= set(table)
    assert sum(row["n"] for row in report["tables"]["decile"] if row["text"] == "all") == 2 * 21 * 31
    assert {row["group"] for row in report["tables"]["group"]} <= {"rare", "mid", "common", "none"}


def test_a_model_beside_itself_differs_by_nothing(checkpoints, data_folder, tmp_path, capfd):
    out = tmp_path / "report.json"
    text = data_folder / "heldout_c.txt"
    assert evaluate(checkpoints / "base", "--base", checkpoints / "base", "--text", text, "--max-tokens", 300,
                    "--out", out, "--device", "cpu") == 0  # fmt: skip
    assert "carries no token counts" in capfd.readouterr().out
    row = json.loads(out.read_text())["tables"]["text"][0]
    assert (row["difference_mean"], row["difference_se"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{c}/nowhere", "--base", "{c}/base", "--text", "{d}/heldout_c.txt"], "nowhere"),
        (["{c}/tide", "--base", "{c}/base", "--text", "{d}/missing.txt"], "missing.txt"),
        (["{c}/tide", "--base", "{c}/base", "--text", "{d}/heldout_c.txt", "--out", "{c}/no/out.json"], "no folder"),
        (
            ["{c}/tide", "--base", "{c}/base", "--text", "{d}/heldout_c.txt", "--max-tokens", "9"],
            "less than one window",
        ),
        (["{c}/tide", "--base", "{c}/base"], "--text"),
        (["{c}/tide", "--base", "{c}/other", "--text", "{d}/heldout_c.txt"], "different tokenizers"),
    ],
)
def test_wrong_inputs_are_one_line(checkpoints, data_folder, capfd, make_model, arguments, message):
    if "different" in message:
        from tide.training.tokenizer import train_tokenizer

        make_model(vocab_size=320).save_pretrained(checkpoints / "other")
        train_tokenizer(iter(toy_documents(5)), vocab_size=300).save_pretrained(checkpoints / "other")
    code = evaluate(*(a.format(c=checkpoints, d=data_folder) for a in arguments))
    stderr = capfd.readouterr().err.replace("\r", "\n")
    lines = [line for line in stderr.splitlines() if "Writing model shards" not in line and line.strip()]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
