import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.selection import Selection, Space, bank_name, default_token

SPACE = Space(vocab_size=100, num_layers=4, num_banks=3, default_token=7)


@given(
    token=st.integers(0, 99),
    layer=st.integers(0, 3),
    bank=st.integers(0, 3),
    pinned=st.lists(st.integers(0, 99), unique=True, max_size=5),
)
def test_a_link_restores_the_selection(token, layer, bank, pinned):
    selection = Selection(token, layer, bank, tuple(pinned))
    assert Selection.from_params(selection.to_params(SPACE), SPACE) == (selection, [])


def test_the_null_bank_is_written_by_name():
    assert Selection(1, bank=3).to_params(SPACE)["bank"] == "null"
    assert bank_name(2, 3) == "2"


def test_no_parameters_give_the_default():
    assert Selection.from_params({}, SPACE) == (Selection(7), [])


@pytest.mark.parametrize(
    "params",
    [
        {"token": "100"},
        {"token": "-1"},
        {"token": "three"},
        {"token": ""},
        {"token": "٣"},
        {"layer": "4"},
        {"layer": "1.0"},
        {"bank": "3"},
        {"bank": "none"},
        {"pin": "5,100"},
        {"token": "9" * 5000},
    ],
)
def test_a_wrong_parameter_is_named_in_one_sentence_and_the_default_stands_in(params):
    selection, problems = Selection.from_params(params, SPACE)
    assert len(problems) == 1
    assert len(problems[0]) < 150
    assert selection.change(pinned=()) == Selection(7)


def test_right_parameters_survive_beside_wrong_ones():
    selection, problems = Selection.from_params({"token": "5", "layer": "77", "bank": "null", "pin": "5,5,x"}, SPACE)
    assert selection == Selection(5, 0, 3, (5,))
    assert len(problems) == 2


def test_a_base_model_has_the_null_bank_only():
    base = Space(vocab_size=10, num_layers=2, num_banks=0, default_token=0)
    selection = Selection.default(base)
    assert Selection.from_params(selection.to_params(base), base) == (selection, [])


@pytest.mark.parametrize(
    ("texts", "counts", "expected"),
    [(["a", "three", " three"], [1, 1, 1], 2), (["!", "a", "b"], [9, 1, 5], 2), (["!", "?"], [1, 2], 0), ([], [], 0)],
)
def test_the_first_token_is_a_number_word_or_a_frequent_one_with_letters(texts, counts, expected):
    assert default_token(texts, np.array(counts)) == expected
