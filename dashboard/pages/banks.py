"""Banks: a token's neighbours in the input embedding and in every bank (table 6 and figure 13 of the paper)."""

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard.components.token_table import Column, Row, token_table
from dashboard.figures import banks as figures
from dashboard.frame import (
    download_table,
    figure_columns,
    guarded,
    how_to_read,
    page_header,
    show_figure,
    token_markdown,
)
from dashboard.numbers import probability
from dashboard.state import Source, current_source, select, selection
from dashboard.theme import bank_colors
from precompute import OVERLAP_K
from tide.tokens import shorten

LENGTHS = (10, 20, 50)  # neighbours shown a table
SUBTITLE_WIDTH = 12  # characters of the token above a column
_LENGTH, _STRETCH = "banks_length", "banks_stretch"
EMBEDDING = "embedding"
EXPLANATION = f"""
Every column lists the tokens whose vectors point most nearly in the same direction as this token's: by cosine, in the
input **embedding** or in one memory **bank**. A bank's vector is M_k(v), what the model reads, after RMSNorm and its
gain. The token itself is left out.

A neighbour that stands in several columns has the same **tint** in all of them; hovering lights it everywhere, a
click makes it the token. **Jaccard@{OVERLAP_K}** is the number of shared tokens among the first {OVERLAP_K} of two
lists, over the number of different ones: 1 when the lists are the same, 0 when they share nothing.

**Weight** is the mean routing weight that the layers give the bank where this token occurs in the measured text.
"""


@st.cache_data(show_spinner=False, max_entries=8)
def _overlap_by_decile(cache_key: str, _source: Source) -> pd.DataFrame:
    return _source.artifacts.overlap_by_decile()


def render() -> None:
    """Draws the page."""
    source, chosen = current_source(), selection()
    shown = source.shown(chosen.token_id)
    page_header("Banks", "What does each bank take this token for? Its nearest tokens in every table.")
    overlap = _matrix(source, chosen.token_id)[0, 1:]
    left, right = figure_columns([2, 1], "banks_head")
    left.markdown(_summary(shown, overlap))
    with right:
        length = st.segmented_control(
            "neighbours",
            LENGTHS,
            default=LENGTHS[0],
            key=_LENGTH,
            required=True,
            persist_state="session",
        )
    tokens = (chosen.token_id, *(token for token in chosen.pinned if token != chosen.token_id))
    columns = neighbor_columns(source, tokens, chosen.layer, chosen.bank, min(length, source.space.vocab_size - 1))
    token_table(
        columns,
        key="banks_neighbors",
        on_pick=lambda token_id: select(token_id=token_id),
        label=f"Neighbours of {shown} in every table",
    )
    if len(tokens) == 1:
        st.caption("Pin a token in the sidebar to see its neighbours beside these.")

    left, right = figure_columns(2, "banks")
    with left:
        place = st.container()  # the figure stands above the switch that changes it
        stretch = st.toggle(
            "stretch colours", key=_STRETCH, persist_state="session", help="From smallest to largest overlap, not 0..1."
        )
        figure = figures.overlap_matrix(_matrix(source, chosen.token_id), shown, chosen.bank, OVERLAP_K, stretch)
        with place:
            alt = f"Overlap of the neighbours of {shown} between every two tables"
            show_figure(figure, key="banks_matrix", alt=alt)
    with right:
        guarded(_deciles)()  # a stage of its own, without which the rest of the page stands
    how_to_read(EXPLANATION)
    download_table(_table(source, columns), f"neighbours-token-{chosen.token_id}", "Neighbours, CSV")


def _matrix(source: Source, token_id: int) -> np.ndarray:
    """Overlap of a token's neighbours between every two tables: [K+1, K+1], the embedding first."""
    return source.artifacts.overlap_matrix(token_id, k=min(OVERLAP_K, source.space.vocab_size - 1))


def _deciles() -> None:
    """The figure of all tokens by decile."""
    source = current_source()
    table = _overlap_by_decile(source.cache_key, source)
    figure = figures.overlap_by_decile(table, source.space.num_banks, selection().bank)
    show_figure(figure, key="banks_deciles", alt="Overlap with the embedding by frequency decile, for every bank")


def neighbor_columns(source: Source, tokens: tuple[int, ...], layer: int, bank: int, length: int) -> list[Column]:
    """One column a table, and within a table one a token: the chosen one, then the pinned ones.

    Args:
        source: the artifacts.
        tokens: the chosen token and those to compare with it.
        layer: the chosen layer, whose weights the headers name.
        bank: the chosen bank, K for null.
        length: neighbours a column.
    """
    num_banks = source.space.num_banks
    colors = bank_colors(num_banks)
    notes = {token: _notes(source, token, layer) for token in tokens}
    columns = []
    for table in (EMBEDDING, *range(num_banks)):
        for i, token in enumerate(tokens):
            ids, cosines = source.artifacts.neighbors(token, table, k=length)
            rows = [_row(source, int(other), float(cosine)) for other, cosine in zip(ids, cosines, strict=True)]
            columns.append(
                Column(
                    title=EMBEDDING if table == EMBEDDING else f"bank {table}",
                    rows=rows,
                    value_names=("cos",),
                    subtitle=f"of {shorten(source.shown(token), SUBTITLE_WIDTH)}" if len(tokens) > 1 else "",
                    notes=notes[token][0 if table == EMBEDDING else 1 + int(table)],
                    color="" if table == EMBEDDING else colors[int(table)],
                    chosen=table == bank and i == 0,
                    joined=i > 0,
                )
            )
    return columns


def _notes(source: Source, token: int, layer: int) -> list[tuple[str, ...]]:
    """Header lines of every table for one token, the embedding's first."""
    overlap = _matrix(source, token)[0, 1:]
    weights = np.full((source.space.num_layers, source.space.num_banks + 1), np.nan)
    if source.artifacts.has("routing"):
        weights = source.artifacts.routing(token)[0]
    mean = weights.mean(axis=0)
    lines: list[tuple[str, ...]] = [("input table", "\u00a0", "\u00a0")]
    lines += [
        (
            f"overlap {probability(overlap[k])}",
            f"mean weight {probability(mean[k])}",
            f"in layer {layer} {probability(weights[layer, k])}",
        )
        for k in range(source.space.num_banks)
    ]
    return lines


def _row(source: Source, token_id: int, cosine: float) -> Row:
    artifacts = source.artifacts
    return Row(
        token_id,
        source.shown(token_id),
        (probability(cosine),),
        special=token_id in artifacts.special_ids,
        detail=f"cosine {probability(cosine)}, seen {artifacts.counts[token_id]:,} times",
    )


def _summary(shown: str, overlap: np.ndarray) -> str:
    """The page's answer in one sentence, from the numbers (Markdown)."""
    if not len(overlap):
        return f"{token_markdown(shown)}: this Base model has no banks, only the input embedding."
    most, least = int(overlap.argmax()), int(overlap.argmin())
    mean = probability(float(overlap.mean()))
    text = f"{token_markdown(shown)}: mean overlap of its neighbours in the banks with those in the embedding {mean}"
    text += f" (Jaccard@{OVERLAP_K})"
    if overlap[most] > overlap[least]:
        text += f": most bank {most} ({probability(overlap[most])}), least bank {least} ({probability(overlap[least])})"
    return text + "."


def _table(source: Source, columns: list[Column]) -> pd.DataFrame:
    """The neighbour lists as they stand on the page, one row a neighbour."""
    rows: list[dict[str, Any]] = [
        {"table": column.title, "of": column.subtitle, "rank": rank, "token_id": row.token_id, "token": row.shown}
        | {"cosine": row.values[0]}
        for column in columns
        for rank, row in enumerate(column.rows, start=1)
    ]
    return pd.DataFrame(rows)
