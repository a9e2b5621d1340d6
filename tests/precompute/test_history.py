"""What training kept, as tables: every number of a real tiny run, and what a checkpoint without it is told."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute import ArtifactError, Artifacts
from precompute.pipeline import run
from precompute.stage import Job
from precompute.stages.history import loss_rows
from tests.training.tiny_run import every_step, tiny_run
from tide.cli import UserError
from tide.training.summaries import NUM_BINS, SUMMARY_FILE, Summary, read_summaries

BANKS, LAYERS = 2, 2


@pytest.fixture(scope="module")
def runs(data_folder, tmp_path_factory):
    """Folders of a finished TIDE and a finished Base run of 8 steps; read only."""
    folder = tmp_path_factory.mktemp("runs")
    for name, banks in (("tide", BANKS), ("base", 0)):
        tiny_run(data_folder, folder / name, banks, steps=8).train(schedule=every_step(summaries=4))
    return folder


@pytest.fixture
def own(runs, tmp_path):
    """A job on copies of the two that can be spoiled."""
    shutil.copytree(runs, tmp_path / "runs")
    return Job(
        tmp_path / "runs" / "tide",
        tmp_path / "artifacts",
        templates=tmp_path,
        base=tmp_path / "runs" / "base",
        show_progress=False,
    )


@pytest.fixture(scope="module")
def artifacts(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("history") / "artifacts"
    assert run(Job(runs / "tide", out, runs, base=runs / "base", show_progress=False), ["history"]) == ["history"]
    return Artifacts.open(out)


def bin_of(decile):
    return NUM_BINS - 1 if decile == -1 else decile


def same(value, stored):
    assert value == pytest.approx(stored, nan_ok=True)


def test_every_summary_of_both_runs_is_there_number_by_number(runs, artifacts):
    kept = {(model, s.step): s for model in ("tide", "base") for s in read_summaries(runs / model)}
    assert len({step for _, step in kept}) == 5  # 0, 1, 2, 4, 8
    routing, norms = artifacts.history_routing(), artifacts.history_norms()
    losses, gradients = artifacts.history_losses(), artifacts.history_gradients()
    assert len(routing) == 5 * LAYERS * NUM_BINS * (BANKS + 1)
    assert set(routing["model"]) == {"tide"}
    assert len(norms) == 5 * NUM_BINS * (1 + BANKS + 1)  # the embedding of both
    assert len(losses) == 5 * NUM_BINS * 2
    assert len(gradients) == 5 * NUM_BINS * (3 + BANKS + 3)
    for row in routing.itertuples():
        s, b = kept[row.model, row.step], bin_of(row.decile)
        same(row.mean, s.routing[row.layer, b, row.bank])
        assert (row.n, row.tokens) == (s.positions[b], s.tokens)
    for row in norms.itertuples():
        s, b = kept[row.model, row.step], bin_of(row.decile)
        bank = None if row.table == "embedding" else int(row.table.removeprefix("bank_"))
        same(row.mean, s.embedding_norm[b] if bank is None else s.bank_norm[bank, b])
        population = s.embedding_norm_sd[b] if bank is None else s.bank_norm_sd[bank, b]
        same(row.sd, population * (s.types[b] / (s.types[b] - 1)) ** 0.5 if s.types[b] > 1 else np.nan)
        assert row.n == s.types[b]
    for row in losses.itertuples():
        s, b = kept[row.model, row.step], bin_of(row.decile)
        same(row.mean, s.loss[b])
        assert row.n == s.targets[b]
    for row in gradients.itertuples():
        s, b = kept[row.model, row.step], bin_of(row.decile)
        banks = {f"bank_{k}": s.bank_gradient[k, b] for k in range(len(s.bank_gradient))}
        other = {"embedding": s.embedding_gradient[b], "embedding_parameter": s.embedding_parameter_gradient[b]}
        same(row.mean, {**banks, **other, "total": other["embedding"] + sum(banks.values())}[row.table])
        assert row.n == s.types[b]


def test_a_layer_and_a_bank_can_be_chosen(artifacts):
    whole = artifacts.history_routing()
    chosen = artifacts.history_routing(layer=1, bank=BANKS)
    assert chosen["mean"].tolist() == whole[(whole["layer"] == 1) & (whole["bank"] == BANKS)]["mean"].tolist()
    of_all = whole.groupby(["step", "layer", "decile"])["mean"].sum(min_count=1)
    np.testing.assert_allclose(of_all.dropna(), 1, atol=1e-3)  # rounded to five digits
    with pytest.raises(ValueError, match="no layer 2"):
        artifacts.history_routing(layer=2)
    with pytest.raises(ValueError, match="no bank 3"):
        artifacts.history_routing(bank=3)


@given(st.lists(st.lists(st.floats(0, 20), max_size=6), min_size=NUM_BINS, max_size=NUM_BINS))
@pytest.mark.filterwarnings("ignore:Mean of empty", "ignore:invalid value", "ignore:Degrees of freedom")
def test_the_spread_is_that_of_a_sample(bins):
    bins = [np.array(values) for values in bins]
    filler = np.zeros(NUM_BINS)
    summary = Summary(
        1, 1, filler, filler, np.zeros((1, NUM_BINS, 0)), np.array([len(b) for b in bins]),
        np.array([b.mean() for b in bins]), np.array([b.std() for b in bins]), *[filler] * 2,
        *[np.zeros((0, NUM_BINS))] * 2, filler, np.zeros((0, NUM_BINS)), filler,
    )  # fmt: skip
    made = loss_rows(summary)
    expected = [b.std(ddof=1) if len(b) > 1 else np.nan for b in bins]
    np.testing.assert_allclose(made["sd"], expected, atol=1e-9)
    assert made["n"].tolist() == [len(b) for b in bins]


def test_a_run_without_banks_has_a_history_without_routing(own):
    alone = replace(own, checkpoint=own.base, base=None)
    assert run(alone, ["history"]) == ["history"]
    opened = Artifacts.open(alone.out)
    assert opened.history_routing().empty
    assert opened.history_routing().columns.tolist() == "model step tokens layer decile bank mean n".split()
    assert set(opened.history_norms()["table"]) == {"embedding"}
    assert set(opened.history_losses()["model"]) == {"tide"}  # the checkpoint itself, whatever it is


def test_a_base_without_summaries_is_no_hindrance_and_its_summaries_make_the_history_anew(own):
    file = own.base / SUMMARY_FILE
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    assert run(own, ["history"]) == ["history"]
    assert set(Artifacts.open(own.out).history_losses()["model"]) == {"tide"}
    assert run(own, ["history"]) == []
    file.write_text("".join(lines[:2]))
    assert run(own, ["history"]) == ["history"]
    opened = Artifacts.open(own.out)
    assert opened.parameters("history") == {"tide": [0, 1, 2, 4, 8], "base": [0, 1]}


def test_a_checkpoint_without_summaries_is_told_what_to_do(own):
    (own.checkpoint / SUMMARY_FILE).unlink()
    with pytest.raises(UserError, match=r"holds no summaries\.jsonl .*; train it with tide-train .*\.$"):
        run(own, ["history"])


def test_a_damaged_file_ends_in_one_sentence(own):
    file = own.checkpoint / SUMMARY_FILE
    record = json.loads(file.read_text().splitlines()[0])
    del record["loss"]
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match="is damaged"):
        run(own, ["history"])


def test_other_artifacts_say_which_command_makes_a_history(artifact_folder):
    with pytest.raises(ArtifactError, match=r"no stage history; run `tide-precompute .* --only history`"):
        Artifacts.open(artifact_folder).history_losses()
