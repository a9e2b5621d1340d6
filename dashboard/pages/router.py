"""Router: where the layers send a token (figure 10 of the paper, for every layer and every token)."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard.components.token_table import Column, Row, token_table
from dashboard.figures import router as figures
from dashboard.frame import PLOT_CONFIG, download_table, how_to_read, page_header, show_figure
from dashboard.numbers import probability
from dashboard.selection import Selection, bank_name
from dashboard.state import Source, current_source, select, selection

N_MIN = 5  # occurrences below which a mean is not shown as one; a person can change it on the page
TOP = 10  # tokens in each of the lists of most and least
_MAP, _N_MIN, _STRETCH = "router_map", "router_n_min", "router_stretch"
EXPLANATION = """
In every layer a softmax router splits a weight of 1 over banks 0..K−1 and the **null** bank, which is the zero vector:
weight on null is memory declined. Banks and layers count from 0; layer 0, at the bottom, reads the embedding.

**Means** are over the places where the token occurs in the text whose routing was measured; **n** is their number and
**sd** their spread. Whiskers are 95 % intervals of the mean, 1.96 sd / √n. A mean over fewer than **n min** places is
hatched or left out.

**Frequency deciles** sort the token types that occur in the count corpus into ten groups of equal size. Types that are
blank or have no letter or digit have none.

Click a cell of the map to choose that layer and bank, and a token in a list to choose the token.
"""


@st.cache_data(show_spinner=False, max_entries=256)
def _top_tokens(cache_key: str, _source: Source, layer: int, bank: int, n_min: int, largest: bool) -> pd.DataFrame:
    return _source.artifacts.top_tokens(layer, bank, k=TOP, n_min=n_min, largest=largest)


@st.cache_data(show_spinner=False, max_entries=8)
def _by_decile(cache_key: str, _source: Source) -> Any:
    return _source.artifacts.routing_by_decile()


def render() -> None:
    """Draws the page."""
    page_header("Router", "Which banks does each layer give this token, and does a rare token get more memory?")
    source, chosen = current_source(), selection()
    mean, sd, n = source.artifacts.routing(chosen.token_id)
    deciles = _by_decile(source.cache_key, source)
    shown = source.shown(chosen.token_id)

    n_min, stretch = _settings()
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _clickable(
            figures.routing_heatmap(mean, sd, n, shown, chosen.layer, chosen.bank, n_min, stretch),
            alt=f"Mean routing weights of the token {shown}, layers by banks",
        )
    with right:
        null_mean, null_sd = (table[:, :, -1] for table in deciles[:2])
        figure = figures.null_by_decile(
            null_mean,
            null_sd,
            deciles[2],
            chosen.layer,
            shown,
            int(source.artifacts.bins[chosen.token_id]),
            float(mean[chosen.layer, -1]),
            float(sd[chosen.layer, -1]),
            n,
            n_min,
            stretch,
        )
        show_figure(figure, key="router_null", alt=f"Null weight by frequency decile, layer {chosen.layer}")
    _lists(source, chosen, n_min)
    by_decile = figures.weights_by_decile(
        deciles[0][:, chosen.layer], deciles[1][:, chosen.layer], deciles[2], chosen.layer, chosen.bank, n_min, stretch
    )
    show_figure(by_decile, key="router_deciles", alt=f"Weight of every bank by decile, layer {chosen.layer}")
    how_to_read(EXPLANATION)
    download_table(_routing_table(mean, sd, n), f"routing-token-{chosen.token_id}", "Routing of this token, CSV")


def _settings() -> tuple[int, bool]:
    """What the page lets a person change: n_min and the stretch of scales."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        n_min = st.number_input(
            "n min",
            min_value=1,
            value=N_MIN,
            step=1,
            key=_N_MIN,
            width=140,
            persist_state="session",
            help="A mean over fewer occurrences is hatched in the map and left out of lists and curves.",
        )
        stretch = st.toggle(
            "stretch scales",
            key=_STRETCH,
            persist_state="session",
            help="From the smallest to the largest value, not 0..1.",
        )
    return int(n_min), stretch


def _clickable(figure: Any, alt: str) -> None:
    """The map, whose transparent squares choose a layer and a bank."""

    def clicked() -> None:
        points = st.session_state[_MAP]["selection"]["points"]
        if points:
            layer, *_, bank = points[0]["customdata"]
            select(layer=int(layer), bank=int(bank))

    st.plotly_chart(figure, key=_MAP, on_select=clicked, selection_mode="points", config=PLOT_CONFIG, alt=alt)


def _lists(source: Source, chosen: Selection, n_min: int) -> None:
    bank = bank_name(chosen.bank, source.space.num_banks)
    where = f"layer {chosen.layer}, bank {bank}" if bank != "null" else f"layer {chosen.layer}, null"
    st.markdown(f"**Which tokens ({where}) takes most and least**, among those seen at least {n_min} times")
    for column, word, largest in zip(st.columns(2, gap="medium"), ("most", "least"), (True, False), strict=True):
        table = _top_tokens(source.cache_key, source, chosen.layer, chosen.bank, n_min, largest)
        rows = [
            Row(
                int(row.token_id),
                source.shown(row.token_id),
                (probability(row.mean), probability(row.sd), f"{row.n:,}", str(row.decile) if row.decile >= 0 else "–"),
                special=row.token_id in source.artifacts.special_ids,
            )
            for row in table.itertuples()
        ]
        names = ("weight", "sd", "n", "decile")
        empty = f"No token was seen {n_min} times; lower n min or measure more text."
        with column:
            token_table(
                [Column(f"({where}) takes {word}", rows, names, empty=empty)],
                key=f"router_{word}",
                on_pick=_choose,
                label=f"Tokens that {where} takes {word}",
                width=28,
            )


def _choose(token_id: int) -> None:
    select(token_id=token_id)


def _routing_table(mean: Any, sd: Any, n: int) -> pd.DataFrame:
    layers, columns = mean.shape
    return pd.DataFrame(
        {
            "layer": [layer for layer in range(layers) for _ in range(columns)],
            "bank": [bank_name(bank, columns - 1) for bank in range(columns)] * layers,
            "mean": mean.reshape(-1),
            "sd": sd.reshape(-1),
            "n": n,
        }
    )
