"""What the Live page shows of a prompt's two runs beyond the prediction: attribution, lens, routing, sizes."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st
import torch

from dashboard.engine import Engine, LiveRun
from dashboard.figures import live as figures
from dashboard.frame import figure_columns, show_figure
from dashboard.live import state, tables
from dashboard.state import selection
from tide import analysis
from tide.analysis import AFTER, BEFORE

SMALLEST_SCALE = 0.01  # logits: a colour scale that ends below would paint rounding errors


def attribution(engine: Engine, run: LiveRun, at: int, target: int) -> np.ndarray:
    """Contribution of every (layer, bank) to the target's logit at one position: [L, K]."""

    def work() -> np.ndarray:
        return analysis.contributions(run.trace.at(at), torch.tensor(target)).banks[0, 0].cpu().numpy()

    return engine.derived(run, ("attribution", at, target), work)


def lens(engine: Engine, run: LiveRun, at: int, target: int) -> pd.DataFrame:
    """The logit lens at one position, a row a layer, as `tables.lens` takes it."""

    def work() -> pd.DataFrame:
        found = analysis.logit_lens(run.trace.at(at), torch.tensor(target), k=1)
        columns: dict[str, np.ndarray] = {}
        for stage, where in (("before", BEFORE), ("after", AFTER)):
            columns[f"{stage}_id"] = found.token_ids[0, 0, where, 0].cpu().numpy()
            columns[f"{stage}_p"] = found.log_probs[0, 0, where, 0].exp().cpu().numpy()
            columns[f"{stage}_target"] = found.target_log_prob[0, 0, where].cpu().numpy()
        return pd.DataFrame({"layer": np.arange(len(columns["after_id"])), **columns})

    return engine.derived(run, ("lens", at, target), work)


def usage(engine: Engine, run: LiveRun, at: int) -> pd.DataFrame:
    """How each layer uses its memory at one position: null weight, entropy, effective banks, size, cosine with FFN."""

    def work() -> pd.DataFrame:
        here = run.trace.at(at)
        measured = {
            "null": here.routing[..., -1],
            "entropy": analysis.routing_entropy(here),
            "banks": analysis.effective_banks(here),
            "size": here.injection_ratio(),
            "cosine": analysis.feed_forward_cosine(here),
        }
        columns = {name: value[0, 0].float().cpu().numpy() for name, value in measured.items()}
        return pd.DataFrame({"layer": np.arange(len(columns["null"])), **columns})

    return engine.derived(run, ("usage", at), work)


PARTS, LAYERS = VIEWS = ("attribution and routing", "layer by layer")


def draw(engine: Engine, trained: LiveRun, switched: LiveRun, shown: list[str], at: int, target: int) -> None:
    """Draws the chosen view, trained left and switched right. One at a time: a switch redraws what is seen alone.

    Args:
        engine: the model.
        trained: the run as trained.
        switched: the run with the switches.
        shown: [T] the prompt's tokens as shown.
        at: the marked position.
        target: token id whose prediction is explained.
    """
    st.session_state["live_view_input"] = VIEWS[state.view()]
    st.segmented_control(
        "show", VIEWS, key="live_view_input", on_change=_take_view, required=True, label_visibility="collapsed"
    )
    draw_view = _parts if VIEWS[state.view()] == PARTS else _layers
    draw_view(engine, trained, switched, shown, at, target)


def _take_view() -> None:
    state.set_view(VIEWS.index(st.session_state["live_view_input"]))


def _parts(engine: Engine, trained: LiveRun, switched: LiveRun, shown: list[str], at: int, target: int) -> None:
    """What every bank of every layer does for the target, and where the prompt's tokens take their memory."""
    name, layer = engine.vocabulary.show(target), selection().layer
    runs = (("as trained", trained), ("switched", switched))
    if engine.model.config.num_memory_blocks:
        values = {side: attribution(engine, run, at, target) for side, run in runs}
        limit = max(float(np.abs(values["as trained"]).max()), SMALLEST_SCALE)
        for column, (side, run) in zip(figure_columns(2, "attribution"), runs, strict=True):
            make = partial(figures.attribution, values[side], limit, name, side, side == "as trained")
            with column:
                figure = _once("attribution", (run.key, at, target), make) if side == "as trained" else make()
                show_figure(figure, key=f"live_attribution_{side}", alt=f"Attribution by layer and bank, {side}")
    for column, (side, run) in zip(figure_columns(2, "evidence"), runs, strict=True):
        title = f"Routing in layer {layer}, {side}"
        make = partial(figures.prompt_routing, run.routing[:, layer], shown, layer, at, title, side == "as trained")
        with column:
            figure = _once("routing", (run.key, layer, at), make) if side == "as trained" else make()
            show_figure(figure, key=f"live_routing_{side}", alt=f"Routing weights over the prompt, {side}")


def _layers(engine: Engine, trained: LiveRun, switched: LiveRun, shown: list[str], at: int, target: int) -> None:
    """What every layer's stream would predict, and how every layer uses its memory."""
    st.html(tables.lens(engine, lens(engine, trained, at, target), lens(engine, switched, at, target), target))
    if not engine.model.config.num_memory_blocks:
        return  # a Base model has no memory to use
    left, right = figure_columns([5, 4], "layers")
    left.html(tables.usage(usage(engine, trained, at), usage(engine, switched, at)))
    with right:
        show_figure(
            figures.injection_ratio(
                trained.injection_ratio, None if switched is trained else switched.injection_ratio, at
            ),
            key="live_ratio",
            alt="Ratio of injection norm to residual stream norm by layer, as trained and switched",
        )


def _once(name: str, question: tuple, make: Callable[[], go.Figure]) -> go.Figure:
    """The figure of the run as trained, which no switch changes: made once, until the question is another."""
    kept = st.session_state.get(f"live_figure_{name}")
    if kept is None or kept[0] != question:
        kept = st.session_state[f"live_figure_{name}"] = question, make()
    return kept[1]
