"""The held-out text in windows: nothing is left out, nothing comes twice, no window crosses a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precompute.text
from precompute.text import HeldOutText, domain_names

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any)


def held_out(lengths: list[int], window: int) -> HeldOutText:
    starts = np.cumsum([0, *lengths])
    return HeldOutText(np.arange(starts[-1], dtype=np.int32), starts, [f"d{i}" for i in range(len(lengths))], window)


@given(LENGTHS, st.integers(2, 12), st.integers(1, 50), st.integers(1, 30))
def test_every_position_is_in_one_window_of_its_file(lengths, window, batch_tokens, piece_tokens):
    text = held_out(lengths, window)
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(precompute.text, "PIECE_TOKENS", piece_tokens)
        pieces = text.pieces()
        for piece in pieces:
            for batch in text.batches(text.windows_of(piece), batch_tokens):
                np.testing.assert_array_equal(batch.input_ids, batch.positions)  # tokens are numbered here
                assert batch.input_ids.shape[1] <= window
                assert len(batch.input_ids) == 1 or batch.input_ids.size <= batch_tokens
                files = np.searchsorted(text.file_starts, batch.positions, side="right") - 1
                lost = np.isin(np.flatnonzero(np.diff(text.file_starts) == 0), files)
                assert not lost.any()
                np.testing.assert_array_equal(files, np.repeat(batch.domains[:, None], files.shape[1], axis=1))
                seen.append(batch.positions.ravel())
    assert np.concatenate(seen).tolist() == list(range(len(text)))


@given(LENGTHS, st.integers(2, 12), st.integers(1, 200))
def test_a_probe_takes_whole_windows_of_every_file(lengths, window, tokens):
    text = held_out(lengths, window)
    chosen = text.probe(tokens)
    assert chosen == sorted(set(chosen))
    assert {int(text.window_domains[w]) for w in chosen} == {i for i, length in enumerate(lengths) if length}
    for w in chosen:
        whole = text.window_lengths[w] == window
        assert whole or lengths[text.window_domains[w]] < window


def test_a_probe_is_spread_over_the_text():
    assert held_out([100], 10).probe(20) == [2, 7]
    assert held_out([100], 10).probe(10**6) == list(range(10))


def test_files_of_one_name_are_told_apart(tmp_path):
    files = [tmp_path / "heldout_books.txt", tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"]
    assert domain_names(files) == ["books", "x 1", "x 2"]


def test_contexts_stay_within_the_window(artifacts, job):
    text = HeldOutText.open(artifacts)
    position = text.length + 3
    ids, index = artifacts.context(position, before=16, after=2)
    assert index == 3
    assert ids.tolist() == text.read(text.length, position + 3).tolist()
    assert artifacts.domain_of(position) == "text"
    with pytest.raises(ValueError, match="There is no position"):
        artifacts.context(len(text))
