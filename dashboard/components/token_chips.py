"""The prompt's tokens as clickable chips on the Live page."""

from collections.abc import Callable
from pathlib import Path

import streamlit as st

_HERE = Path(__file__).parent
_component = st.components.v2.component(
    "tide_token_chips",
    html='<div class="chips" role="radiogroup" aria-label="target position"></div>',
    css=(_HERE / "token_chips.css").read_text(encoding="utf-8"),
    js=(_HERE / "token_chips.js").read_text(encoding="utf-8"),
)


def token_chips(tokens: list[dict], target: int, key: str, on_target: Callable[[int], None]) -> None:
    """Mounts the chips.

    Args:
        tokens: one {"id", "shown", "special"} a position.
        target: the position whose next token is predicted.
        key: of the component in the session state.
        on_target: called with the position that was clicked, before the next run.
    """

    def clicked() -> None:
        position = st.session_state[key].get("target")
        if position is not None:
            on_target(int(position))

    _component(key=key, data={"tokens": tokens, "target": target}, on_target_change=clicked)
