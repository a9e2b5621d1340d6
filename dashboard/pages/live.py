"""Live: a prompt through the model as trained and with switches, side by side."""

import os

import pandas as pd
import streamlit as st

from dashboard.components.switch_grid import Pairs, switch_grid
from dashboard.components.token_chips import token_chips
from dashboard.engine import DEVICE_VARIABLE, Comparison, Engine, LiveRun, shared_engine
from dashboard.figures import live as figures
from dashboard.frame import figure_columns, how_to_read, page_header, problem, show_figure, token_chip
from dashboard.numbers import probability
from dashboard.state import current_source, selection
from tide import Intervention
from tide.cli import UserError

DEFAULT_PROMPT = "The capital of France is"
EXPLANATION = """
**As trained** is always left, **switched** always right. A bank that is off hands its routing weight to the null
bank: what it would have injected becomes zero, and the other banks keep their weights. Later layers see the changed
stream, so their routing changes too.

**Δ log p** is the change of a token's log-probability in nats, switched minus trained. **KL(trained ‖ switched)** is
the divergence of the whole prediction at the target position, in nats; 0 means that the switches changed nothing
there. **|m| / |h|** is the length of the injection beside the residual stream that enters the layer:
mean and sd over the prompt, the circle at the marked token. A layer whose injection is off has no point.
"""


def render() -> None:
    """Draws the page."""
    page_header(
        "Live",
        "What does the memory do for this prompt, and what happens without parts of it? "
        "Switch single banks or whole layers off and compare the predictions.",
    )
    source = current_source()
    fingerprint = source.artifacts.manifest["checkpoint"]["fingerprint"]
    with st.spinner("Loading the model …"):
        engine = shared_engine(source.artifacts.checkpoint, fingerprint, os.environ.get(DEVICE_VARIABLE))
    _start_from_url(engine)
    _live(engine)
    how_to_read(EXPLANATION)


def _start_from_url(engine: Engine) -> None:
    """Takes prompt, target and switches from the link, once a session."""
    if "live_prompt" in st.session_state:
        return
    params = st.query_params
    st.session_state["live_prompt"] = params.get("prompt", DEFAULT_PROMPT)
    st.session_state["live_target"] = int(params["at"]) if params.get("at", "").isdigit() else None
    st.session_state["live_off"] = frozenset()
    try:
        intervention = Intervention.from_text(params.get("off", ""))
        intervention.validate(engine.model.config)
    except ValueError as error:
        problem(error)
        return
    config = engine.model.config
    layers = range(config.num_hidden_layers)
    st.session_state["live_off"] = frozenset(
        (layer, bank) for layer in layers for bank in intervention.off_in(layer, config.num_memory_blocks)
    )


def _intervention(off: Pairs, num_banks: int) -> Intervention:
    """The switches as an intervention; a layer with every bank off is named as a layer."""
    layers = {layer for layer, _ in off if all((layer, bank) in off for bank in range(num_banks))}
    return Intervention.layers_off(layers) | Intervention.off(pair for pair in off if pair[0] not in layers)


def _set_off(off: Pairs) -> None:
    st.session_state["live_off"] = off


def _set_target(position: int) -> None:
    st.session_state["live_target"] = position


def _take_prompt() -> None:
    st.session_state["live_prompt"] = st.session_state["live_prompt_input"]
    st.session_state["live_target"] = None


@st.fragment
def _live(engine: Engine) -> None:
    """All that depends on prompt and switches; a fragment, so that a switch reruns nothing else."""
    config = engine.model.config
    # A widget's own state is dropped while another page is shown; a copy of ours keeps the prompt.
    st.session_state["live_prompt_input"] = prompt = st.session_state["live_prompt"]
    st.text_input("prompt", key="live_prompt_input", on_change=_take_prompt)
    try:
        token_ids = engine.encode(prompt)
        intervention = _intervention(st.session_state["live_off"], config.num_memory_blocks)
        trained = engine.run(token_ids)
        switched = engine.run(token_ids, intervention)
    except UserError as error:
        problem(error)
        return
    wanted = st.session_state["live_target"]
    target = wanted if wanted is not None and wanted < len(token_ids) else len(token_ids) - 1
    _write_url(prompt, wanted, intervention)

    shown = engine.vocabulary.show_all(token_ids)
    special = engine.vocabulary.special_ids
    tokens = [{"id": i, "shown": s, "special": i in special} for i, s in zip(token_ids, shown, strict=True)]
    st.caption("The model predicts what follows the marked token; click another one to look there.")
    token_chips(tokens, target, key="live_chips", on_target=_set_target)

    grid, left, right = figure_columns([6, 5, 6], "predictions")
    with grid:
        st.markdown("**Switches**")
        if config.num_memory_blocks:
            switch_grid(
                config.num_hidden_layers,
                config.num_memory_blocks,
                st.session_state["live_off"],
                key="live_grid",
                on_change=_set_off,
            )
        else:
            st.info("This checkpoint is a Base model (K = 0): it has no memory to switch off.")
        st.button("Switch all on", on_click=_set_off, args=(frozenset(),), disabled=not intervention)
    comparison = engine.compare(trained, switched, target)
    left.html(_table(engine, comparison.trained, "as trained", movement=False))
    right.html(_table(engine, comparison.switched, "switched", movement=True))
    right.html(_measures(engine, comparison, trained, switched))
    _evidence(trained, switched, shown, target)


def _write_url(prompt: str, target: int | None, intervention: Intervention) -> None:
    wanted = {"prompt": prompt, "at": None if target is None else str(target), "off": intervention.to_text() or None}
    for name, value in wanted.items():
        if value is None:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != value:
            st.query_params[name] = value


def _table(engine: Engine, rows: pd.DataFrame, title: str, movement: bool) -> str:
    """HTML of one next-token table; tokens are escaped by `token_chip`."""
    head = "<th>rank</th><th>token</th><th>p</th>" + ("<th>moved</th><th>Δ log p</th>" if movement else "")
    body = []
    for row in rows.itertuples():
        chip = token_chip(engine.vocabulary.show(row.token_id), row.token_id, width=18)
        cells = f"<td>{row.rank}</td><td>{chip}</td><td>{probability(row.probability)}</td>"
        if movement:
            cells += f"<td>{_moved(row.other_rank - row.rank)}</td><td>{_change(row.delta)}</td>"
        body.append(f"<tr>{cells}</tr>")
    caption = f"<caption>next token, {title}</caption>"
    return f'<table class="tide-table">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _change(nats: float) -> str:
    """+0.91 or −0.94; a change that rounds to nothing has no sign."""
    return "0.00" if abs(nats) < 0.005 else f"{nats:+.2f}".replace("-", "−")


def _moved(places: int) -> str:
    if places == 0:
        return "="
    return f"▲{places}" if places > 0 else f"▼{-places}"


def _measures(engine: Engine, comparison: Comparison, trained: LiveRun, switched: LiveRun) -> str:
    """HTML of what the switches did in one number, and of how long it took."""
    return (
        '<p class="tide-measures">KL(trained ‖ switched) = '
        f"<b>{comparison.kl:.4f} nats</b> at the marked position<br>"
        f'<span class="tide-note">{engine.description} · forward as trained {trained.milliseconds:.1f} ms, '
        f"switched {switched.milliseconds:.1f} ms</span></p>"
    )


def _evidence(trained: LiveRun, switched: LiveRun, shown: list[str], target: int) -> None:
    """Routing over the prompt (trained left, switched right) and the size of the injection."""
    layer = selection().layer
    left, right, last = figure_columns([5, 5, 4], "evidence")
    for column, name, run in ((left, "as trained", trained), (right, "switched", switched)):
        figure = figures.prompt_routing(
            run.routing[:, layer], shown, layer, target, f"Routing in layer {layer}, {name}"
        )
        with column:
            show_figure(figure, key=f"live_routing_{name}", alt=f"Routing weights over the prompt, {name}")
    with last:
        changed = switched.injection_ratio if switched is not trained else None
        show_figure(
            figures.injection_ratio(trained.injection_ratio, changed, target),
            key="live_ratio",
            alt="Ratio of injection norm to residual stream norm by layer, as trained and switched",
        )
