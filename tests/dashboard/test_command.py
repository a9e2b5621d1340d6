"""`tide-dashboard` refuses what it cannot show: one line on stderr, exit code 2."""

import json
import shutil
import socket

import pytest

from dashboard.__main__ import HOST, main
from tide.cli import run_command


def refused(capsys, *arguments) -> str:
    """The one line that the command prints."""
    assert run_command(lambda: main([str(argument) for argument in arguments])) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_missing_folder(capsys, tmp_path):
    assert str(tmp_path / "nothing") in refused(capsys, tmp_path / "nothing")


def test_a_folder_that_holds_no_artifacts(capsys, tmp_path):
    assert "tide-precompute" in refused(capsys, tmp_path)


def test_artifacts_of_another_checkpoint(capsys, artifact_folder, tmp_path):
    copy = tmp_path / "artifacts"
    shutil.copytree(artifact_folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["checkpoint"]["path"] = str(artifact_folder.parent / "base")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "checkpoint" in refused(capsys, copy)


def test_a_truncated_table(capsys, artifact_folder, tmp_path):
    copy = tmp_path / "artifacts"
    shutil.copytree(artifact_folder, copy)
    table = next(copy.rglob("*.safetensors"))
    table.write_bytes(table.read_bytes()[:-10])
    assert "broken" in refused(capsys, copy)


def test_a_port_in_use(capsys, artifact_folder):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"Port {port} on {HOST} is in use" in refused(capsys, artifact_folder, "--port", port)


@pytest.mark.parametrize("port", ["0", "99999", "x"])
def test_a_port_that_is_none(capsys, artifact_folder, port):
    assert "--port" in refused(capsys, artifact_folder, "--port", port)


def test_an_unknown_option(capsys):
    assert "--help" in refused(capsys, "--prot", "1")
