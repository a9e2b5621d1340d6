"""A small artifacts folder, made by the real pipeline from tiny random models."""

import json
from pathlib import Path

import pytest

from precompute.pipeline import Job, run
from precompute.store import MANIFEST_FILE
from tests.conftest import tiny_model, toy_documents

STUDY = {
    "schema": 1,
    "categories": [
        {
            "name": "animals & <people>",
            "description": "",
            "pairs": [["fox", "child"], ["captain", "neighbour"]],
            "templates": [f"{start} {{}} {end}." for start in ("The", "A", "My") for end in ("sings", "waits")],
        },
        {
            "name": "places",
            "description": "",
            "pairs": [["river", "harbour"]],
            "templates": ["We met at the {} again.", "The {} lies still."],
        },
    ],
}


@pytest.fixture(scope="session")
def artifact_folder(tmp_path_factory, tokenizer) -> Path:
    """Artifacts of a TIDE model (L 3, K 3, V 330) with every stage. The last ids do not exist in the tokenizer."""
    folder = tmp_path_factory.mktemp("dashboard")
    for name, banks in (("tide", 3), ("base", 0)):
        model = tiny_model(vocab_size=len(tokenizer) + 10, num_memory_blocks=banks, max_position_embeddings=256)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    text = folder / "text.txt"
    text.write_text("\n\n".join(toy_documents(12)) + "\n", encoding="utf-8")
    templates = folder / "study.json"
    templates.write_text(json.dumps(STUDY), encoding="utf-8")
    out = folder / "artifacts"
    run(Job(folder / "tide", out, templates, (text,), base=folder / "base", show_progress=False))
    return out


@pytest.fixture
def folder_without(artifact_folder, tmp_path):
    """`folder_without(stage)`: the same artifacts as if a stage had not been run."""

    def make(stage: str) -> Path:
        out = artifact_folder.parent / f"without-{stage}-{tmp_path.name}"
        out.mkdir()
        for entry in artifact_folder.iterdir():
            (out / entry.name).symlink_to(entry)
        manifest = json.loads((artifact_folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        del manifest["stages"][stage]
        (out / MANIFEST_FILE).unlink()
        (out / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
        return out

    return make
