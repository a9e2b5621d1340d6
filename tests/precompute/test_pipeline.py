"""`tide-precompute` as a person runs it: what is kept, what is made anew, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import precompute.pipeline
import precompute.routing
from precompute import ArtifactError, Artifacts
from precompute.__main__ import main
from precompute.pipeline import run, stages_to_run
from precompute.store import MANIFEST_FILE
from tests.conftest import tiny_model
from tide.cli import UserError, run_command


@pytest.fixture
def own(job, artifact_folder, tmp_path):
    """A job like the finished one, in a copy of its own that can be spoiled."""
    root = shutil.copytree(artifact_folder.parent, tmp_path / "own")
    return replace(
        job,
        checkpoint=root / "tide",
        base=root / "base",
        out=root / "artifacts",
        templates=root / "study.json",
        text=(root / "text.txt",),
    )


def test_a_finished_stage_is_not_made_again(own):
    before = (own.out / MANIFEST_FILE).read_text()
    assert run(own) == []
    assert (own.out / MANIFEST_FILE).read_text() == before


def test_nothing_to_do_loads_no_model(own, monkeypatch):
    monkeypatch.setattr(precompute.pipeline, "load_checkpoint", lambda *_: pytest.fail("loaded a model"))
    assert run(own) == []


def test_a_run_that_was_stopped_goes_on(own, monkeypatch):
    shutil.rmtree(own.out)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(precompute.pipeline, "neighbor_tables", stop)
        with pytest.raises(KeyboardInterrupt):
            run(own)
    opened = Artifacts.open(own.out)
    assert opened.has("routing")
    assert not opened.has("neighbors")
    (own.out / "neighbors.tmp").mkdir()  # what a kill leaves
    assert run(own) == ["neighbors", "collapse"]
    assert not list(own.out.glob("*.tmp"))


def test_a_damaged_stage_is_made_again(own):
    (own.out / "neighbors" / "neighbors.safetensors").write_bytes(b"")
    assert run(own) == ["neighbors"]
    Artifacts.open(own.out)


def test_artifacts_of_an_earlier_format_are_read_as_far_as_they_go_and_only_their_stage_is_made_anew(own, monkeypatch):
    mean_injection = Artifacts.open(own.out).mean_injection()
    shutil.rmtree(own.out / "routing")

    def earlier(*args, **kwargs):
        tensors = precompute.routing.routing_statistics(*args, **kwargs)["routing"]
        del tensors["mean_injection"], tensors["once_contexts"]
        return {"routing": tensors}

    with monkeypatch.context() as patched:
        patched.setattr(precompute.pipeline, "ROUTING_FORMAT", 1)
        patched.setattr(precompute.pipeline, "routing_statistics", earlier)
        assert run(own) == ["routing"]
    opened = Artifacts.open(own.out)
    assert opened.routing_overall()[2] > 0
    for ask in (opened.mean_injection, opened.once_contexts):
        with pytest.raises(ArtifactError, match=r"is older than \w+; run `tide-precompute .*--only routing`\.$"):
            ask()
    assert run(own) == ["routing"]
    np.testing.assert_array_equal(Artifacts.open(own.out).mean_injection(), mean_injection)


def test_other_text_makes_anew_what_was_measured_on_it(own):
    own.text[0].write_text("The red fox counts the stars.\n", encoding="utf-8")
    assert run(own) == ["frequency", "routing"]
    assert Artifacts.open(own.out).routing_overall()[2] < 30


def test_other_templates_make_the_collapse_study_anew(own):
    study = json.loads(own.templates.read_text())
    own.templates.write_text(json.dumps({**study, "categories": study["categories"][:1]}))
    assert run(own) == ["collapse"]


def test_without_a_base_the_study_runs_for_tide_alone(own):
    assert run(replace(own, base=None)) == ["collapse"]
    opened = Artifacts.open(own.out)
    assert opened.base is None
    assert set(opened.collapse()["model"]) == {"tide"}


def test_counts_of_the_checkpoint_come_before_those_of_text(own):
    save_file(
        {"counts": np.arange(330)}, own.checkpoint / "token_counts.safetensors", metadata={"corpus": "the corpus"}
    )
    assert run(own) == ["frequency", "routing"]
    opened = Artifacts.open(own.out)
    assert opened.count_corpus == "the corpus"
    assert opened.counts.tolist() == list(range(330))


def test_counts_of_another_model_are_refused(own):
    save_file({"counts": np.arange(9)}, own.checkpoint / "token_counts.safetensors", metadata={"corpus": "?"})
    with pytest.raises(UserError, match="9 counts"):
        run(own)


def test_text_can_be_counted_that_is_not_the_held_out_one(own, tmp_path):
    (tmp_path / "other.txt").write_text("boats boats\n", encoding="utf-8")
    assert run(replace(own, count_text=(tmp_path / "other.txt",))) == ["frequency", "routing"]
    opened = Artifacts.open(own.out)
    assert opened.count_corpus == "other.txt"
    assert opened.counts.sum() < 10


def test_the_stages_that_one_needs_come_along():
    assert stages_to_run(["routing"]) == ["frequency", "routing"]
    assert stages_to_run(["collapse", "neighbors"]) == ["neighbors", "collapse"]
    assert stages_to_run([]) == ["frequency", "routing", "neighbors", "collapse"]


def test_a_stage_without_text_needs_none(own, tmp_path):
    assert run(replace(own, text=(), out=tmp_path / "out"), ["neighbors"]) == ["neighbors"]
    with pytest.raises(UserError, match="give --text"):
        run(replace(own, text=(), out=tmp_path / "out"), ["routing"])


def test_the_manifest_says_what_was_done(own):
    manifest = json.loads((own.out / MANIFEST_FILE).read_text())
    assert manifest["checkpoint"]["path"] == "../tide"
    assert manifest["text"]["files"][0]["name"] == "text.txt"
    for stage in manifest["stages"].values():
        assert stage["seconds"] >= 0
        assert stage["peak_memory_mb"] > 10
        assert "torch" in stage["versions"]
        assert stage["parameters"]


def test_artifacts_of_another_checkpoint_are_not_written_over(own):
    tiny_model(seed=5, vocab_size=330).save_pretrained(own.checkpoint)
    with pytest.raises(ArtifactError, match="another checkpoint"):
        run(own)


def test_a_base_with_banks_is_refused(own):
    with pytest.raises(UserError, match="has 3 memory banks"):
        run(replace(own, base=own.checkpoint))


def test_a_model_without_banks_can_be_measured(own, tmp_path):
    alone = replace(own, checkpoint=own.base, base=None, out=tmp_path / "out")
    run(alone)
    opened = Artifacts.open(alone.out)
    assert opened.num_banks == 0
    assert opened.routing_overall()[0].tolist() == [[1.0]] * 3
    assert opened.mean_injection().shape == (3, 0, 32)
    assert opened.overlap(3).shape == (0,)
    assert opened.neighbors(3)[0].shape == (10,)
    with pytest.raises(ValueError, match="no banks"):
        opened.neighbors(3, 0)


def test_no_pickle_is_written(own):
    assert {f.suffix for f in own.out.rglob("*") if f.is_file()} == {".json", ".parquet", ".safetensors"}


@pytest.mark.parametrize(
    "spoil", ["missing", "truncated", "foreign", "other text", "other artifacts", "no text", "latin"]
)
def test_the_command_ends_in_one_sentence(own, spoil, capsys):
    checkpoint, text, out = own.checkpoint, own.text[0], own.out
    if spoil == "missing":
        checkpoint = checkpoint / "nowhere"
    elif spoil == "truncated":
        (checkpoint / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:5000])
    elif spoil == "foreign":
        (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    elif spoil == "other text":
        text = text / "nowhere"
    elif spoil == "other artifacts":
        checkpoint = own.base
    elif spoil == "no text":
        text.write_text("")
    elif spoil == "latin":
        text.write_bytes("Ärger\n".encode("latin-1"))
    arguments = [str(checkpoint), "--text", str(text), "--out", str(out), "--templates", str(own.templates)]
    assert run_command(lambda: main(arguments)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_the_command_makes_and_names_the_artifacts(own, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = [str(own.checkpoint), "--text", str(own.text[0]), "--only", "frequency"]
    assert main(arguments) == 0
    assert "frequency made" in capsys.readouterr().out
    assert Artifacts.open("artifacts/tide").checkpoint == own.checkpoint.resolve()
    assert main(arguments) == 0
    assert "everything is there" in capsys.readouterr().out


def test_a_resumed_run_counts_nothing_again(own, monkeypatch):
    shutil.rmtree(own.out)
    run(own, ["frequency"])
    monkeypatch.setattr(precompute.pipeline, "count_tokens", lambda *_: pytest.fail("counted again"))
    assert run(own, ["routing"]) == ["routing"]
