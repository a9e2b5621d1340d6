import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.words import WORD_POSITIONS, TokenEdges, word_positions

TEXTS = ["a", "é9", " the", "b-c", "-d", "e.", " ", ".", "", "\ufffd", "[end", "中"]
SPECIAL = {10}
EDGES = TokenEdges.of(TEXTS, SPECIAL)


def slow(row: list[int]) -> list[str]:
    """The definition, token after token."""
    names, place, before = [], 0, ""
    for token_id in row:
        text = "" if token_id in SPECIAL else TEXTS[token_id]
        place = place + 1 if text[:1].isalnum() and before[-1:].isalnum() else 0
        has_letter = any(char.isalnum() for char in text)
        names.append(("start", "1", "2", "3+")[min(place, 3)] if has_letter else "no word")
        before = text
    return names


@given(st.lists(st.lists(st.integers(0, len(TEXTS) - 1), min_size=9, max_size=9), min_size=1, max_size=4))
def test_positions_are_those_of_the_definition(rows):
    found = word_positions(np.array(rows), EDGES)
    assert [[WORD_POSITIONS[place] for place in row] for row in found] == [slow(row) for row in rows]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([" un", "believ", "ab", "le", "d", " story"], ["start", "1", "2", "3+", "3+", "start"]),
        (["don", "'", "t"], ["start", "no word", "start"]),
        (["don", "'t"], ["start", "start"]),
        (["3", ".", "14"], ["start", "no word", "start"]),
        (["a", " ", "b"], ["start", "no word", "start"]),
        (["x-", "ray"], ["start", "start"]),
        (["co-op", "s"], ["start", "1"]),
    ],
)
def test_words(texts, expected):
    edges = TokenEdges.of(texts, ())
    places = word_positions(np.arange(len(texts))[None], edges)[0]
    assert [WORD_POSITIONS[place] for place in places] == expected


def test_a_special_token_is_of_no_word_whatever_its_name():
    edges = TokenEdges.of(["BOS", "a"], {0})
    assert word_positions(np.array([[1, 0, 1, 1]]), edges).tolist() == [[0, 4, 0, 1]]


def test_a_word_does_not_go_across_windows():
    edges = TokenEdges.of(["a"], ())
    assert word_positions(np.zeros((2, 3), dtype=np.int64), edges).tolist() == [[0, 1, 2]] * 2
