"""The badge in the corner: whether the loaded model and its artifacts can be believed. Checks run once a model."""

import threading

import streamlit as st

from dashboard.checks import Check, run_checks
from dashboard.engine import Engine
from precompute import Artifacts
from tide.tokens import as_markdown

REDRAW_SECONDS = 1.0
_lock = threading.Lock()
_verdicts: dict[str, "Verdict"] = {}


class Verdict:
    """The checks of one model and its artifacts; they run in a thread of their own.

    Attributes:
        checks: what was found; None while they run.
        description: device and dtype of the model.
    """

    def __init__(self, engine: Engine, artifacts: Artifacts):
        self.checks: list[Check] | None = None
        self.description = engine.description
        self._thread = threading.Thread(target=self._run, args=(engine, artifacts), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, artifacts: Artifacts) -> None:
        self.checks = engine.on_device(lambda: run_checks(engine.model, artifacts), admitted=True)

    def wait(self) -> None:
        """Returns when the checks have run."""
        self._thread.join()

    @property
    def label(self) -> str:
        """What the badge says."""
        if self.checks is None:
            return f"checking · {self.description}"
        failed = [check.name for check in self.checks if not check.passed]
        count = f"checks {len(self.checks) - len(failed)}/{len(self.checks)}"
        return f"{count} · not so: {failed[0]}" if failed else f"{count} · {self.description}"


def check(engine: Engine, artifacts: Artifacts) -> Verdict:
    """The verdict on a loaded model and its artifacts; the checks begin when it is first asked for."""
    with _lock:
        name = _name(artifacts)
        if name not in _verdicts:
            _verdicts[name] = Verdict(engine, artifacts)
        return _verdicts[name]


def badge(artifacts: Artifacts) -> None:
    """Draws the badge of these artifacts' model; nothing where the model has not been loaded."""
    verdict = _verdicts.get(_name(artifacts))
    if verdict is None:
        return
    running = verdict.checks is None
    st.fragment(_draw, run_every=REDRAW_SECONDS if running else None)(verdict, running)


def _draw(verdict: Verdict, was_running: bool) -> None:
    failed = [check for check in verdict.checks or () if not check.passed]
    icon = ":material/error:" if failed else ":material/verified:"
    with st.popover(verdict.label, icon=None if verdict.checks is None else icon):
        for check in sorted(verdict.checks or (), key=lambda check: check.passed):
            mark = ":material/check:" if check.passed else ":material/error:"
            st.markdown(f"{mark} **{check.name}**  \n{as_markdown(check.detail)} {as_markdown(check.remedy)}")
        if verdict.checks is None:
            st.markdown("The checks are running.")
    if was_running and verdict.checks is not None:
        st.rerun()  # the timer ends with the page's next run


def _name(artifacts: Artifacts) -> str:
    return f"{artifacts.folder.resolve()} {artifacts.manifest['checkpoint']['fingerprint']}"
