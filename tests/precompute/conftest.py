"""A tiny random TIDE and Base checkpoint, a text, a study, and the artifacts that the real pipeline makes of them."""

import json
from pathlib import Path

import pytest

from precompute import Artifacts
from precompute.pipeline import run
from precompute.stage import Job
from precompute.stages import STAGES
from tests.conftest import tiny_model, toy_documents

STUDY = {
    "schema": 1,
    "categories": [
        {
            "name": "people",
            "pairs": [["fox", "captain"], ["neighbour", "child"]],
            "templates": ["The old {} sings at night.", "A {} counts the stars again.", "My {} is near."],
        },
        {"name": "numbers", "pairs": [["3", "21"]], "templates": ["We saw {} boats.", "I know {} doors here."]},
    ],
}


@pytest.fixture(scope="session")
def job(tmp_path_factory, tokenizer) -> Job:
    """L 3, K 3, ten token ids more than the tokenizer has; V is larger than the 50 neighbours that are stored."""
    folder = tmp_path_factory.mktemp("precompute")
    for name, banks in (("tide", 3), ("base", 0)):
        tiny_model(vocab_size=len(tokenizer) + 10, num_memory_blocks=banks).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    documents = ["Vex JQ 7%", *toy_documents(30)]  # the first holds tokens that occur once
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    (folder / "study.json").write_text(json.dumps(STUDY), encoding="utf-8")
    return Job(
        folder / "tide",
        folder / "artifacts",
        folder / "study.json",
        (folder / "text.txt",),
        base=folder / "base",
        show_progress=False,
    )


@pytest.fixture(scope="session")
def artifact_folder(job) -> Path:
    """Every stage; read only."""
    assert run(job) == [name for name in STAGES if name != "history"]  # the checkpoint has no summaries
    return job.out


@pytest.fixture(scope="session")
def artifacts(artifact_folder) -> Artifacts:
    """The same, opened."""
    return Artifacts.open(artifact_folder)
