"""The benchmark of memory storages: what a process measures, what the rounds say, and a cap that is too small."""

import json
import subprocess
import sys

import pytest

from benchmarks import storage
from tests.conftest import tiny_model
from tide.cli import run_command
from tide.model import STORAGES


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def arguments(checkpoint, *more):
    return [str(checkpoint), "--prompt", "6", "--tokens", "5", "--repeats", "2", *more]


def test_a_run_ends_with_one_json_line(checkpoint, capfd, monkeypatch):
    ordered = []

    def in_this_process(own, **options):
        name = own[-1]
        ordered.append(name)
        if name == "int4":
            return subprocess.CompletedProcess(own, storage.OUT_OF_MEMORY, "")
        args = storage.build_parser().parse_args(arguments(checkpoint, "--storage", name))
        return subprocess.CompletedProcess(own, 0, "a warning\n" + json.dumps(storage.measure_one(args)) + "\n")

    monkeypatch.setattr(subprocess, "run", in_this_process)
    code = run_command(lambda: storage.main(arguments(checkpoint, "--threads", "1", "--cap", "9999")))
    stdout, stderr = capfd.readouterr()
    assert code == 0, stderr
    assert ordered == [*STORAGES, *STORAGES[1:], STORAGES[0]]
    result = json.loads(stdout.splitlines()[-1])
    assert result["name"] == "storage"
    storages = result["detail"]["storages"]
    assert storages["int4"] is None
    assert "does not fit" in stderr
    assert storages["disk"]["same_tokens"]
    assert set(result["ratios"]) == {f"{a}/resident {key}" for a in ("int8", "disk") for key in storage.TIMES}
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert storages["disk"]["cold_bytes_read"]["min"] > storages["resident"]["cold_bytes_read"]["max"]


@pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is capped on Linux alone")
def test_a_process_whose_tables_do_not_fit_says_so(checkpoint):
    own = [sys.executable, "-m", "benchmarks.storage", *arguments(checkpoint, "--storage", "resident", "--cap", "1")]
    done = subprocess.run(own, capture_output=True, text=True, check=False)
    assert done.returncode == storage.OUT_OF_MEMORY, done.stderr
    assert "resident does not fit in 1 MB" in done.stderr


def test_a_base_checkpoint_and_too_long_a_text_are_refused(checkpoint, tmp_path_factory, tokenizer, capfd):
    base = tmp_path_factory.mktemp("base")
    tiny_model(vocab_size=len(tokenizer), num_memory_blocks=0).save_pretrained(base)
    tokenizer.save_pretrained(base)
    for folder, more, said in ((base, (), "is a Base model"), (checkpoint, ("--tokens", "9999"), "positions")):
        assert run_command(lambda f=folder, m=more: storage.main(arguments(f, *m))) == 2
        assert said in capfd.readouterr().err
