"""What a person sees of a token: nothing hidden, nothing read as markup."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tide.tokens import Vocabulary, as_html, as_markdown, shorten, show_bytes
from tide.training.tokenizer import train_tokenizer

TEXT = [" three\n\tthe cat's naïve <b>bold</b> *x* `code` $y$ 日本", "two three four"] * 20


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(train_tokenizer(iter(TEXT), 400))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b" three", "␣three"),
        (b"\n", "⏎"),
        (b"\t", "⇥"),
        (b"\xe4", "⟨E4⟩"),
        (b" \xc3", "␣⟨C3⟩"),
        ("naïve".encode(), "naïve"),
        ("\u200b".encode(), "⟨U+200B⟩"),
        ("\u202e".encode(), "⟨U+202E⟩"),  # would turn the rest of the page right to left
        ("\u00a0".encode(), "⟨U+00A0⟩"),
        ("␣".encode(), "⟨U+2423⟩"),  # a literal mark is not taken for a space
        ("\u0301".encode(), "◌\u0301"),
    ],
)
def test_bytes_are_shown_without_anything_hidden(raw, shown):
    assert show_bytes(raw) == shown


@given(st.binary(min_size=1, max_size=8))
def test_every_byte_sequence_has_a_visible_form_without_white_space(raw):
    shown = show_bytes(raw)
    assert shown
    assert not re.search(r"\s", shown)


@given(st.binary(min_size=1, max_size=6), st.binary(min_size=1, max_size=6))
def test_different_bytes_are_shown_differently(a, b):
    # A combining mark gets a dotted circle in front, which no other character is shown as.
    assert (show_bytes(a) == show_bytes(b)) == (a == b)


def test_bytes_of_all_tokens_join_to_the_text(vocabulary):
    text = " three naïve 日本\n\t<b>"
    ids = vocabulary.tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(vocabulary.token_bytes(i) for i in ids).decode() == text


def test_special_tokens_are_bracketed_and_known_as_special(vocabulary):
    bos = vocabulary.tokenizer.bos_token_id
    assert vocabulary.show(bos) == "[<|endoftext|>]"
    assert bos in vocabulary.special_ids
    assert vocabulary.tokenizer.convert_tokens_to_ids("e") not in vocabulary.special_ids


def test_an_id_outside_the_vocabulary_is_refused_in_one_sentence(vocabulary):
    with pytest.raises(IndexError, match=r"^Token id 9999 is outside the vocabulary, 0\.\.\d+\.$"):
        vocabulary.show(9999)


def test_ids_that_the_tokenizer_lacks_are_shown_as_unused(vocabulary):
    larger = Vocabulary(vocabulary.tokenizer, size=len(vocabulary) + 3)
    assert larger.show(len(vocabulary) + 1) == f"[unused {len(vocabulary) + 1}]"
    assert larger.text(len(vocabulary) + 1) == ""


@given(st.text(max_size=30))
def test_html_is_never_markup_and_keeps_the_text(shown):
    escaped = as_html(shown)
    assert "<" not in escaped
    assert html.unescape(escaped) == shown


@given(st.text(alphabet="*_`~[]()<>#!|$:\\&-+.=ab1 ", min_size=1, max_size=20))
def test_markdown_is_never_markup_and_keeps_the_text(shown):
    escaped = as_markdown(shown)
    assert not re.search(r"[*_`~\[\]<>|$:\\]", escaped)
    rendered = MarkdownIt("commonmark").render(f"x{escaped}x")
    assert re.fullmatch(r"<p>[^<]*</p>\n", rendered)
    assert html.unescape(rendered[3:-5]) == f"x{shown}x"


@given(st.integers(3, 40), st.text(alphabet="abcdef", max_size=80))
def test_shortening_keeps_both_ends_and_the_width(width, shown):
    short = shorten(shown, width)
    assert len(short) <= width or short == shown
    if len(shown) > width:
        assert len(short) == width
        assert shown.startswith(short.split("…")[0])
        assert shown.endswith(short.split("…")[1])
