"""Several processes that share an artifacts folder make what one process makes, byte for byte."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from precompute import Artifacts
from precompute.stages import STAGES
from precompute.store import MANIFEST_FILE

ROOT = Path(__file__).parents[2]
SLOW = {"maps", "history"}  # maps are made of one table after another, and compiled for 15 s before


def command(job, *launcher: str) -> list[str]:
    files = [str(job.checkpoint), "--base", str(job.base), "--text", str(job.text[0]), "--out", str(job.out)]
    stages = [name for name in STAGES if name not in SLOW]
    program = [sys.executable, *launcher, "-m", "tests.precompute.launch"]
    return [*program, *files, "--templates", str(job.templates), "--only", *stages]


def start(job, *launcher: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(job, *launcher), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, **options
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*") if file.is_file()}


@pytest.fixture(scope="module")
def one(job, tmp_path_factory):
    """The job, made by one process."""
    made = replace(job, out=tmp_path_factory.mktemp("processes") / "one")
    process = start(made)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    return made


@pytest.fixture(scope="module")
def made_by_one(one):
    """Every file that one process made."""
    return bytes_of(one.out)


def test_two_processes_make_the_same_bytes_as_one(one, made_by_one, tmp_path):
    job = replace(one, out=tmp_path / "two")
    process = start(job, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert bytes_of(job.out) == made_by_one
    manifest = json.loads((job.out / MANIFEST_FILE).read_text())
    assert {stage["processes"] for stage in manifest["stages"].values()} == {2}
    assert not list(job.out.glob("*.parts"))


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(one, made_by_one, tmp_path):
    job = replace(one, out=tmp_path / "killed")
    for seconds in (9, 10, 12):
        process = start(job, start_new_session=True)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if (job.out / MANIFEST_FILE).exists():
            Artifacts.open(job.out)  # what is there is whole
    process = start(job)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert bytes_of(job.out) == made_by_one
