import numpy as np
import pytest

from dashboard.search import TokenSearch

TEXTS = [" three", "three", "Three", " threefold", "seventhree", " the", "\n", "\t", " ", "", "�", "$", "<b>", "#12"]
COUNTS = np.array([50, 9, 7, 3, 2, 900, 400, 5, 80, 0, 4, 3, 1, 2])


@pytest.fixture(scope="module")
def search() -> TokenSearch:
    return TokenSearch(TEXTS, COUNTS)


def found(search: TokenSearch, query: str, **settings) -> list[str]:
    return [TEXTS[hit.token_id] for hit in search.search(query, **settings)]


def test_exact_comes_before_prefix_before_substring(search):
    kinds = [hit.kind for hit in search.search("three")]
    assert kinds == ["exact"] * 3 + ["prefix", "substring"]


def test_within_a_kind_the_same_case_then_the_frequent_come_first(search):
    assert found(search, "three")[:3] == [" three", "three", "Three"]
    assert found(search, "Three")[0] == "Three"


def test_a_leading_space_is_optional_until_it_is_typed(search):
    assert " three" in found(search, "three")
    assert found(search, " three") == found(search, "␣three") == [" three", " threefold"]


@pytest.mark.parametrize(("typed", "text"), [("⏎", "\n"), ("⇥", "\t"), ("$", "$"), ("<b>", "<b>")])
def test_marks_and_markup_are_searched_as_text(search, typed, text):
    assert found(search, typed)[0] == text


def test_a_number_sign_picks_an_id(search):
    assert [(hit.token_id, hit.kind) for hit in search.search("#3")] == [(3, "id")]
    assert search.search(f"#{len(TEXTS)}") == []
    for text in ("#1 2", "#²", "#" + "9" * 5000):
        assert search.search(text) == []


def test_no_query_and_no_match_give_no_hits(search):
    assert search.search("") == []
    assert search.search("no such token") == []


def test_limit(search):
    assert len(search.search("three", limit=2)) == 2
