"""The model writes on, as trained and with the switches, side by side from the same random numbers."""

import threading

import streamlit as st

from dashboard.engine import Engine
from dashboard.frame import problem
from dashboard.live import state
from tide import Intervention
from tide.analysis import first_difference
from tide.cli import UserError
from tide.tokens import as_html, shorten

WRITER = "live_writer"
REDRAW_SECONDS = 0.2
SIDES = ("as trained", "switched")
LENGTH = 40  # tokens, at first

Question = tuple[tuple[int, ...], Intervention]


class Writer:
    """One pair of texts, written in a thread of its own, so that a click on Stop is heard at once.

    Attributes:
        question: prompt and switches that it belongs to.
        texts: the token ids written so far, as trained and switched.
        error: what ended it early; None where nothing did.
    """

    def __init__(self, engine: Engine, question: Question, length: int, temperature: float, seed: int):
        self.question = question
        self.texts: tuple[list[int], list[int]] = ([], [])
        self.error: UserError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(engine, length, temperature, seed), daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether more tokens are to come."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends both texts where they are."""
        self._stop.set()

    def _write(self, engine: Engine, length: int, temperature: float, seed: int) -> None:
        token_ids, intervention = self.question
        both = (Intervention(), intervention)
        try:
            for which, token in engine.generate(token_ids, both, length, temperature, seed, stop=self._stop):
                self.texts[which].append(token)
        except UserError as error:
            self.error = error


def draw(engine: Engine) -> None:
    """Draws the controls and the last two texts, which name the switches that they were written with.

    A fragment of its own, with a timer while it writes: a switch does not change it. What is switched is asked when
    the button is clicked.
    """
    running = (writer := st.session_state.get(WRITER)) is not None and writer.running
    # The timer of a fragment is set where the fragment is called, so that Write and Stop rerun the page around it.
    st.fragment(_panel, run_every=REDRAW_SECONDS if running else None)(engine, running)


def _panel(engine: Engine, was_running: bool) -> None:
    writer: Writer | None = st.session_state.get(WRITER)
    st.markdown("**Let it write on**")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.number_input("tokens", 1, engine.context_length, LENGTH, key="tokens", bind="query-params", width=110)
        st.number_input("temperature", 0.0, 5.0, 0.0, 0.1, key="temperature", bind="query-params", width=130)
        st.number_input("seed", 0, 9999, 0, key="seed", bind="query-params", width=110)
        if was_running and writer is not None:
            st.button("Stop", on_click=writer.stop, icon=":material/stop:")
        elif st.button("Write", icon=":material/edit:"):
            try:
                _start(engine)
                st.rerun()
            except UserError as error:
                problem(error)
    _texts(engine, writer, was_running)


def _start(engine: Engine) -> None:
    chosen = st.session_state
    question = engine.encode(chosen[state.PROMPT]), state.switches()
    chosen[WRITER] = Writer(engine, question, int(chosen["tokens"]), float(chosen["temperature"]), int(chosen["seed"]))


def _texts(engine: Engine, writer: Writer | None, was_running: bool) -> None:
    """The two texts so far; what follows their first difference stands out."""
    running = writer is not None and writer.running  # asked first: what was written by then is shown
    texts = writer.texts if writer is not None else ([], [])
    written = [list(text) for text in texts]
    common = min(len(text) for text in written)
    apart = first_difference(*(text[:common] for text in written))
    for name, column, text in zip(SIDES, st.columns(2), written, strict=True):
        at = len(text) if apart is None else apart
        same, own = (as_html(str(engine.tokenizer.decode(part))) for part in (text[:at], text[at:]))
        switched = writer.question[1].to_text() if writer is not None and name == SIDES[1] else ""
        note = (f"{as_html(shorten(switched))} · " if switched else "") + f"{len(text)} tokens"
        note += "" if apart is None else f", apart from token {apart} on"
        body = f"{same}<mark>{own}</mark>" if own else same
        column.html(f'<div class="tide-writing"><b>{name}</b> <i>{note}</i><p>{body or "…"}</p></div>')
    if writer is not None and writer.error is not None:
        problem(writer.error)
    if was_running and not running:
        st.rerun()  # the timer ends with the page's next run
