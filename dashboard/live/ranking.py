"""Which switch matters most: every single layer and (layer, bank) switched off in turn, ranked, with its control."""

import pandas as pd
import streamlit as st

from dashboard.engine import Engine
from dashboard.figures import live as figures
from dashboard.frame import download_table, problem, show_figure, token_markdown
from dashboard.live import state
from tide.cli import UserError

RESULT = "live_sweep"
MEASURES = {"kl": "by KL of the whole prediction", "delta": "by the target's log-probability"}
EXPLANATION = (
    "Every layer and every (layer, bank) is switched off by itself; the diamond is the control, the same amount of "
    "injection in a random direction. A bar beyond its diamond says that the direction mattered, not only the size."
)


@st.fragment
def draw(engine: Engine) -> None:
    """Draws the button and the bars of the last ranking, which name what they are of.

    A fragment of its own: a switch does not change it. What it ranks is asked when the button is clicked.
    """
    config = engine.model.config
    if not config.num_memory_blocks:
        return
    count = config.num_hidden_layers * (config.num_memory_blocks + 1)
    st.markdown(f"**Which of the {count} switches matters most here?**")
    if st.button("Rank them", icon=":material/leaderboard:"):
        try:
            question = state.question(engine)
            st.session_state[RESULT] = question, _run(engine, question)
        except UserError as error:
            problem(error)
    st.caption(EXPLANATION)
    if RESULT not in st.session_state:
        return
    (token_ids, at, target), table = st.session_state[RESULT]
    shown = engine.vocabulary.show_all(token_ids)
    st.markdown(
        f"After {token_markdown(''.join(shown[: at + 1]))}, target {token_markdown(engine.vocabulary.show(target))}:"
    )
    measure = st.segmented_control(
        "ranked", list(MEASURES), key="live_measure", format_func=MEASURES.__getitem__, default="kl", required=True
    )
    show_figure(figures.sweep(table, measure or "kl"), key="live_sweep_chart", alt="Switches ranked by effect")
    download_table(table, "sweep")


def _run(engine: Engine, question: tuple[tuple[int, ...], int, int]) -> pd.DataFrame:
    bar = st.progress(0.0, "switching off, one after another …")

    def progress(done: int, of: int) -> None:
        bar.progress(done / of, f"{done} of {of} switches")

    try:
        return engine.sweep(*question, progress=progress)
    finally:
        bar.empty()
