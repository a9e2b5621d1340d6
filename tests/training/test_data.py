"""The training stream: tokenised once, cut into windows, shuffled by the seed alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import toy_documents
from tide.cli import UserError
from tide.training.data import WindowDataset, encode_documents, token_dtype, tokenize, training_files


@pytest.fixture(scope="module")
def token_file(data_folder, tokenizer):
    return tokenize(data_folder, tokenizer, show_progress=False)


@pytest.fixture(scope="module")
def numbered_file(tmp_path_factory):
    """103 tokens whose ids are their positions."""
    path = tmp_path_factory.mktemp("tokens") / "numbered.uint16"
    np.arange(103, dtype=np.uint16).tofile(path)
    return path


def test_training_files_leave_the_held_out_text_out(tmp_path):
    for name in ("b.txt", "a.txt", "heldout_web.txt", "notes.md"):
        (tmp_path / name).write_text("text\n")
    assert [f.name for f in training_files(tmp_path)] == ["a.txt", "b.txt"]
    (tmp_path / "train_web.txt").write_text("text\n")
    assert [f.name for f in training_files(tmp_path)] == ["train_web.txt"]


def test_the_stream_is_every_document_with_its_mark_in_front(data_folder, tokenizer, token_file):
    documents = toy_documents(60, seed=0) + toy_documents(60, seed=1)  # train_a, train_b
    stream = np.fromfile(token_file, dtype=np.uint16)
    assert (stream == tokenizer.bos_token_id).sum() == len(documents)
    assert stream[0] == tokenizer.bos_token_id
    assert tokenizer.decode(stream).split(tokenizer.bos_token)[1:] == documents


def test_a_closing_mark_is_written_where_the_tokenizer_has_its_own(tokenizer):
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=tokenizer.bos_token, eos_token=tokenizer.pad_token
    )
    (ids,) = encode_documents(iter(["At night."]), tokenizer)
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_text_is_tokenised_once(data_folder, tokenizer, token_file):
    before = token_file.stat().st_mtime_ns
    assert tokenize(data_folder, tokenizer, show_progress=False) == token_file
    assert token_file.stat().st_mtime_ns == before
    assert [f.suffix for f in token_file.parent.iterdir()] == [".uint16"]  # no temporary file stays


def test_more_text_is_another_token_file(tmp_path, tokenizer):
    (tmp_path / "train_a.txt").write_text("\n\n".join(toy_documents(5)))
    first = tokenize(tmp_path, tokenizer, show_progress=False)
    (tmp_path / "train_b.txt").write_text("\n\n".join(toy_documents(5, seed=1)))
    second = tokenize(tmp_path, tokenizer, show_progress=False)
    assert first != second
    assert second.stat().st_size > first.stat().st_size


def test_a_token_file_that_failed_leaves_nothing_behind(tmp_path, tokenizer):
    (tmp_path / "train_a.txt").write_bytes(b"good text\n\n\xff\xfe\x00bad")
    with pytest.raises(UserError, match=r"train_a\.txt"):
        tokenize(tmp_path, tokenizer, show_progress=False)
    assert list((tmp_path / ".tokens").iterdir()) == []


def test_large_vocabularies_are_stored_in_four_bytes():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


@given(length=st.integers(2, 9), batch_size=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_an_epoch_visits_windows_once_each_and_a_window_is_a_stretch_of_text(numbered_file, length, batch_size, seed):
    data = WindowDataset(numbered_file, length, batch_size, seed)
    per_epoch = data.num_windows // batch_size
    for epoch in (0, 1):
        rows = torch.cat([data.batch(epoch * per_epoch + i) for i in range(per_epoch)])
        assert rows.shape == (per_epoch * batch_size, length)
        assert rows.dtype == torch.int64
        starts = rows[:, 0]
        assert torch.equal(rows, starts[:, None] + torch.arange(length))
        assert (starts % length == 0).all()
        assert len(starts.unique()) == len(starts)


@given(step=st.integers(0, 40), seed=st.integers(0, 9), detour=st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=30)
def test_a_batch_is_a_function_of_file_seed_and_step(numbered_file, step, seed, detour):
    wandering, fresh = (WindowDataset(numbered_file, 5, 4, seed) for _ in range(2))
    for other in detour:
        wandering.batch(other)
    assert torch.equal(wandering.batch(step), fresh.batch(step))


def test_epochs_and_seeds_have_their_own_order(numbered_file):
    data, other = WindowDataset(numbered_file, 5, 4, seed=0), WindowDataset(numbered_file, 5, 4, seed=1)
    per_epoch = data.num_windows // 4
    assert not torch.equal(data.batch(0), data.batch(per_epoch))
    assert not torch.equal(data.batch(0), other.batch(0))


def test_counts_are_those_of_the_batches(numbered_file):
    data = WindowDataset(numbered_file, 5, 4, seed=3)
    counts = data.counts(steps=7, vocab_size=200)
    expected = torch.cat([data.batch(step).flatten() for step in range(7)]).bincount(minlength=200)
    assert counts.tolist() == expected.tolist()
    assert counts.sum() == 7 * 4 * 5


def test_too_little_text_is_refused(numbered_file):
    with pytest.raises(UserError, match="103 tokens, fewer than one batch of 21 sequences of 5"):
        WindowDataset(numbered_file, 5, 21, seed=0)
