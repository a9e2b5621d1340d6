"""Overview: what the model is, and what each page answers."""

from pathlib import Path

import streamlit as st

from dashboard.checkpoint import CheckpointFacts
from dashboard.figures import overview as figures
from dashboard.frame import figure_columns, how_to_read, page_header, problem, show_figure, token_markdown
from dashboard.numbers import byte_size, count
from dashboard.state import Source, current_source, selection
from tide.cli import UserError
from tide.tokens import as_markdown

CARD_WIDTH = 240  # pixels
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names
EXPLANATION = """
TIDE is a LLaMA decoder with **memory banks**. Each of the K banks is a table with one vector for every token id, looked
up once for the whole forward pass, from the token alone. In every layer a **router** reads the residual stream and
gives each bank a weight; the weighted sum, the **injection**, is added beside the feed-forward output. The **null**
bank is the zero vector: weight on it declines the memory.

The **memory** is never counted in a model's size: a "1B" model has a backbone of about one billion parameters, and its
memory may be several times that. A token touches K rows of it, so memory costs storage, hardly computation.

Layers and banks count from 0. The sidebar holds the one selection (token, layer, bank) that all pages share; the
address of the page restores it.
"""


@st.cache_data(show_spinner=False, max_entries=8)
def _facts(cache_key: str, checkpoint: Path) -> CheckpointFacts:
    return CheckpointFacts.read(checkpoint)


def render() -> None:
    """Draws the page."""
    source = current_source()
    page_header(
        "Overview",
        "A LLaMA-style transformer with memory banks: tables that hold a vector for every token id. In every layer a "
        "router mixes the banks, or declines through the null bank, and adds the mix to the residual stream.",
    )
    try:
        _model(source, _facts(source.cache_key, source.artifacts.checkpoint))
    except UserError as error:  # artifacts can be read where the checkpoint is not
        problem(error)
    st.markdown("#### What each page answers")
    _cards(source)
    how_to_read(EXPLANATION)


def _model(source: Source, facts: CheckpointFacts) -> None:
    left, right = figure_columns([2, 3], "overview")
    config, parts = facts.config, facts.parts.set_index("part")
    added = parts.loc[["memory", "router"]].sum()
    dtypes = ", ".join(_DTYPES.get(dtype, dtype) for dtype in facts.dtypes)
    lines = [
        f"checkpoint **{as_markdown(source.name)}**, stored as {dtypes}",
        f"**{config.num_memory_blocks}** memory banks (K), **{config.num_hidden_layers}** layers, "
        f"hidden size **{config.hidden_size:,}**, **{config.vocab_size:,}** token ids",
        f"backbone **{count(parts.loc['backbone', 'parameters'])}**; TIDE adds **{count(added['parameters'])}** "
        f"({byte_size(added['bytes'])}): {parts.loc['memory', 'parameters'] / parts.loc['backbone', 'parameters']:.1f} "
        "times the backbone in memory",
    ]
    if facts.trained_tokens:
        lines.append(f"trained on **{count(facts.trained_tokens)}** tokens")
    lines.append(f"tokens counted in {as_markdown(source.artifacts.count_corpus)}")
    if source.artifacts.base:
        lines.append(f"compared with the Base model **{as_markdown(source.artifacts.base.name)}**")
    left.markdown("\n".join(f"- {line}" for line in lines))
    with right:
        alt = "Parameters of backbone, embeddings, memory and router"
        show_figure(figures.parameter_bars(facts.parts), key="overview_parameters", alt=alt)


def _cards(source: Source) -> None:
    chosen = selection()
    token = token_markdown(source.shown(chosen.token_id))
    # The null bank is nothing that could be taken away.
    bank = "the memory" if chosen.bank == source.space.num_banks else f"bank {chosen.bank}"
    cards = (
        ("router", "Router", f"Which banks do the layers give {token}, and do rare tokens get more memory?", "routing"),
        ("banks", "Banks", f"What are the neighbours of {token} in the embedding, and in every bank?", "neighbors"),
        ("collapse", "Collapse", "Does TIDE keep words apart that the Base model lets fall together?", "collapse"),
        ("live", "Live", f"What does a prediction lose without {bank} in layer {chosen.layer}?", None),
    )
    with st.container(horizontal=True):
        for path, title, question, stage in cards:
            with st.container(border=True, width=CARD_WIDTH, height="stretch"):
                st.page_link(
                    _page(path, title), icon=":material/arrow_forward:", query_params=chosen.to_params(source.space)
                )
                st.markdown(question)
                if stage and not source.artifacts.has(stage):
                    st.caption("Not computed yet; the page says how.")


def _page(path: str, title: str) -> st.Page:
    """A handle on a page of the app; Streamlit knows pages by their URL path alone."""
    return st.Page(lambda: None, url_path=path, title=title)
