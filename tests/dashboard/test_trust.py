"""The badge's verdict: run once a model, and it counts what passed."""

import threading

import pytest

from dashboard import trust
from dashboard.checks import Check
from dashboard.engine import Engine
from precompute import Artifacts


@pytest.fixture
def artifacts(artifact_folder):
    return Artifacts.open(artifact_folder)


@pytest.fixture
def engine(artifacts):
    return Engine(artifacts.checkpoint, device="cpu")


def test_the_checks_of_a_model_run_once_whoever_asks(monkeypatch, engine, artifacts):
    monkeypatch.setattr(trust, "_verdicts", {})
    calls = []
    monkeypatch.setattr(trust, "run_checks", lambda *_: calls.append(1) or [Check("a", True, "x", "")])
    threads = [threading.Thread(target=lambda: trust.check(engine, artifacts).wait()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert trust.check(engine, artifacts).label == "checks 1/1 · cpu float32"


def test_a_failed_check_shows_in_the_label(monkeypatch, engine, artifacts):
    monkeypatch.setattr(trust, "_verdicts", {})
    found = [Check("a", True, "x", ""), Check("b", False, "wrong.", "Do that.")]
    monkeypatch.setattr(trust, "run_checks", lambda *_: found)
    verdict = trust.check(engine, artifacts)
    verdict.wait()
    assert verdict.label == "checks 1/2 · not so: b"
    assert verdict.checks == found


def test_while_they_run_the_label_says_so(monkeypatch, engine, artifacts):
    monkeypatch.setattr(trust, "_verdicts", {})
    go = threading.Event()
    monkeypatch.setattr(trust, "run_checks", lambda *_: go.wait(10) and [])
    verdict = trust.check(engine, artifacts)
    assert verdict.label == "checking · cpu float32"
    go.set()
    verdict.wait()
