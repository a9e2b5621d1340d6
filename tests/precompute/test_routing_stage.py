"""The stage `routing` in the pipeline, and its reader."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import precompute.text
from precompute import Artifacts
from precompute.pipeline import run
from precompute.stages.routing import Routing
from precompute.text import HeldOutText
from precompute.words import WORD_POSITIONS


@pytest.fixture(scope="module")
def short_job(job, tmp_path_factory):
    """Two texts in windows of 32 tokens."""
    folder = tmp_path_factory.mktemp("routing_job")
    words = job.text[0].read_text(encoding="utf-8").split("\n\n")
    (folder / "heldout_a.txt").write_text("\n\n".join(words[:9]), encoding="utf-8")
    (folder / "heldout_b.txt").write_text("\n\n".join(words[9:14]), encoding="utf-8")
    texts = (folder / "heldout_a.txt", folder / "heldout_b.txt")
    return replace(job, out=folder / "out", text=texts, window=32)


@pytest.fixture(scope="module")
def opened(short_job) -> Artifacts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute.text, "PIECE_TOKENS", 300)
        assert run(short_job, ["routing"]) == ["text", "frequency", "routing"]
    return Artifacts.open(short_job.out)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "routing" / "routing.safetensors").read_bytes()).hexdigest()


def test_pieces_made_in_two_halves_equal_one_run(short_job, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(precompute.text, "PIECE_TOKENS", 300)
    job = replace(short_job, out=tmp_path / "out", max_memory=2**20)
    real, made = Routing.measure, []

    def killed(self, context, piece):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(piece)
        return real(self, context, piece)

    monkeypatch.setattr(Routing, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        run(job, ["routing"])
    monkeypatch.setattr(Routing, "measure", lambda *args: (made.append(args[-1]), real(*args))[1])
    assert run(job, ["routing"]) == ["routing"]
    text = HeldOutText.open(Artifacts.open(job.out))
    assert made == text.pieces()
    assert len(made) > 3
    assert digest(job.out) == digest(short_job.out)


def test_the_manifest_says_how_means_and_intervals_were_made(opened):
    parameters = json.loads((opened.folder / "manifest.json").read_text())["stages"]["routing"]["parameters"]
    assert parameters["replicates"] == 1000
    assert parameters["word_positions"] == list(WORD_POSITIONS)


@pytest.mark.parametrize(
    ("by", "groups"),
    [(None, ["all"]), ("decile", list(range(10))), ("domain", ["a", "b"]), ("word", list(WORD_POSITIONS))],
)
def test_the_reader_has_a_row_for_every_group_layer_and_bank(opened, by, groups):
    table, stored = opened.routing_groups(by), opened.tensors("routing")
    assert list(table) == ["group", "layer", "bank", "mean", "sd", "low", "high", "n"]
    assert table["group"].unique().tolist() == groups
    assert len(table) == len(groups) * 3 * 4
    prefix = by or "overall"
    row = table.iloc[-1]
    assert row[["group", "layer", "bank"]].tolist() == [groups[-1], 2, 3]
    for what in ("mean", "sd", "low", "high"):
        assert row[what] == stored.get_tensor(f"{prefix}_{what}").reshape(-1)[-1]
    n = table.groupby("group", sort=False)["n"].agg(["min", "max"])
    assert n["min"].tolist() == n["max"].tolist() == stored.get_tensor(f"{prefix}_n").tolist()

    measures = opened.routing_measures(by)
    assert list(measures) == ["group", "layer", "measure", "mean", "sd", "low", "high", "n"]
    assert len(measures) == len(groups) * 3 * 2
    last = measures[(measures["group"] == groups[-1]) & (measures["layer"] == 2)].set_index("measure")
    for measure in ("entropy", "injection_ratio"):
        for what in ("mean", "sd", "low", "high"):
            assert last.loc[measure, what] == stored.get_tensor(f"{prefix}_{measure}_{what}").reshape(-1)[-1]
    assert last.loc["entropy", "mean"] <= math.log(4)


def test_the_reader_has_the_measures_of_a_token(opened):
    stored = opened.tensors("routing")
    token_id = int(np.argmax(stored.get_tensor("n")))
    table = opened.routing_measures_of(token_id)
    assert list(table) == ["layer", "measure", "mean", "sd", "n"]
    assert table["measure"].tolist() == ["entropy"] * 3 + ["injection_ratio"] * 3
    assert (table["n"] == opened.routing(token_id)[2]).all()
    expected = [stored.get_tensor(f"{m}_mean")[token_id] for m in ("entropy", "injection_ratio")]
    assert table["mean"].tolist() == np.concatenate(expected).tolist()
    with pytest.raises(ValueError, match="There is no token id 99999"):
        opened.routing_measures_of(99999)


def test_the_reader_refuses_another_grouping(opened):
    for method in (opened.routing_groups, opened.routing_measures):
        with pytest.raises(ValueError, match='There is no grouping \'layer\'; it is "decile", "domain" or "word"'):
            method("layer")


def test_the_reader_agrees_with_itself(opened):
    mean, sd, n = opened.routing_by_decile()
    table = opened.routing_groups("decile")
    np.testing.assert_array_equal(table["mean"], mean.reshape(-1))
    np.testing.assert_array_equal(table["sd"], sd.reshape(-1))
    overall, _, positions = opened.routing_overall()
    np.testing.assert_array_equal(opened.routing_groups()["mean"], overall.reshape(-1))
    assert positions == opened.routing_groups("domain").groupby("group")["n"].first().sum()
    assert n.sum() <= positions
