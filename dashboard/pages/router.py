"""Router: where the layers send a token (figure 10 of the paper, for every layer and every token)."""

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard.components.token_table import Column, Row, token_table
from dashboard.figures import router as figures
from dashboard.figures.marks import half_width_95
from dashboard.frame import (
    PLOT_CONFIG,
    download_table,
    figure_columns,
    how_to_read,
    page_header,
    show_figure,
    token_markdown,
)
from dashboard.numbers import probability
from dashboard.selection import NULL_NAME, Selection, bank_name
from dashboard.state import Source, current_source, select, selection
from tide.frequency import GROUPS

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
    shown = source.shown(chosen.token_id)
    means, sds, counts = _by_decile(source.cache_key, source)
    top = st.container()  # the answer stands above the controls that change it
    where = _where(chosen, source.space.num_banks)
    n_min, stretch = _settings(where)
    null = (means[:, chosen.layer, -1], sds[:, chosen.layer, -1], counts)
    with top:
        st.markdown(summary(shown, chosen.layer, mean[chosen.layer], n, null, n_min))
        left, right = figure_columns([3, 2], "router")
    with left:
        heatmap = figures.routing_heatmap(mean, sd, n, shown, chosen.layer, chosen.bank, n_min, stretch)
        _clickable(heatmap, alt=f"Mean routing weights of the token {shown}, layers by banks")
    with right:
        decile = int(source.artifacts.bins[chosen.token_id])
        own = figures.TokenWeight(shown, decile, float(mean[chosen.layer, -1]), float(sd[chosen.layer, -1]), n)
        figure = figures.null_by_decile(means[:, :, -1], sds[:, :, -1], counts, chosen.layer, own, n_min, stretch)
        show_figure(figure, key="router_null", alt=f"Null weight by frequency decile, layer {chosen.layer}")
    _lists(source, chosen, where, n_min)
    of_layer = (means[:, chosen.layer], sds[:, chosen.layer], counts)
    figure = figures.weights_by_decile(*of_layer, chosen.layer, chosen.bank, n_min, stretch)
    show_figure(figure, key="router_deciles", alt=f"Weight of every bank by decile, layer {chosen.layer}")
    how_to_read(EXPLANATION)
    download_table(_routing_table(mean, sd, n), f"routing-token-{chosen.token_id}", "Routing of this token, CSV")


def summary(
    shown: str,
    layer: int,
    weights: np.ndarray,
    n: int,
    null: tuple[np.ndarray, np.ndarray, np.ndarray],
    n_min: int = N_MIN,
) -> str:
    """What the numbers say, in one or two sentences (Markdown).

    Args:
        shown: the chosen token.
        layer: the chosen layer.
        weights: the token's mean routing weights there, [K+1], null last.
        n: its occurrences.
        null: mean, sd and n (positions) of the null weight in the layer, by decile, each [10].
        n_min: nothing is said of a token that occurs less often.
    """
    sentences = []
    if n >= n_min:
        most = int(weights.argmax())
        name = NULL_NAME if most == len(weights) - 1 else f"bank {most}"
        rest = "" if name == NULL_NAME else f", null gets {probability(weights[-1])}"
        sentences.append(
            f"Layer {layer} gives {token_markdown(shown)} most to **{name}** ({probability(weights[most])}){rest}."
        )
    groups = ([*GROUPS["rare"]], [*GROUPS["common"]])
    rare, common = (_pooled(*(column[group] for column in null)) for group in groups)
    difference, interval = common[0] - rare[0], float(np.hypot(rare[1], common[1]))
    if np.isfinite(interval):
        verdict = "as much as" if abs(difference) <= interval else "more than" if difference > 0 else "less than"
        sentences.append(
            f"Of all rare tokens (deciles 0–2) null gets {probability(rare[0])}, of common ones (7–9) "
            f"{probability(common[0])}: rare tokens take **{verdict}** common ones from the memory in this layer."
        )
    return " ".join(sentences)


def _pooled(mean: np.ndarray, sd: np.ndarray, n: np.ndarray) -> tuple[float, float]:
    """Mean over several groups of positions, and half its 95 % interval; NaN where they have fewer than two."""
    total = n.sum()
    if total < 2:
        return float("nan"), float("nan")
    mean, sd = (np.where(n > 0, np.nan_to_num(values), 0).astype(float) for values in (mean, sd))
    pooled = float((n * mean).sum() / total)
    variance = ((n - 1).clip(0) * sd**2 + n * (mean - pooled) ** 2).sum() / (total - 1)
    return pooled, float(half_width_95(np.sqrt(variance), total))


def _where(chosen: Selection, num_banks: int) -> str:
    bank = bank_name(chosen.bank, num_banks)
    return f"layer {chosen.layer}, {bank if bank == NULL_NAME else f'bank {bank}'}"


def _settings(where: str) -> tuple[int, bool]:
    """What the page lets a person change, beside the heading of the lists: n_min and the stretch of scales."""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        heading = f"**Tokens that ({where}) takes most and least**, among those seen at least n min times"
        st.markdown(heading, width="content")
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


def _lists(source: Source, chosen: Selection, where: str, n_min: int) -> None:
    for column, word, largest in zip(figure_columns(2, "router_lists"), ("most", "least"), (True, False), strict=True):
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
                on_pick=lambda token_id: select(token_id=token_id),
                label=f"Tokens that {where} takes {word}",
                width=28,
            )


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
