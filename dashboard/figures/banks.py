"""Figures of the Banks page (figure 13 of the paper)."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.marks import (
    DECILE_AXIS,
    GRID_COLOR,
    half_width_95,
    legend_beside,
    note,
    number_ticks,
    rectangle,
    sparse,
    token_label,
)
from dashboard.theme import CHOSEN_COLOR, WEIGHT_SCALE, bank_colors, finish

HEIGHT = 400  # pixels
MOST_TICKS = 16  # tables that an axis can name
MIN_TOKENS = 5  # deciles with fewer tokens are left out: their mean says nothing


def overlap_matrix(overlap: np.ndarray, shown: str, bank: int, neighbors: int, stretch: bool = False) -> go.Figure:
    """Overlap of a token's neighbour lists, every table with every other.

    Args:
        overlap: Jaccard overlaps [K+1, K+1], the input embedding first.
        shown: the token.
        bank: the chosen bank, outlined where it meets the embedding; K (null, which has no table) outlines nothing.
        neighbors: length of the lists compared.
        stretch: colour from the smallest to the largest overlap instead of 0..1.
    """
    size = len(overlap)
    values = np.array(overlap, dtype=float)
    np.fill_diagonal(values, np.nan)  # a list with itself: always 1
    names = ["the embedding", *(f"bank {k}" for k in range(size - 1))]
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if stretch and len(finite) else (0.0, 1.0)
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(size)),
            y=list(range(size)),
            zmin=low,
            zmax=high if high > low else low + 1,
            colorscale=WEIGHT_SCALE,
            colorbar={"title": {"text": f"Jaccard@{neighbors}", "side": "right"}, "thickness": 12, "outlinewidth": 0},
            customdata=[[[row, column] for column in names] for row in names],
            hovertemplate="%{customdata[0]} and %{customdata[1]}"
            f"<br>overlap %{{z:.3f}} of {neighbors} neighbours each<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
        )
    )
    chosen = bank + 1 if bank + 1 < size else None
    tables = ["emb.", *map(str, range(size - 1))]
    shown_ticks = sparse(size, chosen, MOST_TICKS)
    ticks = {
        "tickmode": "array",
        "tickangle": 0,
        "tickvals": shown_ticks,
        "ticktext": [f"<b>{tables[i]}</b>" if i == chosen else tables[i] for i in shown_ticks],
    }
    figure.update_xaxes(title="table (emb.: input embedding)", showgrid=False, zeroline=False, **ticks)
    figure.update_yaxes(title="table", showgrid=False, zeroline=False, **ticks)
    if bank + 1 < size:
        figure.update_layout(shapes=[rectangle(bank + 1, 0, CHOSEN_COLOR), rectangle(0, bank + 1, CHOSEN_COLOR)])
    return finish(figure, f"shared neighbours of {token_label(shown)}, table by table", HEIGHT)


def overlap_by_decile(table: pd.DataFrame, num_banks: int, bank: int) -> go.Figure:
    """Mean overlap with the input embedding by frequency decile, a line a bank (figure 13).

    Args:
        table: columns decile, bank, mean, sd, n (tokens).
        num_banks: K.
        bank: the chosen bank, bold with its interval; K (null) stresses none.
    """
    colors = bank_colors(num_banks)
    figure = go.Figure()
    table = table[table["n"] >= MIN_TOKENS]
    for k in range(num_banks):
        rows = table[table["bank"] == k].sort_values("decile")
        chosen = k == bank
        figure.add_scatter(
            x=rows["decile"],
            y=rows["mean"],
            mode="lines+markers" if chosen else "lines",
            line={"color": colors[k], "width": 4 if chosen else 1.5},
            marker={"size": 8},
            error_y={"type": "data", "array": half_width_95(rows["sd"], rows["n"]), "visible": chosen, "width": 4},
            legendrank=1 if chosen else 1000,  # the first, also where the legend scrolls
            name=f"<b>bank {k}</b> (95 %)" if chosen else f"bank {k}",
            customdata=rows[["sd", "n"]].to_numpy(),
            hovertemplate=f"bank {k}<br>decile %{{x}}<br>mean overlap %{{y:.3f}}<br>sd %{{customdata[0]:.3f}}"
            "<br>n = %{customdata[1]:,} tokens<extra></extra>",
        )
    figure.update_xaxes(title=DECILE_AXIS, showgrid=False, range=[-0.4, 9.4], **number_ticks(10))
    figure.update_yaxes(title="mean Jaccard@10", gridcolor=GRID_COLOR, zeroline=False, rangemode="tozero")
    if table.empty:
        note(figure, f"no decile has {MIN_TOKENS} tokens")
    return legend_beside(finish(figure, "overlap with the embedding by decile, all tokens", HEIGHT))
