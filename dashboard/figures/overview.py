"""Figure of the Overview page: where a model's parameters are."""

import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.marks import GRID_COLOR
from dashboard.numbers import byte_size, count
from dashboard.theme import BASE_COLOR, TIDE_COLOR, finish

HEIGHT = 260  # pixels
_OURS = ("memory", "router")  # what TIDE adds to LLaMA


def parameter_bars(parts: pd.DataFrame) -> go.Figure:
    """Parameters of each part of the model, those that TIDE adds in its colour.

    Args:
        parts: columns part, parameters, bytes, from the top bar down.
    """
    top_down = parts.iloc[::-1]
    texts = [f"{count(p)} · {byte_size(b)}" for p, b in zip(top_down["parameters"], top_down["bytes"], strict=True)]
    figure = go.Figure(
        go.Bar(
            x=top_down["parameters"],
            y=list(range(len(parts))),
            orientation="h",
            marker={"color": [TIDE_COLOR if part in _OURS else BASE_COLOR for part in top_down["part"]]},
            text=texts,
            textposition="outside",
            cliponaxis=False,
            customdata=top_down[["part", "parameters", "bytes"]].to_numpy(),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]:,} parameters"
            "<br>%{customdata[2]:,} bytes<extra></extra>",
        )
    )
    largest = max(int(parts["parameters"].max()), 1)
    figure.update_xaxes(title="parameters", gridcolor=GRID_COLOR, zeroline=False, range=[0, largest * 1.35])
    figure.update_yaxes(tickmode="array", tickvals=list(range(len(parts))), ticktext=list(top_down["part"]))
    figure.update_yaxes(title="part of the model", showgrid=False)
    finish(figure, "parameters and bytes, each part apart", HEIGHT)
    return figure.update_layout(margin={**figure.layout.margin.to_plotly_json(), "l": 110})
