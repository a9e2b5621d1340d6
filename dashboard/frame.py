"""The parts that every page is built from: header, captions, downloads, empty states."""

import html
import io
from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.state import current_source
from dashboard.trust import badge
from tide.cli import UserError
from tide.tokens import as_html, as_markdown, shorten

PLOT_CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}


def page_header(title: str, purpose: str) -> None:
    """Title, the badge in the corner, and the one sentence that says what a person learns on this page (Markdown)."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom", key="header"):
        st.title(title, anchor=False, width="content")
        badge(current_source().artifacts)
    st.markdown(purpose)


def show_figure(figure: go.Figure, key: str, alt: str) -> None:
    """Draws a figure that nobody clicks on.

    Args:
        figure: from `dashboard.figures`.
        key: stable over selections, so that the browser updates the plot instead of building a new one.
        alt: what the figure shows, for screen readers.
    """
    st.plotly_chart(figure, key=key, config=PLOT_CONFIG, alt=alt)


def figure_columns(spec: int | list[int], key: str) -> list[DeltaGenerator]:
    """Columns for figures and lists, which stand below one another where the window is narrow.

    Args:
        spec: number of columns, or their relative widths.
        key: names the row, once a page.
    """
    with st.container(key=f"figures_{key}"):  # style.css knows the prefix
        return st.columns(spec, gap="medium")


def how_to_read(text: str) -> None:
    """A closed panel that explains the page's marks and measures (Markdown)."""
    with st.expander("How to read this"):
        st.markdown(text)


def download_table(table: pd.DataFrame, name: str, label: str = "CSV") -> None:
    """A button that downloads a table as CSV; figures offer PNG in their own toolbar."""
    buffer = io.StringIO()
    table.to_csv(buffer, index=False)
    st.download_button(label, buffer.getvalue(), file_name=f"{name}.csv", mime="text/csv", icon=":material/download:")


def token_chip(shown: str, token_id: int, special: bool = False, width: int = 28) -> str:
    """HTML of a token: monospace, escaped, shortened in the middle; whole text and id on hover."""
    kind = "tide-chip tide-special" if special else "tide-chip"
    title = html.escape(f"{shown}   id {token_id}", quote=True)
    return f'<code class="{kind}" title="{title}">{as_html(shorten(shown, width))}</code>'


def token_markdown(shown: str) -> str:
    """A token inside a Markdown sentence."""
    return f"**{as_markdown(shorten(shown))}**"


def problem(error: Exception) -> None:
    """Shows an error to the person at the screen: one sentence, no traceback."""
    st.error(" ".join(str(error).split()), icon=":material/error:")


def guarded(render: Callable[[], None]) -> Callable[[], None]:
    """Turns a page's `UserError` (artifacts gone, checkpoint broken) into one sentence on the page."""

    def page() -> None:
        try:
            render()
        except UserError as error:
            problem(error)

    page.__name__ = render.__name__
    return page
