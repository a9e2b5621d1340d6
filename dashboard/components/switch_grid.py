"""The grid of switches layer x bank on the Live page."""

from collections.abc import Callable, Iterable
from pathlib import Path

import streamlit as st

_HERE = Path(__file__).parent
_component = st.components.v2.component(
    "tide_switch_grid",
    html='<div class="scroll"><table></table></div><p class="legend"></p>',
    css=(_HERE / "switch_grid.css").read_text(encoding="utf-8"),
    js=(_HERE / "switch_grid.js").read_text(encoding="utf-8"),
)

Pairs = frozenset[tuple[int, int]]


def switch_grid(num_layers: int, num_banks: int, off: Iterable[tuple[int, int]], key: str, on_change: Callable) -> None:
    """Mounts the grid: one button a (layer, bank), whole rows and columns in one click.

    Args:
        num_layers: L; layer 0 is drawn at the bottom.
        num_banks: K.
        off: (layer, bank) pairs that are off.
        key: of the component in the session state.
        on_change: called with the new frozenset of pairs before the next run.
    """
    state = st.session_state.get(key) or {}
    turn = (state.get("switches") or {}).get("turn", 0)

    def changed() -> None:
        switches = st.session_state[key].get("switches")
        if switches is not None:
            on_change(frozenset((int(layer), int(bank)) for layer, bank in switches["off"]))

    data = {"layers": num_layers, "banks": num_banks, "off": sorted(off), "turn": turn}
    _component(key=key, data=data, on_switches_change=changed)
