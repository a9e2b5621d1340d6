"""What a page may ask for: the artifacts, the selection, and how to change it."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import streamlit as st

from dashboard.search import TokenSearch
from dashboard.selection import PARAMETERS, Selection, Space, default_token
from precompute import Artifacts

_SELECTION, _SPACE, _WRITTEN, _NOTICES = "selection", "space", "url_params_written", "notices"


@dataclass(frozen=True)
class Source:
    """One artifact folder, opened once for all sessions.

    Attributes:
        artifacts: the reader.
        search: token search over its vocabulary.
        space: what there is to select.
    """

    artifacts: Artifacts
    search: TokenSearch
    space: Space

    @property
    def name(self) -> str:
        """Name of the checkpoint, as the sidebar shows it."""
        return self.artifacts.checkpoint.name

    @cached_property
    def cache_key(self) -> str:
        """Names the folder and its very content, for `st.cache_data`: artifacts that were made anew are others."""
        return f"{self.artifacts.folder.resolve()} {json.dumps(self.artifacts.manifest, sort_keys=True)}"

    def shown(self, token_id: int) -> str:
        """Visible form of a token: plain text, to be escaped where it goes into markup."""
        return self.artifacts.shown[token_id]


@st.cache_resource(show_spinner="Opening artifacts …")
def open_source(folder: Path) -> Source:
    """Opens an artifact folder; raises `ArtifactError` with one sentence."""
    artifacts = Artifacts.open(folder)
    space = Space(
        vocab_size=artifacts.vocab_size,
        num_layers=artifacts.num_layers,
        num_banks=artifacts.num_banks,
        default_token=default_token(artifacts.texts, artifacts.counts),
    )
    return Source(artifacts, TokenSearch(artifacts.texts, artifacts.counts), space)


def selection() -> Selection:
    """The selection of this session."""
    return st.session_state[_SELECTION]


def select(**changes: int | tuple[int, ...]) -> None:
    """Changes the selection. In a callback the pages then run with the new one; elsewhere call `st.rerun()` next."""
    st.session_state[_SELECTION] = selection().change(**changes)


def pin(token_id: int) -> None:
    """Keeps a token for comparison, once."""
    select(pinned=tuple(dict.fromkeys((*selection().pinned, token_id))))


def unpin(token_id: int) -> None:
    """Lets a pinned token go."""
    select(pinned=tuple(t for t in selection().pinned if t != token_id))


def sync_url(space: Space) -> None:
    """Makes the selection and the URL agree; run once at the top of every run of the app.

    A URL that this session did not write is somebody's link or the browser's back button: it wins. Otherwise the
    selection is written into the URL. Parameters of other owners (a page's own state) are left alone. When another
    checkpoint is chosen, what it does not have falls back to its default.
    """
    in_url = {key: st.query_params[key] for key in PARAMETERS if key in st.query_params}
    state = st.session_state
    if _SELECTION not in state or (in_url and in_url != state.get(_WRITTEN)):
        state[_SELECTION], state[_NOTICES] = Selection.from_params(in_url, space)
    elif state[_SPACE] != space:
        state[_SELECTION], _ = Selection.from_params(selection().to_params(state[_SPACE]), space)
    params = selection().to_params(space)
    for key in PARAMETERS:
        if key not in params:
            st.query_params.pop(key, None)
        elif params[key] != in_url.get(key):
            st.query_params[key] = params[key]
    state[_WRITTEN], state[_SPACE] = params, space


def pop_notices() -> list[str]:
    """Sentences about a link that could not be followed as it stands; each is returned once."""
    return st.session_state.pop(_NOTICES, [])


def current_source() -> Source:
    """The artifacts that this run of the app looks at."""
    return st.session_state["source"]
