"""Folders that are refused, each in one sentence that says what to run."""

import json
import shutil

import pytest

from precompute import ArtifactError, Artifacts
from precompute.store import MANIFEST_FILE, Store
from tests.conftest import tiny_model


@pytest.fixture
def folder(artifact_folder, tmp_path):
    """A copy with its checkpoints beside it."""
    return shutil.copytree(artifact_folder.parent, tmp_path / "copy") / "artifacts"


def refused(folder, match, **kwargs):
    with pytest.raises(ArtifactError, match=match) as caught:
        Artifacts.open(folder, **kwargs)
    assert "\n" not in str(caught.value)
    assert "tide-precompute" in str(caught.value) or "give a" in str(caught.value)


def edit_manifest(folder, change):
    file = folder / MANIFEST_FILE
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def test_a_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "no artifacts folder")


def test_a_folder_of_something_else(tmp_path):
    refused(tmp_path, r"has no manifest\.json")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"schema": 2}', "\x00\x01", '{"schema": 2, "stages": 3}']
)
def test_a_broken_manifest(folder, content):
    (folder / MANIFEST_FILE).write_text(content)
    refused(folder, "is broken")


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_another_schema_version(folder, version):
    edit_manifest(folder, lambda m: m.update(schema=version))
    refused(folder, "schema version")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd"])
def test_a_manifest_that_leads_out_of_its_folder(folder, name):
    edit_manifest(folder, lambda m: m["stages"]["routing"]["files"].update({name: {"bytes": 1, "fingerprint": ""}}))
    refused(folder, "is broken")


@pytest.mark.parametrize("stage", ["frequency", "routing", "neighbors", "collapse"])
def test_a_missing_or_damaged_file(folder, stage):
    for file in sorted((folder / stage).iterdir()):
        content = file.read_bytes()
        file.unlink()
        refused(folder, f"{file.name} is missing.*--only {stage}")
        file.write_bytes(content[:-1])
        refused(folder, f"{file.name} is truncated")
        file.write_bytes(bytes(255 - b for b in content))
        refused(folder, f"{file.name} was changed")
        file.write_bytes(content)
    Artifacts.open(folder)


def test_a_checkpoint_that_was_trained_anew(folder, tokenizer):
    tiny_model(seed=1, vocab_size=330).save_pretrained(folder.parent / "tide")
    refused(folder, "another checkpoint")


def test_a_base_checkpoint_that_was_trained_anew(folder):
    tiny_model(seed=1, vocab_size=330, num_memory_blocks=0).save_pretrained(folder.parent / "base")
    refused(folder, "another checkpoint")


def test_a_checkpoint_of_another_model(folder):
    refused(folder, "another checkpoint", checkpoint=folder.parent / "base")


def test_a_checkpoint_that_is_not_there(folder):
    shutil.rmtree(folder.parent / "tide")
    refused(folder, "cannot be matched", checkpoint=folder.parent / "tide")
    Artifacts.open(folder)  # without asking for it, what was measured can still be read


def test_a_stage_that_was_not_run(folder):
    edit_manifest(folder, lambda m: m.update(stages={}))
    artifacts = Artifacts.open(folder)
    assert not artifacts.has("routing")
    for ask, stage in (
        (lambda: artifacts.counts, "frequency"),
        (lambda: artifacts.count_corpus, "frequency"),
        (lambda: artifacts.routing(3), "routing"),
        (lambda: artifacts.top_tokens(0, 0), "routing"),
        (lambda: artifacts.mean_injection(), "routing"),
        (lambda: artifacts.once_contexts(), "routing"),
        (lambda: artifacts.neighbors(3), "neighbors"),
        (lambda: artifacts.collapse(), "collapse"),
    ):
        with pytest.raises(ArtifactError, match=f"has no stage {stage}; run `tide-precompute .*--only {stage}`"):
            ask()


def test_writing_into_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    identity = {"checkpoint": {"path": "x", "fingerprint": "y"}, "model": {}}
    with pytest.raises(ArtifactError, match="is a file"):
        Store(tmp_path / "file", identity)
    with pytest.raises(ArtifactError, match="cannot be written"):
        Store(tmp_path / "file" / "below", identity)
    with pytest.raises(ArtifactError, match="no artifacts folder"):
        Store(tmp_path, identity)  # holds something else
