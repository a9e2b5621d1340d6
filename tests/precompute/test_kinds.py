import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.kinds import KINDS, token_kinds
from tide.tokens import Vocabulary


def kinds_of(*texts: str) -> list[str]:
    return [KINDS[kind] for kind in token_kinds(texts, ())]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("code", ["(", " {", "=>", "_open", "my_name", "Get_3", "</", "#1", "100%", ").", "~"]),
        ("digit", ["7", " 1984", "4th", "B2", "1.5", "٣"]),
        ("punctuation", [".", " —", "?!", '."\n', "--", "€", "’"]),
        ("capital", ["The", " Paris", "NASA", " É", "\nOnce", "Élan", "I'm"]),
        ("word start", [" the", " élan", "\nonce", "  well-known"]),
        ("inside", ["ing", "the", "né", "e.g"]),
        ("other", ["", " ", "\n\n", "\ufffd", " \ufffd", "the\ufffd", "'s", "-like", "漢字", " 漢", "\x02"]),
    ],
)
def test_kinds(kind, texts):
    assert kinds_of(*texts) == [kind] * len(texts)


def test_special_tokens_come_first():
    texts = ["<|endoftext|>", "(", " the", "<|endoftext|>"]
    kinds = token_kinds(texts, {0, 2, 9})  # an id beyond the end is none of these
    assert kinds.dtype == np.int8
    assert [KINDS[kind] for kind in kinds] == ["special", "code", "special", "code"]


@given(st.lists(st.text(max_size=6), max_size=20))
def test_every_text_has_one_kind(texts):
    kinds = kinds_of(*texts)
    assert len(kinds) == len(texts)
    for text, kind in zip(texts, kinds, strict=True):
        assert kind != "special"
        assert (kind == "code") == any(char in "{}[]()<>=_/\\|#$%&*+@^~`" for char in text)
        if kind in ("punctuation", "other"):
            assert not any(map(str.isdecimal, text))


@given(st.text("abcxyzäß", min_size=1))
def test_a_space_before_a_word_makes_it_a_start(word):
    assert kinds_of(word, " " + word, word.capitalize()) == ["inside", "word start", "capital"]


def test_a_whole_vocabulary(tokenizer):
    vocabulary = Vocabulary(tokenizer, len(tokenizer) + 3)
    kinds = token_kinds(vocabulary.texts, vocabulary.special_ids)
    assert np.flatnonzero(kinds == KINDS.index("special")).tolist() == sorted(vocabulary.special_ids)
    assert (kinds[-3:] == KINDS.index("other")).all()  # ids that the tokenizer does not have
