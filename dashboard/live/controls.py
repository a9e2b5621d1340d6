"""The controls of the Live page: the grid, presets, undo, and in which way something is off."""

from typing import Any

import streamlit as st

from dashboard.components.switch_grid import switch_grid
from dashboard.engine import Engine
from dashboard.live import state
from dashboard.state import selection
from tide import Intervention, TideConfig
from tide.intervention import REPLACEMENTS, Off, Rule, Swap

REPLACEMENT_LABELS: dict[str, str] = {"zero": "nothing", "mean": "its corpus mean", "random": "a random direction"}
RULE_LABELS: dict[str, str] = {
    "learned": "the trained router",
    "uniform": "uniform weights",
    "null": "all on null",
    "only": "all on one bank",
    "temperature": "the router at a temperature",
}


def draw(engine: Engine, token_ids: tuple[int, ...], at: int, has_mean: bool) -> None:
    """Draws the controls.

    Args:
        engine: the model.
        token_ids: of the prompt.
        at: the marked position.
        has_mean: whether the artifacts hold the mean injections.
    """
    config = engine.model.config
    if not config.num_memory_blocks:
        st.info("This checkpoint is a Base model (K = 0): it has no memory to switch off.")
        return
    switch_grid(
        config.num_hidden_layers,
        config.num_memory_blocks,
        state.off_pairs(state.switches(), config),
        key="live_grid",
        on_change=lambda pairs: state.set_pairs(pairs, config),
    )
    st.pills(
        "presets",
        state.PRESETS,
        key="live_preset",
        on_change=_take_preset,
        args=(config,),
        label_visibility="collapsed",
        wrap=True,
    )
    with st.container(horizontal=True):
        st.button("Undo", on_click=state.undo, disabled=not st.session_state[state.PAST], icon=":material/undo:")
        st.button("As trained", on_click=state.change, args=(Intervention(),), disabled=not state.switches())
        with st.popover("More"):
            _more(engine, token_ids, at, has_mean)


def _take_preset(config: TideConfig) -> None:
    name = st.session_state["live_preset"]
    if name:
        state.change(state.preset(name, config))
    st.session_state["live_preset"] = None  # a preset is an action, not a state


def _more(engine: Engine, token_ids: tuple[int, ...], at: int, has_mean: bool) -> None:
    """What is seldom changed: replacement, positions, router rule, row swap."""
    config = engine.model.config
    _remember(
        {
            "live_replacement": state.how().replacement,
            "live_seed": state.how().seed,
            "live_renormalize": state.how().renormalize,
            "live_positions": positions_text(state.how()),
        }
    )
    kinds: list[str] = [kind for kind in REPLACEMENTS if has_mean or kind != "mean"]
    take: dict[str, Any] = {"on_change": _take_how, "args": (config,)}
    st.selectbox(
        "what is off injects", kinds, key="live_replacement", format_func=REPLACEMENT_LABELS.__getitem__, **take
    )
    if state.how().replacement == "random":
        st.number_input("seed of the direction", 0, 9999, key="live_seed", **take)
    st.checkbox("spread its weight over the other banks and null", key="live_renormalize", **take)
    st.text_input(f"at positions (the marked one is {at})", key="live_positions", placeholder="everywhere", **take)
    st.divider()
    _rule(config)
    st.divider()
    _swap(engine, token_ids, at)


def _remember(values: dict[str, Any]) -> None:
    """Gives widgets the values that the state has, whatever they showed before."""
    for key, value in values.items():
        if st.session_state.get(key) != value:
            st.session_state[key] = value


def positions_text(kind: Off) -> str:
    """The positions of a switch as a person writes them: "0,4-6"; empty for everywhere."""
    return "" if kind.positions is None else kind.text().split("@")[1]


def _take_how(config: TideConfig) -> None:
    chosen = st.session_state
    positions = chosen["live_positions"].replace(" ", "")
    try:
        (where,) = Intervention.from_text("*" + (f"@{positions}" if positions else "")).offs
        Intervention((where,)).validate(config)
    except ValueError:
        st.toast(f"{positions[:40]!r} are no positions of a text; write 0,4-6.", icon=":material/error:")
        return
    kind = Off(
        replacement=chosen["live_replacement"],
        seed=int(chosen.get("live_seed") or 0),
        renormalize=chosen["live_renormalize"],
        positions=where.positions,
    )
    state.set_how(kind, config)


def _rule(config: TideConfig) -> None:
    """The router's rule, in all layers or in the chosen one."""
    rules = state.switches().rules
    rule = rules[-1] if rules else None
    _remember(
        {
            "live_rule": rule.kind if rule else "learned",
            "live_rule_bank": int(rule.value) if rule and rule.kind == "only" else 0,
            "live_temperature": float(rule.value) if rule and rule.kind == "temperature" else 1.0,
            "live_rule_layer": bool(rule and rule.layer is not None),
        }
    )
    take: dict[str, Any] = {"on_change": _take_rule}
    st.selectbox("weights come from", list(RULE_LABELS), key="live_rule", format_func=RULE_LABELS.__getitem__, **take)
    if rule and rule.kind == "only":
        st.number_input("bank", 0, config.num_memory_blocks - 1, key="live_rule_bank", **take)
    if rule and rule.kind == "temperature":
        st.number_input("temperature", 0.05, 20.0, step=0.25, key="live_temperature", **take)
    st.checkbox(f"in layer {selection().layer} only", key="live_rule_layer", **take)


def _take_rule() -> None:
    chosen = st.session_state
    kept = state.others(state.switches(), Rule)
    kind = chosen["live_rule"]
    if kind != "learned":
        value = {"only": chosen.get("live_rule_bank", 0), "temperature": chosen.get("live_temperature", 1.0)}
        layers = [selection().layer] if chosen["live_rule_layer"] else None
        kept |= Intervention.route(kind, value.get(kind, 0), layers)
    state.change(kept)


def _swap(engine: Engine, token_ids: tuple[int, ...], at: int) -> None:
    """The marked token reads the memory of the chosen one."""
    chosen = selection().token_id
    marked, reads = (engine.vocabulary.show(token) for token in (token_ids[at], chosen))
    _remember({"live_swap": any(s.token == token_ids[at] and s.reads == chosen for s in state.switches().swaps)})
    st.checkbox(
        f"the marked token ({marked}) reads the memory of the chosen token ({reads})",
        key="live_swap",
        on_change=_take_swap,
        args=(token_ids[at], chosen),
    )


def _take_swap(token: int, reads: int) -> None:
    kept = state.others(state.switches(), Swap)
    state.change(kept | Intervention.swap(token, reads) if st.session_state["live_swap"] else kept)
