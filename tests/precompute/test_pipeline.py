"""`tide-precompute` as a person runs it: what is kept, what is made anew, and what is refused."""

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import precompute.stages.frequency
import precompute.store
from precompute import ArtifactError, Artifacts
from precompute.__main__ import main
from precompute.pipeline import run, stages_to_run
from precompute.stage import Context, Stage
from precompute.stages import STAGES
from precompute.store import MANIFEST_FILE
from tests.conftest import tiny_model
from tide.cli import UserError, run_command

OF_TEXT = {"text", "frequency", "routing", "specialisation", "ablation", "compression", "rare_tokens"}
OF_COUNTS = {"frequency", "routing", "specialisation", "overlap", "geometry", "ablation", "compression", "rare_tokens"}
QUICK = ["text", "frequency", "geometry"]


def in_order(names: set[str]) -> list[str]:
    return [name for name in STAGES if name in names]


def bytes_of(folder) -> dict[str, bytes]:
    """Every file of every stage."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/*")) if file.is_file()}


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


class Squares(Stage):
    """A stage of five pieces for these tests: squares of numbers."""

    name = "squares"
    needs = ("frequency",)

    def __init__(self, fail_at: str | None = None, error: BaseException | None = None):
        self.fail_at, self.error, self.measured = fail_at, error, []

    def pieces(self, context: Context):
        return [f"number-{n}" for n in range(5)]

    def measure(self, context, piece):
        if piece == self.fail_at:
            raise self.error
        self.measured.append(piece)
        return {"square": {"value": np.array([int(piece[-1]) ** 2])}}

    def combine(self, context, parts):
        values = [parts.tensors(piece, "square")["value"] for piece in parts.pieces]
        return {"squares": {"values": np.concatenate(values)}}


@pytest.fixture
def squares(monkeypatch):
    """`squares(...)` puts such a stage among the others."""

    def make(*args) -> Squares:
        stage = Squares(*args)
        monkeypatch.setitem(STAGES, "squares", stage)
        return stage

    return make


def test_a_finished_stage_is_not_made_again(own):
    before = (own.out / MANIFEST_FILE).read_text()
    assert run(own) == []
    assert (own.out / MANIFEST_FILE).read_text() == before


def test_nothing_to_do_loads_no_model(own, monkeypatch):
    monkeypatch.setattr(precompute.stage, "load_checkpoint", lambda *_: pytest.fail("loaded a model"))
    assert run(own) == []


def test_the_tables_of_a_checkpoint_are_measured_without_loading_a_model(own, monkeypatch):
    monkeypatch.setattr(precompute.stage, "load_checkpoint", lambda *_: pytest.fail("loaded a model"))
    shutil.rmtree(own.out)
    assert run(own, ["geometry", "overlap"]) == ["frequency", "neighbors", "overlap", "geometry"]


def test_a_run_that_was_stopped_goes_on_at_the_next_piece_and_ends_with_the_same_bytes(own, squares, tmp_path):
    own = replace(own, out=tmp_path / "fresh")
    squares()
    run(own, ["squares"])
    whole = bytes_of(own.out)
    shutil.rmtree(own.out)

    squares("number-3", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(own, ["squares"])
    assert not Artifacts.open(own.out).has("squares")
    stage = squares()
    assert run(own, ["squares"]) == ["squares"]
    assert stage.measured == ["number-3", "number-4"]
    assert bytes_of(own.out) == whole
    assert not list(own.out.glob("*.parts"))


def test_pieces_that_were_made_of_other_inputs_are_not_used(own, squares):
    squares("number-3", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(own, ["squares"])
    own.text[0].write_text("The red fox counts the stars.\n", encoding="utf-8")
    stage = squares()
    run(own, ["squares"])
    assert len(stage.measured) == 5


def test_a_piece_that_was_half_written_is_made_again(own, squares):
    squares("number-3", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(own, ["squares"])
    (parts,) = (own.out / "squares.parts").iterdir()
    (parts / "number-3.tmp").mkdir()
    (parts / "number-2" / "cost.json").unlink()
    stage = squares()
    run(own, ["squares"])
    assert stage.measured == ["number-2", "number-3", "number-4"]


def test_a_full_disk_is_told_and_leaves_nothing_half_written(own, squares, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    stage = squares()
    with monkeypatch.context() as patched:
        patched.setattr(precompute.store, "save_file", full)
        with pytest.raises(ArtifactError, match=r"No space left on device.*make room or choose another --out\.$"):
            run(own, ["squares"])
    assert not list(own.out.rglob("*.tmp"))
    assert Artifacts.open(own.out).has("routing")
    stage.measured.clear()
    run(own, ["squares"])
    assert len(stage.measured) == 5


def test_a_disk_that_is_full_at_the_end_keeps_the_pieces(own, squares, monkeypatch):
    stage = squares()
    with monkeypatch.context() as patched:
        patched.setattr(Squares, "combine", lambda *_: {"squares": {"values": object()}})
        patched.setattr(
            precompute.store, "write_tables", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
        )
        with pytest.raises(ArtifactError, match="No space left"):
            run(own, ["squares"])
    assert not list(own.out.rglob("squares.tmp"))
    stage.measured.clear()
    assert run(own, ["squares"]) == ["squares"]
    assert stage.measured == []


def test_a_damaged_stage_is_made_again(own):
    (own.out / "neighbors" / "embedding.safetensors").write_bytes(b"")
    assert run(own) == ["neighbors"]
    Artifacts.open(own.out)


def test_another_format_of_a_stage_makes_it_and_what_needs_it_anew(own, monkeypatch):
    monkeypatch.setattr(type(STAGES["neighbors"]), "format", 99)
    assert run(own) == in_order({"neighbors", "overlap", "maps"})


def test_other_text_makes_anew_what_was_measured_on_it(own):
    own.text[0].write_text("The red fox counts the stars. " * 20 + "\n", encoding="utf-8")
    assert run(own) == in_order(OF_TEXT | OF_COUNTS)


def test_what_was_made_from_another_version_of_a_stage_is_gone(own):
    own.text[0].write_text("The red fox counts the stars. " * 20 + "\n", encoding="utf-8")
    assert run(own, ["frequency"]) == ["frequency"]
    opened = Artifacts.open(own.out)
    assert [name for name in STAGES if opened.has(name)] == ["text", "frequency", "neighbors", "maps", "collapse"]
    assert not (own.out / "routing").exists()


def test_another_window_makes_anew_what_was_measured_on_the_text(own):
    assert run(replace(own, window=32)) == in_order(OF_TEXT - {"frequency"})
    assert Artifacts.open(own.out).window_tokens == 32


def test_a_window_that_the_model_does_not_take_is_refused(own):
    with pytest.raises(UserError, match="--window 4096 is more than the"):
        run(replace(own, window=4096))


def test_other_templates_make_the_collapse_study_anew(own):
    study = json.loads(own.templates.read_text())
    own.templates.write_text(json.dumps({**study, "categories": study["categories"][:1]}))
    assert run(own) == ["collapse"]


def test_without_a_base_the_comparisons_are_of_tide_alone(own):
    assert run(replace(own, base=None)) == ["collapse", "rare_tokens"]
    opened = Artifacts.open(own.out)
    assert opened.base is None
    assert set(opened.collapse()["model"]) == {"tide"}


def test_counts_of_the_checkpoint_come_before_those_of_the_held_out_text(own):
    save_file(
        {"counts": np.arange(330)}, own.checkpoint / "token_counts.safetensors", metadata={"corpus": "the corpus"}
    )
    assert run(own, QUICK) == ["frequency", "geometry"]
    opened = Artifacts.open(own.out)
    assert opened.count_corpus == "the corpus"
    assert opened.counts.tolist() == list(range(330))


def test_counts_of_another_model_are_refused(own):
    save_file({"counts": np.arange(9)}, own.checkpoint / "token_counts.safetensors", metadata={"corpus": "?"})
    with pytest.raises(UserError, match="9 counts"):
        run(own)


def test_any_corpus_can_be_counted_instead(own, tmp_path):
    save_file({"counts": np.arange(330)}, own.checkpoint / "token_counts.safetensors")
    (tmp_path / "other.txt").write_text("boats boats\n", encoding="utf-8")
    (tmp_path / "more.jsonl").write_text('{"text": "boats"}\n', encoding="utf-8")
    counted = replace(own, count_text=(str(tmp_path / "other.txt"), str(tmp_path / "more.jsonl")))
    assert run(counted, QUICK) == ["frequency", "geometry"]
    opened = Artifacts.open(own.out)
    assert opened.count_corpus == "other.txt, more.jsonl"
    assert 0 < opened.counts.sum() < 15
    with pytest.raises(UserError, match=r"--count-text .*nowhere"):
        run(replace(own, count_text=(str(tmp_path / "nowhere"),)))


def test_the_stages_that_one_needs_come_along():
    assert stages_to_run(["routing"]) == ["text", "frequency", "routing"]
    assert stages_to_run(["collapse", "maps"]) == ["neighbors", "maps", "collapse"]
    assert stages_to_run([]) == list(STAGES)


def test_a_stage_without_text_needs_none(own, tmp_path):
    assert run(replace(own, text=(), out=tmp_path / "out"), ["neighbors"]) == ["neighbors"]
    with pytest.raises(UserError, match="give --text"):
        run(replace(own, text=(), out=tmp_path / "out"), ["routing"])


def test_a_stage_that_cannot_be_made_is_left_out_or_refused_when_it_is_asked_for(own, capsys):
    assert run(replace(own, show_progress=True)) == []
    assert "history: left out. " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"summaries\.jsonl"):
        run(own, ["history"])


def test_the_manifest_says_what_was_done(own):
    manifest = json.loads((own.out / MANIFEST_FILE).read_text())
    assert manifest["checkpoint"]["path"] == "../tide"
    assert manifest["text"]["files"][0]["name"] == "text.txt"
    assert manifest["stages"].keys() == STAGES.keys() - {"history"}
    for stage in manifest["stages"].values():
        assert stage["seconds"] >= 0
        assert stage["peak_memory_mb"] > 10
        assert stage["processes"] == 1
        assert "torch" in stage["versions"]


def test_artifacts_of_another_checkpoint_are_not_written_over(own):
    tiny_model(seed=5, vocab_size=330).save_pretrained(own.checkpoint)
    with pytest.raises(ArtifactError, match="another checkpoint"):
        run(own)


def test_a_base_with_banks_is_refused(own):
    with pytest.raises(UserError, match="has 3 memory banks"):
        run(replace(own, base=own.checkpoint))


def test_a_model_without_banks_can_be_measured(own, tmp_path):
    alone = replace(own, checkpoint=own.base, base=None, out=tmp_path / "out")
    assert set(run(alone)) >= {"routing", "neighbors", "overlap", "geometry", "collapse", "rare_tokens"}
    opened = Artifacts.open(alone.out)
    assert opened.num_banks == 0
    assert opened.routing_overall()[0].tolist() == [[1.0]] * 3
    assert opened.mean_injection().shape == (3, 0, 32)
    assert opened.overlap(3).shape == (0,)
    assert opened.neighbors(3)[0].shape == (10,)
    with pytest.raises(ValueError, match="no banks"):
        opened.neighbors(3, 0)


def test_no_pickle_is_written(own):
    suffixes = {f.suffix for f in own.out.rglob("*") if f.is_file()}
    assert suffixes == {".json", ".parquet", ".safetensors", ".faiss"}


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


@pytest.mark.parametrize("size", ["no", "-1", "0", "nan", "1e9"])
def test_a_memory_that_is_no_size_is_refused(size, capsys):
    assert run_command(lambda: main(["somewhere", "--max-memory", size])) == 2
    assert "--max-memory" in capsys.readouterr().err


def test_too_little_memory_is_told(own):
    with pytest.raises(UserError, match="--max-memory is too little"):
        run(replace(own, max_memory=10, out=own.out / "small"), ["neighbors"])


def test_the_command_makes_and_names_the_artifacts(own, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = [str(own.checkpoint), "--text", str(own.text[0]), "--only", "frequency"]
    assert main(arguments) == 0
    assert "frequency made" in capsys.readouterr().out
    assert Artifacts.open("artifacts/tide").checkpoint == own.checkpoint.resolve()
    assert main(arguments) == 0
    assert "everything is there" in capsys.readouterr().out


def test_stages_of_another_folder_are_taken_where_they_are_of_the_same_inputs(own, tmp_path):
    new = replace(own, out=tmp_path / "new", reuse=own.out)
    assert run(new) == []
    assert bytes_of(new.out) == bytes_of(own.out)
    assert Artifacts.open(new.out).base == own.base.resolve()
    own.templates.write_text(own.templates.read_text() + " ")
    assert run(replace(new, out=tmp_path / "newer")) == ["collapse"]
    with pytest.raises(ArtifactError, match="no artifacts folder"):
        run(replace(new, reuse=tmp_path / "nowhere"))
    alone = replace(own, checkpoint=own.base, base=None, out=tmp_path / "base", reuse=own.out)
    with pytest.raises(ArtifactError, match=r"--reuse .* holds artifacts of another checkpoint"):
        run(alone, ["geometry"])


def test_a_resumed_run_counts_nothing_again(own, monkeypatch):
    shutil.rmtree(own.out)
    run(own, ["frequency"])
    monkeypatch.setattr(precompute.stages.frequency, "count_tokens", lambda *_: pytest.fail("counted again"))
    assert run(own, ["geometry"]) == ["geometry"]


def test_the_tokens_of_the_text_are_stored_once(own, tokenizer):
    stored = load_file(own.out / "text" / "tokens.safetensors")
    assert stored["tokens"].dtype == np.int32
    assert stored["file_starts"].tolist() == [0, len(stored["tokens"])]
    assert stored["tokens"][0] == tokenizer.bos_token_id
