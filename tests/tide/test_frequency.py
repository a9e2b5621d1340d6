from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import toy_documents
from tide.frequency import GROUPS, count_tokens, frequency_deciles
from tide.tokens import Vocabulary
from tide.training.corpus import read_documents


def test_ten_types_fill_the_ten_bins_in_order_of_count():
    counts = np.array([50, 10, 90, 20, 80, 30, 70, 40, 60, 100])
    assert frequency_deciles(counts, [f"w{i}" for i in range(10)]).tolist() == [4, 0, 8, 1, 7, 2, 6, 3, 5, 9]


def test_types_of_equal_count_are_ordered_by_id():
    assert frequency_deciles(np.full(20, 7), ["a"] * 20).tolist() == [i // 2 for i in range(20)]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "—", " ,", "\ufffd", "_"])
def test_a_type_without_a_letter_or_digit_has_no_decile(text):
    assert frequency_deciles(np.array([5, 5]), [text, "word"]).tolist() == [-1, 0]


@pytest.mark.parametrize("text", [" a", "7", "é", "\ufffda", "中", "n't"])
def test_a_type_with_a_letter_or_digit_has_one(text):
    assert frequency_deciles(np.array([5]), [text])[0] == 0


def test_unseen_and_special_types_have_no_decile():
    assert frequency_deciles(np.array([9, 0, 3]), ["<bos>", "never", "seen"], special_ids={0}).tolist() == [-1, -1, 0]


def test_ids_beyond_the_texts_have_no_decile():
    assert frequency_deciles(np.array([1, 2, 3]), ["a"]).tolist() == [0, -1, -1]


def test_no_observed_type_is_no_error():
    assert frequency_deciles(np.zeros(3, dtype=int), ["a", "b", "c"]).tolist() == [-1, -1, -1]


def test_the_groups_are_the_ten_deciles():
    assert sorted(d for group in GROUPS.values() for d in group) == list(range(10))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_bins_are_of_equal_type_count_and_ascend(counts):
    counts = np.array(counts)
    deciles = frequency_deciles(counts, ["x"] * len(counts))
    assert ((deciles >= 0) == (counts > 0)).all()
    sizes = np.bincount(deciles[deciles >= 0], minlength=10)
    assert sizes.max() - sizes.min() <= 1
    for rarer in range(9):
        below, above = counts[deciles == rarer], counts[deciles == rarer + 1]
        assert not len(below) or not len(above) or below.max() <= above.min()


def test_a_vocabulary_brings_texts_and_special_ids(tokenizer):
    vocabulary = Vocabulary(tokenizer, size=len(tokenizer) + 3)
    counts = np.ones(len(tokenizer) + 3, dtype=int)
    deciles = frequency_deciles(counts, vocabulary)
    expected = frequency_deciles(counts, vocabulary.texts, vocabulary.special_ids)
    assert deciles.tolist() == expected.tolist()
    assert deciles[tokenizer.bos_token_id] == -1


def test_counting_equals_encoding_each_document(tmp_path, tokenizer):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for seed, file in enumerate(files):
        file.write_text("\n\n".join(toy_documents(5, seed)) + "\n", encoding="utf-8")
    expected = np.zeros(400, dtype=np.int64)
    for file in files:
        for document in read_documents(file):
            np.add.at(expected, tokenizer(document)["input_ids"], 1)
    documents = chain.from_iterable(map(read_documents, files))
    counts = count_tokens(documents, tokenizer, vocab_size=400, show_progress=False)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()
    assert counts[tokenizer.bos_token_id] == 10
