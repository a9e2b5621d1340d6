from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from precompute import Artifacts
from precompute.pipeline import run
from precompute.stages.ablation import ANY, Ablation, Target, ablation_losses, changes, targets
from tests.conftest import tiny_model
from tide import Intervention
from tide.cli import UserError
from tide.evaluation.losses import token_losses

LAYERS, BANKS = 3, 3
IDS = np.random.default_rng(0).integers(61, size=(3, 17))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def mean_injection():
    return torch.randn(LAYERS, BANKS, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def losses(model, mean_injection):
    return ablation_losses(model, torch.from_numpy(IDS), mean_injection)


def test_everything_is_switched_off_once_with_every_replacement():
    listed = targets(2, 3)
    assert [target.kind for target in listed] == ["layer"] * 2 + ["bank"] * 3 + ["pair"] * 6 + ["all"]
    assert len(set(listed)) == len(listed)
    texts = {target: target.intervention("zero").to_text() for target in listed}
    assert texts[Target("layer", 1, ANY)] == "1"
    assert texts[Target("bank", ANY, 2)] == ".2"
    assert texts[Target("pair", 1, 2)] == "1.2"
    assert texts[Target("all", ANY, ANY)] == "*"
    assert len(changes(2, 3)) == 3 * len(listed)


def test_losses_are_those_of_a_whole_forward_each(model, mean_injection, losses):
    np.testing.assert_allclose(losses[0], token_losses(model, IDS, 3), atol=1e-5)
    ids = torch.from_numpy(IDS)
    for number, (target, replacement) in enumerate(changes(LAYERS, BANKS), start=1):
        intervention = target.intervention(replacement)
        if replacement == "mean":
            with torch.no_grad():
                logits = model(ids, intervention=intervention, mean_injection=mean_injection).logits
            log_p = logits[:, :-1].log_softmax(dim=-1)
            expected = -log_p.gather(-1, ids[:, 1:, None]).squeeze(-1).numpy()
        else:
            expected = token_losses(model, IDS, 3, intervention)
        np.testing.assert_allclose(losses[number], expected, atol=1e-5, err_msg=f"{target}, {replacement}")
        assert np.abs(losses[number] - losses[0]).max() > 1e-3  # each of them does something


@pytest.mark.parametrize("forward_tokens", [1, 200, 10_000])
def test_how_many_run_together_changes_nothing(model, mean_injection, losses, forward_tokens):
    told = []
    again = ablation_losses(model, torch.from_numpy(IDS), mean_injection, forward_tokens, told.append)
    np.testing.assert_allclose(again, losses, atol=1e-5)
    assert sum(told) == len(losses)


@pytest.fixture(scope="module")
def own(job, tmp_path_factory):
    """Two texts, one of them shorter than a window; 1,000 tokens of them are measured."""
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "short.txt").write_text("The red fox counts the stars.\n", encoding="utf-8")
    return replace(job, text=(*job.text, folder / "short.txt"), probe_tokens=1000, out=folder / "artifacts")


@pytest.fixture(scope="module")
def artifacts(own):
    run(own, ["ablation"])
    return Artifacts.open(own.out)


def test_the_table_is_that_of_plain_forwards(own, artifacts):
    from precompute.probe import probe_windows
    from precompute.stage import Context

    context = Context(own)
    text, model = context.text, context.model
    windows = probe_windows(text, 1000)
    assert text.window_lengths[windows].tolist()[-1] < text.length == text.window_lengths[windows[0]]
    assert own.probe_tokens / 2 < text.window_lengths[windows].sum()
    change = {"none": None, "zero": Intervention.off([(1, 2)])}
    batches = [batch.input_ids for batch in text.batches(windows.tolist(), 64)]
    losses = {how: [token_losses(model, ids, 1, change[how]).ravel() for ids in batches] for how in change}
    for name, part in (("all", slice(None)), ("text", slice(-1)), ("short", slice(-1, None))):
        before, after = (np.concatenate(losses[how][part]) for how in ("none", "zero"))
        row = artifacts.ablation("pair", "zero", text=name).query("layer == 1 and bank == 2").iloc[0]
        assert (row["n"], row["n_windows"]) == (len(after), len(losses["none"][part]))
        np.testing.assert_allclose(row["loss"], after.mean(dtype=np.float64), atol=1e-5)
        np.testing.assert_allclose(row["difference"], (after - before).mean(dtype=np.float64), atol=1e-5)
        np.testing.assert_allclose(row["sd"], (after - before).std(ddof=1, dtype=np.float64), rtol=1e-3)
        np.testing.assert_allclose(row["perplexity"], np.exp(after.mean()), rtol=1e-4)
    assert np.isnan(row["low"])  # the short text is one window


def test_the_reader_answers(artifacts):
    figure_11 = artifacts.ablation("layer", "zero")
    assert figure_11["layer"].tolist() == [0, 1, 2]
    assert (figure_11["bank"] == -1).all()
    assert (figure_11["low"] <= figure_11["difference"]).all()
    assert (figure_11["difference"] <= figure_11["high"]).all()
    unchanged = artifacts.ablation("none")
    assert len(unchanged) == 1
    assert unchanged[["difference", "sd", "perplexity_change_percent"]].eq(0).all(axis=None)
    whole = artifacts.ablation()
    assert len(whole) == 1 + 3 * (LAYERS + BANKS + LAYERS * BANKS + 1)
    parts = pd.concat([artifacts.ablation("all", "mean", bin=bin) for bin in ("rare", "mid", "common", "none")])
    everything = artifacts.ablation("all", "mean").iloc[0]
    assert parts["n"].sum() == everything["n"]
    np.testing.assert_allclose((parts["n"] * parts["loss"]).sum() / everything["n"], everything["loss"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "head"}, r"no kind 'head'; there are 'none', 'layer'"),
        ({"replacement": "noise"}, "no replacement 'noise'"),
        ({"text": "poem"}, r"no text 'poem'; there are 'all', 'text', 'short'\."),
        ({"bin": "decile 3"}, "no bin 'decile 3'"),
    ],
)
def test_the_reader_says_what_there_is(artifacts, arguments, message):
    with pytest.raises(ValueError, match=message):
        artifacts.ablation(**arguments)


def test_pieces_of_a_stopped_run_make_the_same_file(own, artifacts, tmp_path, monkeypatch):
    again, made, measure = replace(own, out=tmp_path / "artifacts"), [], Ablation.measure

    def stopping(self, context, piece):
        if len(made) == stop_after:
            raise KeyboardInterrupt
        made.append(piece)
        return measure(self, context, piece)

    monkeypatch.setattr("precompute.stages.ablation.PIECE_TOKENS", 256)
    monkeypatch.setattr(Ablation, "measure", stopping)
    stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        run(again, ["ablation"])
    stop_after = -1
    run(again, ["ablation"])
    assert len(made) == len(set(made)) == 3
    parts = Artifacts.open(again.out).frame("ablation")
    pd.testing.assert_frame_equal(parts, artifacts.frame("ablation"), check_exact=False, rtol=0, atol=1e-4)
    files = [folder / "ablation" / "ablation.parquet" for folder in (again.out, tmp_path / "whole")]
    run(replace(again, out=tmp_path / "whole"), ["ablation"])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_base_model_is_refused_by_name(own, tmp_path):
    base = replace(own, checkpoint=own.base, base=None, out=tmp_path)
    with pytest.raises(UserError, match=r"base is a Base model \(K = 0\) without memory to switch off; give a TIDE"):
        run(base, ["ablation"])
