"""Figures of the Live page: tables in, plotly figures out."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.marks import token_label
from dashboard.theme import CHANGE_SCALE, MARGIN, NULL_COLOR, SWITCHED_COLOR, TRAINED_COLOR, WEIGHT_SCALE, layout

MAX_TICKS = 20  # token labels that still fit below a heat map
HEIGHT = 340  # pixels
TICK_WIDTH = 10  # characters of a token label
BAR_WIDTH = 58  # pixels that a colour bar with its labels and title takes


def prompt_routing(
    routing: np.ndarray, tokens: list[str], layer: int, target: int, title: str, with_scale: bool = True
) -> go.Figure:
    """Routing weights over the positions of a prompt in one layer.

    Args:
        routing: [T, K+1], weights 0..1 of that layer; null last.
        tokens: [T] shown tokens, plain text.
        layer: 0-based, for the hover text.
        target: position that is outlined.
        title: of the figure.
        with_scale: draw the colour bar; its place stays empty without.
    """
    positions, num_banks = len(routing), routing.shape[1] - 1
    rows = [*range(num_banks), num_banks + 1]  # an empty row sets the null bank apart
    names = [f"bank {bank}" for bank in range(num_banks)] + ["null bank"]
    labels = [token_label(token) for token in tokens]
    hover = [[f"position {t}: {labels[t]}<br>{name} in layer {layer}" for t in range(positions)] for name in names]
    step = max(1, -(-positions // MAX_TICKS))
    ticks = list(range(0, positions, step))
    heatmap = {
        "type": "heatmap",
        "z": np.insert(routing.T.astype(float), num_banks, np.nan, axis=0),
        "y": list(range(num_banks + 2)),
        "customdata": [*hover[:-1], [""] * positions, hover[-1]],
        "hovertemplate": "%{customdata}<br>weight %{z:.3f}<extra></extra>",
        "hoverongaps": False,
        "colorscale": WEIGHT_SCALE,
        "zmin": 0,
        "zmax": 1,
        **color_bar("weight", with_scale),
    }
    outline = {
        "type": "rect",
        "x0": target - 0.5,
        "x1": target + 0.5,
        "y0": -0.5,
        "y1": num_banks + 1.5,
        "line": {"color": SWITCHED_COLOR, "width": 2},
    }
    x_axis = {
        "title": {"text": "token of the prompt"},
        "tickvals": ticks,
        "ticktext": [token_label(tokens[t], TICK_WIDTH) for t in ticks],
        "tickangle": -90,
        "showgrid": False,
    }
    y_axis = {
        "title": {"text": "bank"},
        "tickvals": rows,
        "ticktext": [*map(str, range(num_banks)), "null"],
        "showgrid": False,
    }
    return go.Figure(
        [heatmap], layout(title, HEIGHT, **beside_bar(with_scale), xaxis=x_axis, yaxis=y_axis, shapes=[outline])
    )


def injection_ratio(trained: np.ndarray, switched: np.ndarray | None, target: int) -> go.Figure:
    """Size of the injection beside the residual stream, |m| / |h|, by layer.

    Args:
        trained: [T, L], as trained.
        switched: [T, L] with the switches, or None where nothing is switched.
        target: position drawn as markers; lines are means over all positions, whiskers their sd.

    The axis is logarithmic: the embedding that layer 0 adds to is often a tenth of the injection's length. A
    layer whose injection is switched off has no point.
    """
    runs = [("as trained", trained, TRAINED_COLOR, "solid")]
    if switched is not None:
        runs.append(("switched", switched, SWITCHED_COLOR, "dash"))
    traces: list[dict[str, Any]] = []
    for name, ratio, color, dash in runs:
        layers, sd = np.arange(ratio.shape[1]), ratio.std(axis=0)
        mean, at_target = (np.where(x > 0, x, np.nan) for x in (ratio.mean(axis=0), ratio[target]))
        shared = {"type": "scatter", "y": layers, "name": name, "legendgroup": name}
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": sd,
            "arrayminus": np.minimum(sd, 0.9 * np.nan_to_num(mean)),  # a logarithmic axis has no zero
            "thickness": 1,
        }
        traces.append(
            {
                **shared,
                "x": mean,
                "mode": "lines",
                "line": {"color": color, "dash": dash},
                "connectgaps": False,
                "error_x": whiskers,
                "customdata": np.stack([sd, np.full(len(layers), len(ratio))], axis=1),
                "hovertemplate": "layer %{y}<br>mean %{x:.3f}, sd %{customdata[0]:.3f}, n %{customdata[1]}"
                f"<extra>{name}</extra>",
            }
        )
        traces.append(
            {
                **shared,
                "x": at_target,
                "mode": "markers",
                "showlegend": False,
                "marker": {"color": color, "symbol": "circle-open", "size": 8},
                "hovertemplate": f"layer %{{y}}<br>at the marked token %{{x:.3f}}<extra>{name}</extra>",
            }
        )
    x_axis = {"title": {"text": "|m| / |h|  (ratio of L2 norms)"}, "type": "log", "dtick": 1, "exponentformat": "power"}
    y_axis = {"title": {"text": "layer"}, "dtick": 1 if trained.shape[1] <= 12 else 4}
    legend = {"orientation": "v", "x": 1.0, "xanchor": "right", "y": 1.0, "yanchor": "top"}
    title = "Size of the injection beside the stream"
    return go.Figure(traces, layout(title, HEIGHT, xaxis=x_axis, yaxis=y_axis, legend=legend))


def attribution(values: np.ndarray, limit: float, target: str, side: str, with_scale: bool = True) -> go.Figure:
    """Direct contribution of every (layer, bank) to the target's logit.

    Args:
        values: [L, K] logits.
        limit: value at which the colours are full; the same for both runs, so that they compare.
        target: the target token as shown, plain text.
        side: "as trained" or "switched".
        with_scale: draw the colour bar; its place stays empty without.
    """
    num_layers, num_banks = values.shape
    layers, banks = np.meshgrid(np.arange(num_layers), np.arange(num_banks), indexing="ij")
    heatmap = {
        "type": "heatmap",
        "z": values.astype(float).round(4),
        "customdata": np.stack([banks, layers], axis=-1).tolist(),
        "hovertemplate": "bank %{customdata[0]} in layer %{customdata[1]}<br>%{z:+.3f} to the logit<extra></extra>",
        "colorscale": CHANGE_SCALE,
        "zmin": -limit,
        "zmax": limit,
        "zmid": 0,
        **color_bar("logit", with_scale),
    }
    x_axis = {"title": {"text": "bank"}, "dtick": 1 if num_banks <= MAX_TICKS else 4, "showgrid": False}
    y_axis = {"title": {"text": "layer"}, "dtick": 1 if num_layers <= MAX_TICKS else 4, "showgrid": False}
    title = f"Contribution to the logit of “{token_label(target)}”, {side}"
    return go.Figure([heatmap], layout(title, HEIGHT, **beside_bar(with_scale), xaxis=x_axis, yaxis=y_axis))


def color_bar(title: str, drawn: bool) -> dict[str, Any]:
    """The colour bar of a heat map. Of two that share a scale one draws it: it is the dearest part of the figure."""
    return {"showscale": drawn, "colorbar": {"title": {"text": title, "side": "right"}, "thickness": 10}}


def beside_bar(drawn: bool) -> dict[str, Any]:
    """The margins that keep a heat map without a colour bar as wide as its neighbour with one."""
    return {} if drawn else {"margin": {**MARGIN, "r": MARGIN["r"] + BAR_WIDTH}}


def sweep(table: pd.DataFrame, measure: str, rows: int = 20) -> go.Figure:
    """The switches that change the prediction most, as ranked bars, each beside its random control.

    Args:
        table: from `Engine.sweep`: kind, layer, bank, kl, delta, control_kl, control_delta.
        measure: "kl" or "delta", the column that ranks them (delta by its size).
        rows: bars drawn.
    """
    ranked = table.reindex(table[measure].abs().sort_values(ascending=False).index).head(rows).iloc[::-1]
    names = [
        f"layer {row.layer}" if row.kind == "layer" else f"bank {int(row.bank)} in layer {row.layer}"
        for row in ranked.itertuples()
    ]
    unit = "KL(trained ‖ switched), nats" if measure == "kl" else "change of log p(target), nats"
    places = list(range(len(ranked)))
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": places,
        "x": ranked[measure].to_numpy(),
        "name": "switched off",
        "marker": {"color": SWITCHED_COLOR},
        "customdata": names,
        "hovertemplate": "%{customdata}<br>%{x:.4f} nats<extra>switched off</extra>",
    }
    control = {
        "type": "scatter",
        "mode": "markers",
        "y": places,
        "x": ranked[f"control_{measure}"].to_numpy(),
        "name": "control: a random direction of the same length",
        "marker": {"color": NULL_COLOR, "symbol": "diamond", "size": 8, "line": {"width": 1}},
        "customdata": names,
        "hovertemplate": "%{customdata}<br>%{x:.4f} nats<extra>random control</extra>",
    }
    x_axis = {"title": {"text": unit}, "zeroline": True}
    y_axis = {"tickvals": places, "ticktext": names, "automargin": True}
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.0, "xanchor": "left"}
    height = 150 + 22 * max(len(ranked), 4)
    title = f"The {len(ranked)} switches that matter most"
    made = layout(title, height, xaxis=x_axis, yaxis=y_axis, legend=legend)
    made["margin"] = {**made["margin"], "t": 84}  # the legend stands between title and bars
    made["title"] = {**made["title"], "y": 0.98, "yanchor": "top"}
    return go.Figure([bars, control], made)
