"""Figures of the Live page, without a browser."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.figures.live import MAX_TICKS, attribution, injection_ratio, prompt_routing, sweep
from dashboard.theme import SWITCHED_COLOR, TRAINED_COLOR, WEIGHT_SCALE

HOSTILE = ["<b>x</b>", "`$y$`", "⏎", "⟨E4⟩", "&lt;", '"', "[<|endoftext|>]"]


def routing(positions: int, num_banks: int) -> np.ndarray:
    weights = np.random.default_rng(0).random((positions, num_banks + 1)).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("num_banks", [1, 8, 24])
@pytest.mark.parametrize("positions", [1, 7, 256])
def test_the_null_bank_is_last_and_set_apart_and_the_scale_is_fixed(num_banks, positions):
    weights = routing(positions, num_banks)
    figure = prompt_routing(weights, ["x"] * positions, 3, 0, "title")
    heat = figure.data[0]
    assert np.isnan(heat.z[num_banks]).all()  # the gap
    np.testing.assert_allclose(heat.z[num_banks + 1], weights[:, -1], rtol=1e-6)
    assert figure.layout.yaxis.ticktext[-1] == "null"
    assert (heat.zmin, heat.zmax) == (0, 1)
    assert heat.colorscale == prompt_routing(weights, ["x"] * positions, 0, 0, "").data[0].colorscale
    assert WEIGHT_SCALE == "Cividis"
    assert len(figure.layout.xaxis.tickvals) <= MAX_TICKS


def test_repeated_tokens_keep_a_column_each():
    figure = prompt_routing(routing(5, 2), ["same"] * 5, 0, 4, "title")
    assert list(figure.layout.xaxis.tickvals) == [0, 1, 2, 3, 4]


def test_tokens_are_never_markup_in_ticks_and_hover():
    figure = prompt_routing(routing(len(HOSTILE), 2), HOSTILE, 0, 0, "title")
    texts = [*figure.layout.xaxis.ticktext, *(text for row in figure.data[0].customdata for text in row)]
    assert not any("<b>" in text for text in texts)
    assert any("&lt;b&gt;" in text for text in texts)


@given(st.integers(1, 30), st.integers(1, 24))
def test_the_ratio_figure_draws_both_runs_and_every_axis_has_a_name(positions, layers):
    rng = np.random.default_rng(positions)
    trained, switched = rng.random((2, positions, layers)) + 0.1
    switched[:, 0] = 0.0  # switched off
    figure = injection_ratio(trained, switched, positions - 1)
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert [line.line.color for line in lines] == [TRAINED_COLOR, SWITCHED_COLOR]
    np.testing.assert_allclose(lines[0].x, trained.mean(axis=0))
    assert np.isnan(lines[1].x[0])
    assert len(injection_ratio(trained, None, 0).data) == 2


def test_attribution_has_one_symmetric_scale_and_zero_is_neutral():
    values = np.array([[0.5, -2.0, 0.0], [1.0, 0.25, -0.5]])
    trained, switched = (attribution(values, 2.0, "<b>x</b>", "as trained", with_scale) for with_scale in (True, False))
    for figure in (trained, switched):
        (heatmap,) = figure.data
        assert (heatmap.zmin, heatmap.zmid, heatmap.zmax) == (-2.0, 0, 2.0)
        np.testing.assert_allclose(heatmap.z, values)
        assert list(heatmap.customdata[1][2]) == [2, 1]  # bank, layer
        assert figure.layout.yaxis.title.text == "layer"
        assert figure.layout.xaxis.title.text == "bank"
        assert "<" not in figure.layout.title.text  # a token is never read as markup
    assert trained.data[0].showscale
    assert not switched.data[0].showscale
    assert switched.layout.margin.r > trained.layout.margin.r  # equally wide plots


@pytest.mark.parametrize("measure", ["kl", "delta"])
def test_the_sweep_ranks_by_size_and_shows_every_control(measure):
    table = pd.DataFrame(
        {
            "kind": ["layer", "pair", "pair"],
            "layer": [0, 0, 1],
            "bank": [-1, 2, 0],
            "kl": [0.1, 0.3, 0.2],
            "delta": [-0.9, 0.2, 0.5],
            "control_kl": [0.01, 0.02, 0.03],
            "control_delta": [0.1, -0.1, 0.0],
        }
    )
    figure = sweep(table, measure, rows=2)
    bars, control = figure.data
    names = list(figure.layout.yaxis.ticktext)
    best = {"kl": "bank 2 in layer 0", "delta": "layer 0"}[measure]
    assert len(names) == 2
    assert names[-1] == best  # the largest on top
    row = table.loc[table[measure].abs().idxmax()]
    assert bars.x[-1] == row[measure]
    assert control.x[-1] == row[f"control_{measure}"]
    assert "nats" in figure.layout.xaxis.title.text
