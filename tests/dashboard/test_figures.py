"""Figures without a browser: what is in the traces, axes and hovers, and that no token is read as markup."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.figures import banks, collapse, overview, router
from dashboard.figures.marks import half_width_95, token_label
from dashboard.numbers import byte_size, count, digits, probability
from dashboard.theme import BASE_COLOR, NULL_COLOR, TIDE_COLOR, bank_colors
from tide.tokens import show_bytes

LAYERS = 4
NASTY = [
    "<b>bold</b>",
    "</span>",
    "**x**",
    "`x`",
    "$x$",
    "␣three",
    "⏎",
    "⟨E4⟩",
    "[<|endoftext|>]",
    "&amp;",
    '"',
    "'",
    "%{x}",
]
OUR_TAGS = re.compile(r"</?b>|<br>|<extra></extra>|<span style=\"color:#[0-9A-F]{6}\">|</span>")


def weights(num_banks: int, rows: int = LAYERS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mean = rng.dirichlet(np.ones(num_banks + 1), rows).astype(np.float32)
    return mean, (0.1 + 0.1 * rng.random(mean.shape)).astype(np.float32)


def decile_weights(num_banks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mean, sd = weights(num_banks, 10 * LAYERS)
    shape = (10, LAYERS, num_banks + 1)
    return mean.reshape(shape), sd.reshape(shape), np.array([2, *range(100, 109)])


def overlaps(num_banks: int) -> pd.DataFrame:
    rows = [(decile, bank, 0.1 + decile / 50, 0.05, 40) for decile in range(10) for bank in range(num_banks)]
    return pd.DataFrame(rows, columns=["decile", "bank", "mean", "sd", "n"])


def distances(num_layers: int = LAYERS, n: int = 30) -> pd.DataFrame:
    rows = [
        (model, layer, metric, 1 + layer + (model == "tide"), 0.5, n)
        for model in ("base", "tide")
        for layer in range(num_layers + 1)
        for metric in collapse.METRIC_NAMES
    ]
    return pd.DataFrame(rows, columns=["model", "layer", "metric", "mean", "sd", "n"])


def heatmap(num_banks: int = 3, shown: str = "␣x", n: int = 50, bank: int = 1, **settings):
    mean, sd = weights(num_banks)
    return router.routing_heatmap(mean, sd, n, shown, layer=2, bank=bank, n_min=5, **settings)


def null_figure(num_banks: int = 3, shown: str = "␣x", decile: int = 4, n: int = 50, layer: int = 2, **settings):
    mean, sd, counts = decile_weights(num_banks)
    token = router.TokenWeight(shown, decile, 0.3, 0.1, n)
    return router.null_by_decile(mean[:, :, -1], sd[:, :, -1], counts, layer, token, n_min=5, **settings)


def all_banks(num_banks: int = 3, bank: int = 1):
    mean, sd, counts = decile_weights(num_banks)
    return router.weights_by_decile(mean[:, 2], sd[:, 2], counts, layer=2, bank=bank, n_min=5)


def every_figure(num_banks: int, shown: str, bank: int) -> list:
    matrix = np.random.default_rng(1).random((num_banks + 1, num_banks + 1)).astype(np.float32)
    table = distances()
    return [
        heatmap(num_banks, shown, bank=bank),
        heatmap(num_banks, shown, bank=bank, n=2),
        heatmap(num_banks, shown, bank=bank, stretch=True),
        null_figure(num_banks, shown),
        null_figure(num_banks, shown, decile=-1),
        all_banks(num_banks, bank),
        banks.overlap_matrix(matrix, shown, bank, 10),
        banks.overlap_by_decile(overlaps(num_banks), num_banks, bank),
        collapse.distance_by_layer(table, "l2", 2, 5),
    ]


def strings(value) -> list[str]:
    """Every text anywhere in a figure."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


def texts(figure) -> list[str]:
    content = json.loads(figure.to_json())
    content["layout"].pop("template", None)
    return strings(content)


@pytest.mark.parametrize(("num_banks", "shown"), [(1, shown) for shown in NASTY] + [(10, NASTY[0]), (24, NASTY[0])])
def test_no_token_is_read_as_markup(num_banks, shown):
    for figure in every_figure(num_banks, shown, bank=num_banks):
        for text in texts(figure):
            assert "<b>bold" not in text
            assert text.count("</span>") == text.count("<span")
            assert "<" not in OUR_TAGS.sub("", text)


@settings(max_examples=60)
@given(raw=st.binary(max_size=40))
def test_a_label_has_no_tag_whatever_the_bytes(raw):
    label = token_label(show_bytes(raw))
    assert "<" not in label
    assert "&quot;" not in label  # plotly does not know it
    assert re.sub(r"&(amp|lt|gt|#\d+|#x[0-9a-f]+);", "", label).count("&") == 0


@pytest.mark.parametrize("num_banks", [1, 10, 24])
def test_every_axis_has_a_name_and_every_figure_a_title(num_banks):
    for figure in every_figure(num_banks, "␣x", bank=0):
        layout = figure.layout
        assert all(axis.title.text for axis in (layout.xaxis, layout.yaxis))
        assert layout.title.text


@pytest.mark.parametrize("num_banks", [1, 10, 24])
def test_null_stands_apart_at_the_end_and_is_grey(num_banks):
    axis = heatmap(num_banks).layout.xaxis
    assert axis.tickvals[-1] - (num_banks - 1) > 1
    assert "null" in axis.ticktext[-1]
    assert NULL_COLOR in axis.ticktext[-1]
    lines = all_banks(num_banks, bank=0).data
    assert (lines[-1].name, lines[-1].line.color) == ("null", NULL_COLOR)
    assert [line.line.color for line in lines] == bank_colors(num_banks)


def test_weights_are_coloured_from_0_to_1_unless_stretched():
    fixed, stretched = heatmap().layout.coloraxis, heatmap(stretch=True).layout.coloraxis
    assert (fixed.cmin, fixed.cmax) == (0, 1)
    mean, _ = weights(3)
    assert (stretched.cmin, stretched.cmax) == (pytest.approx(mean.min()), pytest.approx(mean.max()))


def test_layer_0_is_at_the_bottom():
    low, high = heatmap().layout.yaxis.range
    assert low < 0 < high


def test_every_cell_can_be_hit_and_names_itself():
    figure = heatmap(num_banks=3)
    squares = figure.data[-1]
    cells = [(row[0], row[5]) for row in squares.customdata]
    assert cells == [(layer, bank) for layer in range(LAYERS) for bank in range(4)]
    mean, sd = weights(3)
    layer, name, value, spread, n, _ = squares.customdata[7]
    assert (layer, name, n) == (1, "null", 50)
    assert (value, spread) == (pytest.approx(mean[1, 3]), pytest.approx(sd[1, 3]))
    assert squares.marker.opacity == squares.unselected.marker.opacity == squares.selected.marker.opacity == 0
    assert all(f"customdata[{i}]" in squares.hovertemplate for i in range(5))


def test_the_chosen_cell_is_outlined_and_its_layer_and_bank_are_bold():
    layout = heatmap(num_banks=3, bank=3).layout
    (shape,) = layout.shapes
    assert ((shape.x0 + shape.x1) / 2, (shape.y0 + shape.y1) / 2) == (layout.xaxis.tickvals[-1], 2)
    assert layout.yaxis.ticktext[2] == "<b>2</b>"
    assert layout.xaxis.ticktext[-1].startswith("<b>")


def test_few_occurrences_are_hatched_and_none_are_empty():
    assert any(trace.type == "bar" and trace.marker.pattern.shape for trace in heatmap(n=2).data)
    assert not any(trace.type == "bar" for trace in heatmap(n=50).data)
    mean, sd = np.full((LAYERS, 4), np.nan), np.full((LAYERS, 4), np.nan)
    for stretch in (False, True):
        figure = router.routing_heatmap(mean, sd, 0, "␣x", 0, 0, n_min=5, stretch=stretch)
        assert "does not occur" in figure.layout.annotations[0].text


def test_the_chosen_layer_is_bold_with_its_interval_over_thin_lines_of_the_others():
    figure = null_figure(layer=0)
    *others, chosen, token = figure.data
    assert len(others) == LAYERS - 1
    assert sum(bool(line.showlegend) for line in others) == 1
    assert all(line.line.width < chosen.line.width for line in others)
    _, sd, n = decile_weights(3)
    assert np.allclose(chosen.error_y.array, half_width_95(sd[:, 0, -1], n))
    assert (list(token.x), list(token.y)) == ([4], [0.3])


def test_deciles_and_tokens_with_few_positions_are_left_out():
    figure = null_figure(n=3)
    assert len(figure.data) == LAYERS
    assert all(np.isnan(line.y[0]) and np.isfinite(line.y[1:]).all() for line in figure.data)


def test_a_token_is_labelled_on_the_side_that_the_curve_leaves_free():
    mean, sd, counts = np.full((10, LAYERS), 0.5), np.full((10, LAYERS), 0.1), np.full(10, 100)
    for decile, weight, side in ((9, 0.7, "top left"), (9, 0.3, "bottom left"), (2, 0.3, "bottom right"),
                                 (9, 0.05, "top left")):  # fmt: skip
        token = router.TokenWeight("x", decile, weight, 0.1, 50)
        marked = router.null_by_decile(mean, sd, counts, 2, token, n_min=5).data[-1]
        assert marked.textposition == side


def test_a_token_without_a_decile_is_a_line():
    figure = null_figure(decile=-1)
    assert len(figure.data) == LAYERS
    assert [shape.y0 for shape in figure.layout.shapes] == [0.3]


def test_the_overlap_of_a_list_with_itself_is_left_out():
    matrix = np.full((4, 4), 0.25, dtype=np.float32)
    figure = banks.overlap_matrix(matrix, "␣x", bank=2, neighbors=10)
    assert np.isnan(np.diag(figure.data[0].z)).all()
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, 1)
    assert len(figure.layout.shapes) == 2
    assert not banks.overlap_matrix(matrix, "␣x", bank=3, neighbors=10).layout.shapes  # null has no table


def test_a_base_model_has_a_matrix_of_one():
    assert banks.overlap_matrix(np.ones((1, 1)), "␣x", bank=0, neighbors=10, stretch=True).data


def test_base_is_dashed_and_tide_solid_each_with_its_interval():
    lines = {trace.name: trace for trace in collapse.distance_by_layer(distances(), "l2", 2, 5).data if trace.name}
    base, tide = lines["Base (95 %)"], lines["TIDE (95 %)"]
    assert (base.line.dash, base.line.color) == ("dash", BASE_COLOR)
    assert (tide.line.dash, tide.line.color) == ("solid", TIDE_COLOR)
    assert base.customdata.shape == (LAYERS + 1, 3)
    assert sum(trace.fill == "toself" for trace in collapse.distance_by_layer(distances(), "l2", 2, 5).data) == 2


def test_a_single_measurement_has_no_interval_and_few_are_not_drawn():
    single = distances(n=1).assign(sd=np.nan)
    assert not any(trace.fill == "toself" for trace in collapse.distance_by_layer(single, "l2", 0, n_min=1).data)
    assert "fewer than 5" in collapse.distance_by_layer(single, "l2", 0, n_min=5).layout.annotations[0].text


def test_the_difference_is_tide_minus_base_with_both_spreads():
    table = collapse.difference_table(distances())
    assert (table["difference"] == 1).all()
    assert np.allclose(table["half_width"], 1.96 * 0.5 * np.sqrt(2 / 30))
    assert (table["n"] == 30).all()


def test_the_difference_stands_in_a_panel_of_its_own_below():
    figure = collapse.distance_by_layer(distances(), "l2", 2, 5)
    (difference,) = [trace for trace in figure.data if trace.yaxis == "y2"]
    assert (difference.y == 1).all()
    assert figure.layout.yaxis2.domain[1] < figure.layout.yaxis.domain[0]
    assert figure.layout.yaxis2.title.text == "TIDE − Base"


def test_the_embedding_comes_first_and_the_chosen_layer_is_bold():
    axis = collapse.distance_by_layer(distances(), "l2", 2, 5).layout.xaxis
    assert list(axis.ticktext) == ["emb.", "0", "1", "<b>2</b>", "3"]


def test_ticks_of_a_deep_model_do_not_crowd_and_name_the_chosen_layer():
    axis = collapse.distance_by_layer(distances(num_layers=24), "l2", 7, 5).layout.xaxis
    assert len(axis.tickvals) <= 15
    assert min(np.diff(axis.tickvals)) >= 2
    assert "<b>7</b>" in axis.ticktext


def test_no_two_ticks_share_a_label():
    for figure in every_figure(24, "␣x", 3):
        for axis in (figure.layout.xaxis, figure.layout.yaxis):
            if axis.ticktext:
                assert len(set(axis.ticktext)) == len(axis.ticktext) == len(axis.tickvals)


def test_parameters_and_bytes_stand_at_every_bar():
    parts = pd.DataFrame({"part": ["backbone", "memory"], "parameters": [1_000_000, 16_777_216], "bytes": [4e6, 2**26]})
    (bars,) = overview.parameter_bars(parts.astype({"bytes": int})).data
    assert list(bars.text) == ["16.8 M · 64.0 MiB", "1.00 M · 3.81 MiB"]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (probability, 0.4123, ".412"),
        (probability, 1.0, "1.00"),
        (probability, 0.9999, "1.00"),
        (probability, -0.05, "−.050"),
        (probability, -0.0001, ".000"),
        (probability, float("nan"), "–"),
        (digits, 0.0, "0.00"),
        (digits, 12.345, "12.3"),
        (digits, -0.12345, "−0.123"),
        (digits, 1234.5, "1,234"),
        (digits, 1.5e-7, "1.50e−07"),
        (count, 999, "999"),
        (count, 9216, "9.22 K"),
        (count, 16_778_240, "16.8 M"),
        (count, 6_304_000_000, "6.30 B"),
        (count, 999_700, "1.00 M"),
        (byte_size, 36_864, "36.0 KiB"),
        (byte_size, 12, "12 B"),
    ],
)
def test_numbers_have_three_digits(function, value, text):
    assert function(value) == text
