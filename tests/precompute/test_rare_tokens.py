"""Loss by frequency: the very numbers of `tide-evaluate`, whatever the pieces and however often a run is stopped."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from precompute import Artifacts, stage
from precompute.pipeline import run
from precompute.stages import rare_tokens
from precompute.stages.rare_tokens import measured_windows, rare_token_tables
from precompute.store import read_manifest
from precompute.text import HeldOutText
from tests.conftest import tiny_model, toy_documents
from tide.cli import UserError
from tide.evaluation.__main__ import main as evaluate
from tide.training.tokenizer import train_tokenizer

STAGE = "rare_tokens"


@pytest.fixture(scope="module")
def finished(job, tokenizer, tmp_path_factory):
    """A job of two texts on checkpoints that bring counts, and its artifacts; read only."""
    root = shutil.copytree(job.checkpoint.parent, tmp_path_factory.mktemp("rare") / "own")
    shutil.rmtree(root / "artifacts", ignore_errors=True)
    counts = np.random.default_rng(0).integers(0, 50, size=len(tokenizer) + 10)
    save_file({"counts": counts}, root / "tide" / "token_counts.safetensors", metadata={"corpus": "random"})
    (root / "heldout_b.txt").write_text("\n\n".join(toy_documents(9, seed=5)) + "\n", encoding="utf-8")
    own = replace(
        job,
        checkpoint=root / "tide",
        base=root / "base",
        out=root / "artifacts",
        text=(root / "text.txt", root / "heldout_b.txt"),
    )
    run(own, [STAGE])
    return own


@pytest.fixture
def own(finished, tmp_path):
    """The same job, with a folder of its own for the artifacts."""
    return replace(finished, out=tmp_path / "artifacts")


def tables_of(job):
    return {name: Artifacts.open(job.out).frame(STAGE, name) for name in ("losses", "differences")}


def test_the_tables_are_those_of_tide_evaluate(finished, tmp_path):
    command = [finished.checkpoint, "--base", finished.base, "--text", *finished.text, "--out", tmp_path / "report"]
    assert evaluate(list(map(str, command))) == 0
    names = {"text.txt": "text", "heldout_b.txt": "b"}
    for name, made in tables_of(finished).items():
        wanted = pd.read_parquet(tmp_path / "report" / f"{name}.parquet").replace({"text": names})
        assert len(made) == len(wanted) > 20
        pd.testing.assert_frame_equal(made, wanted, check_dtype=False, rtol=1e-5)


def test_pieces_of_a_stopped_run_make_the_same_tables_and_load_each_model_once_a_run(finished, own, monkeypatch):
    monkeypatch.setattr(rare_tokens, "PIECE_TOKENS", 256)  # four windows
    loads, pieces = [], []
    load, measure = stage.load_checkpoint, rare_tokens.RareTokens.measure
    monkeypatch.setattr(stage, "load_checkpoint", lambda path, *a, **k: (loads.append(path), load(path, *a, **k))[1])

    def counted(self, context, piece):
        if len(pieces) == 3:
            pieces.append("stopped")
            raise KeyboardInterrupt
        pieces.append(piece)
        return measure(self, context, piece)

    monkeypatch.setattr(rare_tokens.RareTokens, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        run(own, [STAGE])
    assert loads == [own.base]
    run(own, [STAGE])
    assert loads == [own.base, own.base, own.checkpoint]
    assert len(pieces) == len(set(pieces)) > 8
    for name in ("losses", "differences"):
        one, other = (job.out / STAGE / f"{name}.parquet" for job in (finished, own))
        assert one.read_bytes() == other.read_bytes()


def test_without_a_base_there_are_losses_and_no_differences(own):
    run(replace(own, base=None), [STAGE])
    opened = Artifacts.open(own.out)
    assert set(opened.rare_token_losses()["model"]) == {"tide"}
    differences = opened.rare_token_differences()
    assert differences.empty
    assert {"mean", "low", "high", "better"} <= set(differences.columns)
    assert run(own, [STAGE]) == [STAGE]
    assert len(Artifacts.open(own.out).rare_token_differences()) > 5
    assert read_manifest(own.out)["base"]["path"].endswith("base")


def test_a_text_shorter_than_a_window_has_no_rows(own, tmp_path):
    (tmp_path / "short.txt").write_text("The red fox counts the stars.\n", encoding="utf-8")
    run(replace(own, text=(tmp_path / "short.txt",)), [STAGE])
    assert all(table.empty for table in tables_of(own).values())
    assert Artifacts.open(own.out).rare_token_losses().empty
    run(replace(own, text=(*own.text, tmp_path / "short.txt")), [STAGE])
    assert set(tables_of(own)["losses"]["text"]) == {"text", "b", "all"}


@given(
    files=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    most=st.integers(1, 300),
    length=st.integers(2, 12),
)
def test_the_windows_are_whole_and_a_long_text_gives_evenly_spaced_ones(files, most, length):
    starts = np.cumsum([0, *files])
    text = HeldOutText(np.arange(starts[-1]), starts, list("abcd")[: len(files)], length)
    chosen = measured_windows(text, most)
    assert (text.window_lengths[chosen] == length).all()
    for domain, size in enumerate(files):
        inside = chosen[text.window_domains[chosen] == domain]
        assert len(inside) == min(size // length, max(1, round(most / len(files) / length)))
        gaps = np.diff(inside)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1
    everything = measured_windows(text, 10**6)
    assert len(everything) == sum(size // length for size in files)


def test_the_reader_answers_from_the_tables(finished):
    opened = Artifacts.open(finished.out)
    whole = tables_of(finished)["losses"]
    rows = opened.rare_token_losses("group", text="b", averaging="type")
    here = (whole["bin_kind"] == "group") & (whole["text"] == "b") & (whole["averaging"] == "type")
    assert rows["mean"].tolist() == whole[here]["mean"].tolist()
    assert set(rows["bin"]) == {"rare", "mid", "common"}
    means = opened.rare_token_losses("all").set_index("model")["mean"]
    difference = opened.rare_token_differences("all")
    assert difference["mean"].item() == pytest.approx(means["base"] - means["tide"], abs=1e-9)
    for arguments in (("word",), ("decile", "nowhere"), ("decile", "all", "token")):
        with pytest.raises(ValueError, match="There is no"):
            opened.rare_token_differences(*arguments)


def test_losses_are_those_of_the_windows_of_their_text():
    rng = np.random.default_rng(0)
    windows, losses = rng.integers(30, size=(6, 5)), rng.random((6, 4), dtype=np.float32)
    made = rare_token_tables({"tide": losses}, windows, ["x"] * 2 + ["y"] * 4, np.full(30, -1), replicates=20)
    whole = made["losses"].query("bin_kind == 'all' and averaging == 'position'").set_index("text")
    assert whole["mean"]["x"] == pytest.approx(losses[:2].mean())
    assert whole["mean"]["y"] == pytest.approx(losses[2:].mean())
    assert whole["n_windows"].to_dict() == {"x": 2, "y": 4, "all": 6}


def other_tokenizer(folder):
    train_tokenizer(iter(toy_documents(40)), vocab_size=300).save_pretrained(folder)


def shorter_windows(folder):
    tiny_model(vocab_size=330, num_memory_blocks=0, max_position_embeddings=32).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "told"), [(other_tokenizer, "different tokenizers"), (shorter_windows, "takes 32 tokens at once, not 64")]
)
def test_a_base_that_does_not_compare_is_told(own, tmp_path, spoil, told):
    base = shutil.copytree(own.base, tmp_path / "base")
    spoil(base)
    with pytest.raises(UserError, match=told):
        run(replace(own, base=base), [STAGE])


def test_a_text_cannot_be_called_as_all_are(own, tmp_path):
    text = shutil.copy(own.text[0], tmp_path / "heldout_all.txt")
    with pytest.raises(UserError, match=r"'all'.*rename"):
        run(replace(own, text=(tmp_path / text,)), [STAGE])
