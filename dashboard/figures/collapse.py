"""Figures of the Collapse page (figures 2 and 6 of the paper)."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.marks import GRID_COLOR, half_width_95, legend_above, note, sparse
from dashboard.theme import BASE_COLOR, CHOSEN_COLOR, TIDE_COLOR, finish

METRIC_NAMES = {
    "l2": "L2 distance",
    "normalized_l2": "L2 of unit vectors (0 to 2)",
    "cosine_distance": "1 − cosine (0 to 2)",
}
METRIC_TITLES = {"l2": "L2 distance", "normalized_l2": "normalised L2 distance", "cosine_distance": "cosine distance"}
MOST_TICKS = 14  # layers that a narrow axis can name
HEIGHT = 330  # pixels
_STYLES = {
    "base": ("Base", BASE_COLOR, "dash", "rgba(91, 107, 123, 0.20)"),
    "tide": ("TIDE", TIDE_COLOR, "solid", "rgba(11, 110, 153, 0.20)"),
}


def distance_by_layer(table: pd.DataFrame, metric: str, layer: int, n_min: int) -> go.Figure:
    """Mean distance between the two words of a pair, by layer: Base dashed, TIDE solid, 95 % intervals as bands.

    Args:
        table: columns model, layer, metric, mean, sd, n; layer 0 is the embedding, l the stream after layer l-1.
        metric: one of `METRIC_NAMES`.
        layer: the chosen decoder layer, marked by a line.
        n_min: means of fewer measurements are left out.
    """
    figure = go.Figure()
    rows = table[(table["metric"] == metric) & (table["n"] >= n_min)]
    for model, (name, color, dash, band) in _STYLES.items():
        part = rows[rows["model"] == model].sort_values("layer")
        half = half_width_95(part["sd"], part["n"])
        if np.isfinite(half).all() and len(part):
            outline = {"x": [*part["layer"], *part["layer"][::-1]], "fill": "toself", "fillcolor": band}
            edge = [*(part["mean"] + half), *(part["mean"] - half)[::-1]]
            hidden = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(y=edge, legendgroup=model, **outline, **hidden)
        figure.add_scatter(
            x=part["layer"],
            y=part["mean"],
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2.5},
            marker={"size": 6},
            name=f"{name} (95 %)",
            legendgroup=model,
            customdata=np.stack([part["sd"], part["n"], half], axis=-1) if len(part) else None,
            hovertemplate=f"{name}, %{{x}}<br>mean %{{y:.3g}} ± %{{customdata[2]:.2g}} (95 %)"
            "<br>sd %{customdata[0]:.3g}<br>n = %{customdata[1]:,}<extra></extra>",
        )
    _layer_axis(figure, table, layer)
    figure.update_yaxes(title=METRIC_NAMES[metric], gridcolor=GRID_COLOR, zeroline=False, rangemode="tozero")
    if rows.empty:
        note(figure, f"fewer than {n_min} measurements")
    return legend_above(finish(figure, METRIC_TITLES[metric], HEIGHT))


def difference_by_layer(difference: pd.DataFrame, metric: str, layer: int, n_min: int) -> go.Figure:
    """TIDE minus Base by layer with its 95 % interval; above zero the words are further apart in TIDE.

    Args:
        difference: from `difference_table`.
        metric: one of `METRIC_NAMES`.
        layer: the chosen decoder layer, marked by a line.
        n_min: means of fewer measurements are left out.
    """
    rows = difference[(difference["metric"] == metric) & (difference["n"] >= n_min)].sort_values("layer")
    figure = go.Figure()
    figure.add_hline(y=0, line={"color": BASE_COLOR, "width": 1.5, "dash": "dash"})
    figure.add_scatter(
        x=rows["layer"],
        y=rows["difference"],
        mode="lines+markers",
        line={"color": TIDE_COLOR, "width": 2.5},
        marker={"size": 7},
        error_y={"type": "data", "array": rows["half_width"], "width": 4, "thickness": 1.5},
        name="TIDE − Base (95 %)",
        showlegend=True,
        customdata=rows[["half_width", "n"]].to_numpy(),
        hovertemplate="%{x}<br>TIDE − Base %{y:+.3g} ± %{customdata[0]:.2g} (95 %)"
        "<br>n = %{customdata[1]:,} each<extra></extra>",
    )
    _layer_axis(figure, difference, layer)
    figure.update_yaxes(title="TIDE − Base", gridcolor=GRID_COLOR, zeroline=False)
    if rows.empty:
        note(figure, f"fewer than {n_min} measurements")
    return legend_above(finish(figure, f"difference in {METRIC_TITLES[metric]}", HEIGHT))


def difference_table(table: pd.DataFrame) -> pd.DataFrame:
    """TIDE minus Base for every layer and metric.

    The interval treats the two models' measurements as independent. They share their templates, so that it is wider
    than a paired one would be.

    Args:
        table: columns model, layer, metric, mean, sd, n.

    Returns:
        Columns layer, metric, difference, half_width (95 %), n (the smaller of both).
    """
    base, tide = (table[table["model"] == model].drop(columns="model") for model in ("base", "tide"))
    both = base.merge(tide, on=["layer", "metric"], suffixes=("_base", "_tide"))
    half_base, half_tide = (half_width_95(both[f"sd_{m}"], both[f"n_{m}"]) for m in ("base", "tide"))
    return pd.DataFrame(
        {
            "layer": both["layer"],
            "metric": both["metric"],
            "difference": both["mean_tide"] - both["mean_base"],
            "half_width": np.hypot(half_base, half_tide),
            "n": both[["n_base", "n_tide"]].min(axis=1),
        }
    )


def _layer_axis(figure: go.Figure, table: pd.DataFrame, chosen: int) -> None:
    last = int(table["layer"].max()) if len(table) else 0
    layers = sparse(last, chosen, MOST_TICKS)
    values = [0, *(i + 1 for i in layers if i or len(layers) == last or i == chosen)]  # room for the embedding's name
    names = ["emb." if i == 0 else f"<b>{i - 1}</b>" if i == chosen + 1 else str(i - 1) for i in values]
    figure.add_vline(x=chosen + 1, line={"color": CHOSEN_COLOR, "width": 1, "dash": "dot"})
    figure.update_xaxes(
        title="after layer (emb.: the embedding)",
        showgrid=False,
        zeroline=False,
        tickmode="array",
        tickangle=0,
        tickvals=values,
        ticktext=names,
        range=[-0.4, last + 0.4],
    )
