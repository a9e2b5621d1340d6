"""The token picker of the sidebar: an input whose hits come from the server while a person types."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

_HERE = Path(__file__).parent
_HTML = """
<label>token
  <input type="text" autocomplete="off" spellcheck="false" role="combobox" aria-controls="hits"
         placeholder="text, or # and an id   ( / )">
</label>
<ul id="hits" role="listbox"></ul>
"""
_component = st.components.v2.component(
    "tide_token_picker",
    html=_HTML,
    css=(_HERE / "token_picker.css").read_text(encoding="utf-8"),
    js=(_HERE / "token_picker.js").read_text(encoding="utf-8"),
)


def token_picker(find: Callable[[str], list[dict[str, Any]]], on_pick: Callable[[int], None], key: str) -> None:
    """Mounts the picker.

    Args:
        find: hits for a query, each {"id", "shown", "note"}; all plain text.
        on_pick: called with the token id that the person chose, before the next run.
        key: of the component in the session state.
    """
    state = st.session_state.get(key) or {}
    query = state.get("query") or ""

    def picked() -> None:
        token_id = st.session_state[key].get("pick")
        if token_id is not None:
            on_pick(int(token_id))

    _component(
        key=key,
        data={"query": query, "hits": find(query)},
        on_query_change=lambda: None,
        on_pick_change=picked,
    )
