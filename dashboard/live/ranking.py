"""Which switch matters most: every single layer and (layer, bank) switched off in turn, ranked, with its control."""

import pandas as pd
import streamlit as st

from dashboard.engine import Engine
from dashboard.figures import live as figures
from dashboard.frame import download_table, problem, show_figure
from tide.cli import UserError

RESULT = "live_sweep"
MEASURES = {"kl": "by KL of the whole prediction", "delta": "by the target's log-probability"}
EXPLANATION = (
    "Every layer and every (layer, bank) is switched off by itself; the diamond is the control, the same amount of "
    "injection in a random direction. A bar beyond its diamond says that the direction mattered, not only the size."
)


@st.fragment
def draw(engine: Engine, token_ids: tuple[int, ...], at: int, target: int) -> None:
    """Draws the button and, when it has run for this very prompt, position and target, the bars."""
    config = engine.model.config
    count = config.num_hidden_layers * (config.num_memory_blocks + 1)
    question = (token_ids, at, target)
    stored = st.session_state.get(RESULT)
    if stored is not None and stored[0] == question:
        measure = st.segmented_control(
            "ranked", list(MEASURES), key="live_measure", format_func=MEASURES.__getitem__, default="kl", required=True
        )
        show_figure(figures.sweep(stored[1], measure or "kl"), key="live_sweep_chart", alt="Switches ranked by effect")
        st.caption(EXPLANATION)
        download_table(stored[1], "sweep")
        return
    st.markdown(f"**Which of the {count} switches matters most here?**")
    if st.button("Rank them", icon=":material/leaderboard:", disabled=not config.num_memory_blocks):
        try:
            st.session_state[RESULT] = question, _run(engine, question)
        except UserError as error:
            problem(error)
            return
        st.rerun(scope="fragment")
    st.caption(EXPLANATION)


def _run(engine: Engine, question: tuple[tuple[int, ...], int, int]) -> pd.DataFrame:
    bar = st.progress(0.0, "switching off, one after another …")

    def progress(done: int, of: int) -> None:
        bar.progress(done / of, f"{done} of {of} switches")

    try:
        return engine.sweep(*question, progress=progress)
    finally:
        bar.empty()
