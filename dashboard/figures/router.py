"""Figures of the Router page (figure 10 of the paper, for every layer and for single tokens)."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard.figures.marks import (
    DECILE_AXIS,
    GRID_COLOR,
    QUIET_COLOR,
    bank_positions,
    bank_ticks,
    half_width_95,
    legend_above,
    legend_beside,
    note,
    number_ticks,
    rectangle,
    token_label,
)
from dashboard.selection import bank_name
from dashboard.theme import CHOSEN_COLOR, NULL_COLOR, WEIGHT_SCALE, bank_colors, finish

WEIGHT_AXIS = "mean routing weight"
HEIGHT = 400  # pixels
LAST_DECILE = 9
LABEL_HEIGHT = 0.1  # of the 0..1 axis: a label below a smaller value would lie on the axis
_HOVER = (
    "bank %{customdata[1]} in layer %{customdata[0]}<br>mean weight %{customdata[2]:.3f}"
    "<br>sd %{customdata[3]:.3f}<br>n = %{customdata[4]:,}<extra></extra>"
)


@dataclass(frozen=True)
class TokenWeight:
    """Null weight of the chosen token in the chosen layer.

    Attributes:
        shown: the token.
        decile: its frequency decile, -1 for none: then its weight is a dotted line over all deciles.
        mean: over its occurrences; NaN where it does not occur.
        sd: their spread.
        n: its occurrences.
    """

    shown: str
    decile: int
    mean: float
    sd: float
    n: int


def routing_heatmap(
    mean: np.ndarray,
    sd: np.ndarray,
    n: int,
    shown: str,
    layer: int,
    bank: int,
    n_min: int,
    stretch: bool = False,
) -> go.Figure:
    """Routing weights of one token, layer x bank.

    Args:
        mean: [L, K+1], null last.
        sd: [L, K+1].
        n: positions that the means are over.
        shown: the token.
        layer: chosen layer.
        bank: chosen bank, K for null.
        n_min: with fewer positions the map is pale and hatched; with none it is empty.
        stretch: colour from the smallest to the largest weight instead of 0..1.

    Returns:
        Heatmaps of the banks and of null, and over them one transparent square a cell (the last trace) that hover
        and clicks hit; its customdata is layer, bank name, mean, sd, n, bank.
    """
    layers, columns = mean.shape
    positions = bank_positions(columns - 1)
    few = n < n_min
    figure = go.Figure()
    for part, x in ((slice(0, -1), positions[:-1]), (slice(-1, None), positions[-1:])):
        if x:
            figure.add_heatmap(
                z=mean[:, part],
                x=x,
                y=list(range(layers)),
                coloraxis="coloraxis",
                hoverinfo="skip",
                opacity=0.35 if few else 1,
                xgap=1,
                ygap=1,
            )
    if few and n:
        figure.add_bar(
            x=positions,
            y=[layers] * columns,
            base=-0.5,
            width=1,
            marker={"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": "#80868B", "size": 9}},
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_scatter(
        x=np.tile(positions, layers),
        y=np.repeat(np.arange(layers), columns),
        mode="markers",
        marker={"symbol": "square", "size": 22, "opacity": 0},
        selected={"marker": {"opacity": 0}},
        unselected={"marker": {"opacity": 0}},
        customdata=[
            [i, bank_name(k, columns - 1), float(mean[i, k]), float(sd[i, k]), n, k]
            for i in range(layers)
            for k in range(columns)
        ],
        hovertemplate=_HOVER,
        showlegend=False,
    )
    low, high = (float(np.nanmin(mean)), float(np.nanmax(mean))) if stretch and n else (0.0, 1.0)
    figure.update_layout(
        coloraxis={
            "colorscale": WEIGHT_SCALE,
            "cmin": low,
            "cmax": high if high > low else low + 1,
            "colorbar": {"title": {"text": WEIGHT_AXIS, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        },
        shapes=[rectangle(positions[bank], layer, CHOSEN_COLOR)],
        hoverdistance=40,
    )
    figure.update_xaxes(title="bank", showgrid=False, zeroline=False, fixedrange=True, **bank_ticks(columns - 1, bank))
    figure.update_xaxes(range=[-0.6, positions[-1] + 0.6])
    figure.update_yaxes(title="layer", showgrid=False, zeroline=False, fixedrange=True, **number_ticks(layers, layer))
    figure.update_yaxes(range=[-0.6, layers - 0.4])
    if not n:
        note(figure, "this token does not occur in the text<br>whose routing was measured")
    elif few:
        figure.add_annotation(
            text=f"hatched: n = {n} is below {n_min}", showarrow=False, x=1, y=1.07, xref="paper", yref="paper"
        )
    label = token_label(shown)
    title = f"routing of {label}, mean over n = {n:,} occurrence{'' if n == 1 else 's'}"
    return finish(figure, title if n else f"routing of {label}", HEIGHT)


def null_by_decile(
    mean: np.ndarray,
    sd: np.ndarray,
    n: np.ndarray,
    layer: int,
    token: TokenWeight,
    n_min: int,
    stretch: bool = False,
) -> go.Figure:
    """Null weight by frequency decile: the chosen layer bold with its interval, all other layers thin.

    Args:
        mean: null weights, [10, L].
        sd: [10, L].
        n: positions of each decile, [10].
        layer: chosen layer.
        token: the chosen token, marked at its decile.
        n_min: deciles and tokens with fewer positions are left out.
        stretch: let the axis fit the values instead of 0..1.
    """
    deciles, layers = mean.shape
    kept = np.where((n >= n_min)[:, None], mean, np.nan)
    figure = go.Figure()
    for other in [i for i in range(layers) if i != layer]:
        figure.add_scatter(
            x=list(range(deciles)),
            y=kept[:, other],
            mode="lines",
            line={"color": QUIET_COLOR, "width": 1},
            name="other layers",
            legendgroup="others",
            showlegend=other == (1 if layer == 0 else 0),
            customdata=np.stack([sd[:, other], n], axis=-1),
            hovertemplate=_decile_hover(f"layer {other}"),
        )
    figure.add_scatter(
        x=list(range(deciles)),
        y=kept[:, layer],
        mode="lines+markers",
        line={"color": NULL_COLOR, "width": 4},
        marker={"size": 8},
        error_y={"type": "data", "array": half_width_95(sd[:, layer], n), "thickness": 1.5, "width": 4},
        name=f"<b>layer {layer}</b> (95 %)",
        customdata=np.stack([sd[:, layer], n], axis=-1),
        hovertemplate=_decile_hover(f"layer {layer}"),
    )
    if token.n >= max(n_min, 1):
        _mark_token(figure, token, kept[:, layer])
    figure.update_xaxes(title=DECILE_AXIS, showgrid=False, range=[-0.4, deciles - 0.6], **number_ticks(deciles))
    figure.update_yaxes(title="mean weight of the null bank", gridcolor=GRID_COLOR, zeroline=False)
    if not stretch:
        figure.update_yaxes(range=[-0.03, 1.03])
    if not np.isfinite(kept).any():
        note(figure, f"no decile has {n_min} positions")
    return legend_above(finish(figure, f"null weight by frequency decile, layer {layer}", HEIGHT))


def _mark_token(figure: go.Figure, token: TokenWeight, curve: np.ndarray) -> None:
    """A diamond at the token's decile, its label on the side that the layer's curve [10] leaves free; or a line."""
    label = token_label(token.shown)
    if token.decile < 0:
        figure.add_hline(
            y=token.mean,
            line={"color": CHOSEN_COLOR, "dash": "dot", "width": 2},
            annotation={"text": f"{label} (no decile)", "font": {"color": CHOSEN_COLOR}},
            annotation_position="top left",
        )
        return
    below = LABEL_HEIGHT < token.mean < curve[token.decile]
    side = "right" if token.decile < LAST_DECILE / 2 else "left"
    figure.add_scatter(
        x=[token.decile],
        y=[token.mean],
        mode="markers+text",
        marker={"symbol": "diamond", "size": 13, "color": CHOSEN_COLOR},
        error_y={"type": "data", "array": half_width_95(np.array([token.sd]), token.n), "thickness": 1.5, "width": 4},
        text=[label],
        textposition=f"{'bottom' if below else 'top'} {side}",
        textfont={"color": CHOSEN_COLOR},
        showlegend=False,
        customdata=[[label, token.sd, token.n]],
        hovertemplate="%{customdata[0]}<br>decile %{x}<br>mean %{y:.3f}<br>sd %{customdata[1]:.3f}"
        "<br>n = %{customdata[2]:,}<extra></extra>",
    )


def weights_by_decile(
    mean: np.ndarray, sd: np.ndarray, n: np.ndarray, layer: int, bank: int, n_min: int, stretch: bool = False
) -> go.Figure:
    """Routing weight of every bank and of null by frequency decile, in one layer (figure 10).

    Args:
        mean: [10, K+1] of the layer, null last.
        sd: [10, K+1].
        n: positions of each decile, [10].
        layer: for the title.
        bank: chosen bank, K for null: bold, with its interval.
        n_min: deciles with fewer positions are left out.
        stretch: let the axis fit the values instead of 0..1.
    """
    deciles, columns = mean.shape
    kept = np.where((n >= n_min)[:, None], mean, np.nan)
    colors = bank_colors(columns - 1)
    figure = go.Figure()
    for k in range(columns):
        name = f"bank {k}" if k < columns - 1 else "null"
        chosen = k == bank
        figure.add_scatter(
            x=list(range(deciles)),
            y=kept[:, k],
            mode="lines+markers" if chosen else "lines",
            line={"color": colors[k], "width": 4 if chosen else 1.5},
            marker={"size": 8},
            error_y={"type": "data", "array": half_width_95(sd[:, k], n), "visible": chosen, "width": 4},
            legendrank=1 if chosen else 1000,  # the first, also where the legend scrolls
            name=f"<b>{name}</b> (95 %)" if chosen else name,
            customdata=np.stack([sd[:, k], n], axis=-1),
            hovertemplate=_decile_hover(name),
        )
    figure.update_xaxes(title=DECILE_AXIS, showgrid=False, range=[-0.4, deciles - 0.6], **number_ticks(deciles))
    figure.update_yaxes(title=WEIGHT_AXIS, gridcolor=GRID_COLOR, zeroline=False)
    if not stretch:
        figure.update_yaxes(range=[-0.03, 1.03])
    if not np.isfinite(kept).any():
        note(figure, f"no decile has {n_min} positions")
    return legend_beside(finish(figure, f"all banks by frequency decile, layer {layer}", HEIGHT))


def _decile_hover(name: str) -> str:
    return (
        f"{name}<br>decile %{{x}}<br>mean %{{y:.3f}}<br>sd %{{customdata[0]:.3f}}"
        "<br>n = %{customdata[1]:,} positions<extra></extra>"
    )
