"""The frame of the dashboard: opens the artifacts, keeps the selection, shows the chosen page."""

from pathlib import Path

import streamlit as st

from dashboard import sidebar
from dashboard.frame import guarded, problem
from dashboard.pages import banks, collapse, live, overview, router
from dashboard.state import open_source, pop_notices, sync_url
from tide.cli import UserError

HERE = Path(__file__).parent
STYLE = (HERE / "style.css").read_text(encoding="utf-8")


def run(folders: list[Path]) -> None:
    """One run of the app for one session.

    Args:
        folders: artifact folders to choose from.
    """
    st.set_page_config(page_title="TIDE explorer", page_icon=str(HERE / "icon.png"), layout="wide")
    st.html(f"<style>{STYLE}</style>")
    pages = [
        st.Page(guarded(overview.render), title="Overview", default=True),
        st.Page(guarded(router.render), title="Router", url_path="router"),
        st.Page(guarded(banks.render), title="Banks", url_path="banks"),
        st.Page(guarded(collapse.render), title="Collapse", url_path="collapse"),
        st.Page(guarded(live.render), title="Live", url_path="live"),
    ]
    page = st.navigation(pages, position="top")
    try:
        folder = sidebar.choose_checkpoint(folders)
        source = open_source(folder)
    except UserError as error:
        problem(error)
        return
    st.session_state["source"] = source
    sync_url(source.space)
    sidebar.render(source)
    for notice in pop_notices():
        st.warning(notice, icon=":material/link_off:")
    page.run()
