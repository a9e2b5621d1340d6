"""Colours, scales and sizes of the dashboard: each named once, the same on every page."""

from typing import Any

import plotly.express as px
import plotly.graph_objects as go

NULL_COLOR = "#9AA0A6"  # the null bank, always
BASE_COLOR = "#5B6B7B"  # the Base model, dashed
TIDE_COLOR = "#0B6E99"  # the TIDE model, solid
CHOSEN_COLOR = "#E4572E"  # outline of the chosen layer, bank and token; visible on both ends of Cividis
TRAINED_COLOR, SWITCHED_COLOR = "#0B6E99", "#C2571A"  # Live page: as trained, with switches
WEIGHT_SCALE = "Cividis"  # routing weights, 0..1
CHANGE_SCALE = "RdBu_r"  # differences and attributions, symmetric about zero
SAFE_LIMIT = 10  # up to so many banks have colours that colour-blind people can tell apart
MARGIN = {"l": 64, "r": 16, "t": 40, "b": 48}  # pixels; fixed, so that nothing jumps between selections


def bank_colors(num_banks: int) -> list[str]:
    """Colour of every bank, null last: K+1 CSS colours."""
    palette = px.colors.qualitative.Safe if num_banks <= SAFE_LIMIT else px.colors.qualitative.Dark24
    return [palette[bank % len(palette)] for bank in range(num_banks)] + [NULL_COLOR]


def layout(title: str, height: int = 360, **more: Any) -> dict[str, Any]:
    """Layout of the dashboard's figures: title, fixed margins, transparent ground.

    Handed whole to `go.Figure(data, layout)` it costs a tenth of updating a figure step by step, which counts where
    a figure is drawn anew at every click.

    Args:
        title: shown above the plot, left.
        height: pixels.
        **more: any other entry of plotly's layout.
    """
    return {
        "title": {"text": title, "x": 0, "xanchor": "left", "font": {"size": 15}},
        "margin": MARGIN,
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": -0.2, "x": 0},
        **more,
    }


def finish(figure: go.Figure, title: str, height: int = 360) -> go.Figure:
    """Gives a figure that was built step by step the dashboard's `layout`, and returns it."""
    return figure.update_layout(layout(title, height))
