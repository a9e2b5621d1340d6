"""The sidebar: the one place where checkpoint, token, layer and bank are chosen."""

from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.components.token_picker import token_picker
from dashboard.frame import token_chip
from dashboard.selection import bank_name
from dashboard.state import Source, pin, select, selection, unpin

_LAYER, _BANK = "sidebar_layer", "sidebar_bank"


def choose_checkpoint(folders: list[Path]) -> Path:
    """Lets a person choose among the artifact folders that the command line named; kept in the URL."""
    if len(folders) == 1:
        return folders[0]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    with st.sidebar:
        name = st.selectbox("artifacts", names, key="artifacts", bind="query-params")
    return folders[names.index(name)]


def render(source: Source) -> None:
    """Draws the selection and changes it."""
    with st.sidebar:
        st.markdown(f"checkpoint **{source.name}**")
        _picker(source)
        _token(source)
        _layer_and_bank(source)
        _pins(source)


@st.fragment
def _picker(source: Source) -> None:
    """A fragment, so that a keystroke reruns the search and nothing else."""

    def find(query: str) -> list[dict[str, Any]]:
        hits = source.search.search(query)
        return [{"id": hit.token_id, "shown": source.shown(hit.token_id), "note": _note(source, hit)} for hit in hits]

    def on_pick(token_id: int) -> None:
        select(token_id=token_id)
        st.session_state["picked"] = True

    token_picker(find, on_pick, key="token_picker")
    if st.session_state.pop("picked", False):
        st.rerun()


def _note(source: Source, hit: Any) -> str:
    return f"{source.artifacts.counts[hit.token_id]:,} · {decile_name(source, hit.token_id)}"


def decile_name(source: Source, token_id: int) -> str:
    """Says "decile 9" or "no decile"; appendix B gives none to unseen, blank and punctuation tokens."""
    decile = int(source.artifacts.bins[token_id])
    return f"decile {decile}" if decile >= 0 else "no decile"


def _token(source: Source) -> None:
    token_id = selection().token_id
    chip = token_chip(source.shown(token_id), token_id, special=token_id in source.artifacts.special_ids)
    count = source.artifacts.counts[token_id]
    left, right = st.columns([3, 1], vertical_alignment="center")
    left.html(
        f'{chip} <span class="tide-note">id {token_id} · {decile_name(source, token_id)} · seen {count:,} times</span>'
    )
    right.button(
        "pin",
        key="pin_token",
        type="tertiary",
        help="Keep this token for comparison",
        on_click=pin,
        args=(token_id,),
        disabled=token_id in selection().pinned,
    )


def _layer_and_bank(source: Source) -> None:
    space = source.space
    st.session_state[_LAYER] = selection().layer
    st.session_state[_BANK] = selection().bank
    # A click on the chosen one would empty the control; then the selection stays as it is.
    st.segmented_control(
        "layer",
        range(space.num_layers),
        key=_LAYER,
        on_change=lambda: _take(layer=st.session_state[_LAYER]),
        help="0 reads the embedding; the stream rises with the number.",
    )
    st.segmented_control(
        "bank",
        range(space.num_banks + 1),
        key=_BANK,
        format_func=lambda bank: bank_name(bank, space.num_banks),
        on_change=lambda: _take(bank=st.session_state[_BANK]),
        help="0-based. The null bank is the zero vector: weight on it is memory declined.",
    )


def _take(**change: int | None) -> None:
    select(**{name: value for name, value in change.items() if value is not None})


def _pins(source: Source) -> None:
    for token_id in selection().pinned:
        left, right = st.columns([3, 1], vertical_alignment="center")
        left.html(f"pinned {token_chip(source.shown(token_id), token_id)}")
        right.button(
            "unpin",
            key=f"unpin_{token_id}",
            type="tertiary",
            on_click=unpin,
            args=(token_id,),
        )
