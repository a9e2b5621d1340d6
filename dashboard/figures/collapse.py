"""Figures of the Collapse page (figures 2 and 6 of the paper)."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.marks import GRID_COLOR, half_width_95, legend_above, note, sparse
from dashboard.theme import BASE_COLOR, CHOSEN_COLOR, TIDE_COLOR, layout

METRIC_NAMES = {
    "l2": "L2 distance",
    "normalized_l2": "L2 of unit vectors (0 to 2)",
    "cosine_distance": "1 − cosine (0 to 2)",
}
METRIC_TITLES = {"l2": "L2 distance", "normalized_l2": "normalised L2 distance", "cosine_distance": "cosine distance"}
MOST_TICKS = 14  # layers that a narrow axis can name
HEIGHT = 500  # pixels
UPPER_PANEL, LOWER_PANEL = (0.42, 1.0), (0.0, 0.33)  # of the height: distances, their difference
_STYLES = {
    "base": ("Base", BASE_COLOR, "dash", "rgba(91, 107, 123, 0.20)"),
    "tide": ("TIDE", TIDE_COLOR, "solid", "rgba(11, 110, 153, 0.20)"),
}


def distance_by_layer(table: pd.DataFrame, metric: str, layer: int, n_min: int) -> go.Figure:
    """Mean distance between the two words of a pair, by layer, and below it TIDE minus Base.

    Above, Base is dashed, TIDE solid, and 95 % intervals are bands. Below, over zero the words are further apart in
    TIDE; whiskers are 95 % intervals.

    Args:
        table: columns model, layer, metric, mean, sd, n; layer 0 is the embedding, l the stream after layer l-1.
        metric: one of `METRIC_NAMES`.
        layer: the chosen decoder layer, marked by a line.
        n_min: means of fewer measurements are left out.
    """
    rows = table[(table["metric"] == metric) & (table["n"] >= n_min)]
    difference = difference_table(rows).sort_values("layer")
    y_axis = {"zeroline": False, "gridcolor": GRID_COLOR}
    y2_axis = {**y_axis, "title": {"text": "TIDE − Base"}, "domain": LOWER_PANEL}
    y_axis |= {"title": {"text": METRIC_NAMES[metric]}, "domain": UPPER_PANEL, "rangemode": "tozero"}
    shapes = [_chosen_line(layer), _zero_line()]
    more = {"xaxis": _layer_axis(table, layer), "yaxis": y_axis, "yaxis2": y2_axis, "shapes": shapes}
    traces = [*_distance_traces(rows), _difference_trace(difference)]
    figure = go.Figure(traces, layout(METRIC_TITLES[metric], HEIGHT, **more))
    if rows.empty:
        note(figure, f"fewer than {n_min} measurements")
    return legend_above(figure)


def _distance_traces(rows: pd.DataFrame) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for model, (name, color, dash, band) in _STYLES.items():
        part = rows[rows["model"] == model].sort_values("layer")
        half = half_width_95(part["sd"], part["n"])
        if np.isfinite(half).all() and len(part):
            outline = {"x": [*part["layer"], *part["layer"][::-1]], "fill": "toself", "fillcolor": band}
            edge = [*(part["mean"] + half), *(part["mean"] - half)[::-1]]
            hidden = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            traces.append({"type": "scatter", "y": edge, "legendgroup": model, **outline, **hidden})
        traces.append(
            {
                "type": "scatter",
                "x": part["layer"],
                "y": part["mean"],
                "mode": "lines+markers",
                "line": {"color": color, "dash": dash, "width": 2.5},
                "marker": {"size": 6},
                "name": f"{name} (95 %)",
                "legendgroup": model,
                "customdata": np.stack([part["sd"], part["n"], half], axis=-1) if len(part) else None,
                "hovertemplate": f"{name}, %{{x}}<br>mean %{{y:.3g}} ± %{{customdata[2]:.2g}} (95 %)"
                "<br>sd %{customdata[0]:.3g}<br>n = %{customdata[1]:,}<extra></extra>",
            }
        )
    return traces


def _difference_trace(difference: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "scatter",
        "yaxis": "y2",
        "x": difference["layer"],
        "y": difference["difference"],
        "mode": "lines+markers",
        "line": {"color": TIDE_COLOR, "width": 2},
        "marker": {"size": 6},
        "error_y": {"type": "data", "array": difference["half_width"], "width": 4, "thickness": 1.5},
        "name": "TIDE − Base (95 %)",
        "showlegend": False,
        "customdata": difference[["half_width", "n"]].to_numpy(),
        "hovertemplate": "%{x}<br>TIDE − Base %{y:+.3g} ± %{customdata[0]:.2g} (95 %)"
        "<br>n = %{customdata[1]:,} each<extra></extra>",
    }


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


def _chosen_line(chosen: int) -> dict[str, Any]:
    line = {"color": CHOSEN_COLOR, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": chosen + 1, "x1": chosen + 1, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _zero_line() -> dict[str, Any]:
    line = {"color": BASE_COLOR, "width": 1.5, "dash": "dash"}
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": 0, "y1": 0, "yref": "y2", "line": line}


def _layer_axis(table: pd.DataFrame, chosen: int) -> dict[str, Any]:
    last = int(table["layer"].max()) if len(table) else 0
    layers = sparse(last, chosen, MOST_TICKS)
    values = [0, *(i + 1 for i in layers if i or len(layers) == last or i == chosen)]  # room for the embedding's name
    names = ["emb." if i == 0 else f"<b>{i - 1}</b>" if i == chosen + 1 else str(i - 1) for i in values]
    return {
        "title": {"text": "after layer (emb.: the embedding)"},
        "anchor": "y2",
        "showgrid": False,
        "zeroline": False,
        "tickmode": "array",
        "tickangle": 0,
        "tickvals": values,
        "ticktext": names,
        "range": [-0.4, last + 0.4],
    }
