"""Marks that several figures share: ticks, intervals, labels of tokens, notes on an empty plot."""

import numpy as np
import plotly.graph_objects as go

from dashboard.selection import NULL_NAME
from dashboard.theme import MARGIN, NULL_COLOR
from tide.tokens import as_html, shorten

Z_95 = 1.96  # standard errors either side of a mean that hold 95 % of a normal distribution
NULL_GAP = 0.5  # columns between the last bank and the null bank
QUIET_COLOR = "rgba(128, 134, 139, 0.45)"  # lines that are context, not subject
GRID_COLOR = "rgba(128, 134, 139, 0.22)"
DECILE_AXIS = "frequency decile (0 rarest, 9 most frequent)"
LEGEND_WIDTH = 150  # pixels, of a legend beside a plot


def token_label(shown: str, width: int = 24) -> str:
    """A token inside any plotly text: shortened and escaped."""
    return as_html(shorten(shown, width))


def half_width_95(sd: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Half the 95 % interval of a mean, 1.96 sd / sqrt(n); NaN where n < 2."""
    n = np.asarray(n, dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n >= 2, Z_95 * np.asarray(sd, dtype=float) / np.sqrt(n), np.nan)


def bank_positions(num_banks: int) -> list[float]:
    """Where the columns of banks 0..K-1 and null stand; null is set apart."""
    return [*map(float, range(num_banks)), num_banks + NULL_GAP]


def bank_ticks(num_banks: int, chosen: int | None = None) -> dict:
    """Axis settings for banks 0..K-1 and null: integer positions, null in grey, the chosen one bold."""
    names = [str(bank) for bank in range(num_banks)]
    names.append(f'<span style="color:{NULL_COLOR}">{NULL_NAME}</span>')
    if chosen is not None:
        names[chosen] = f"<b>{names[chosen]}</b>"
    return {"tickmode": "array", "tickangle": 0, "tickvals": bank_positions(num_banks), "ticktext": names}


def sparse(count: int, chosen: int | None = None, most: int = 40) -> list[int]:
    """At most about `most` of 0..count-1, evenly, the chosen one among them and none too near to it."""
    step = max(1, -(-count // most))
    return [i for i in range(count) if i == chosen or (i % step == 0 and (chosen is None or abs(i - chosen) >= step))]


def number_ticks(count: int, chosen: int | None = None) -> dict:
    """Axis settings for 0..count-1, the chosen one bold; every second or third where all would crowd."""
    shown = sparse(count, chosen)
    names = [f"<b>{i}</b>" if i == chosen else str(i) for i in shown]
    return {"tickmode": "array", "tickangle": 0, "tickvals": shown, "ticktext": names}


def rectangle(x: float, y: float, color: str) -> dict:
    """Outline of the cell whose centre is (x, y)."""
    edges = {"x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.5, "y1": y + 0.5}
    return {"type": "rect", "line": {"color": color, "width": 3}, **edges}


def legend_above(figure: go.Figure) -> go.Figure:
    """Puts a short legend between title and plot, where it never meets an axis title."""
    return figure.update_layout(
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        title={"y": 0.98, "yanchor": "top"},
        margin={**MARGIN, "t": 72},
    )


def legend_beside(figure: go.Figure) -> go.Figure:
    """Puts a long legend, an entry a bank, to the right of the plot."""
    return figure.update_layout(
        legend={"orientation": "v", "x": 1.02, "y": 1, "xanchor": "left"}, margin={**MARGIN, "r": LEGEND_WIDTH}
    )


def note(figure: go.Figure, text: str) -> go.Figure:
    """Writes a sentence into the middle of a plot that has nothing to show."""
    figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    return figure
