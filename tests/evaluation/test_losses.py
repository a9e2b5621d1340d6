"""Losses per position, and windows of text."""

import numpy as np
import pytest
import torch

from tests.conftest import VOCAB_SIZE, toy_documents
from tide import Intervention
from tide.cli import UserError
from tide.evaluation import heldout_windows, losses, perplexity, token_losses
from tide.training.data import encode_documents


@pytest.fixture
def windows():
    return np.random.default_rng(0).integers(VOCAB_SIZE, size=(5, 12))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 99])
@pytest.mark.parametrize("max_bytes", [1, 7 * 4 * VOCAB_SIZE, 2**28])
def test_losses_are_transformers_own_position_by_position(make_model, windows, batch_size, max_bytes, monkeypatch):
    monkeypatch.setattr(losses, "MAX_LOGITS_BYTES", max_bytes)
    model = make_model(z_loss_coefficient=0.0)
    found = token_losses(model, windows, batch_size)
    assert found.shape == (5, 11)
    assert found.dtype == np.float32
    ids = torch.from_numpy(windows)
    with torch.no_grad():
        logits = model(ids).logits
        mean = model(ids, labels=ids).loss
    expected = -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert found.mean() == pytest.approx(mean.item(), rel=1e-5)
    assert perplexity(found) == pytest.approx(mean.exp().item(), rel=1e-5)


def test_the_z_loss_is_no_part_of_it(make_model, windows):
    with_z, without = make_model(z_loss_coefficient=1.0), make_model(z_loss_coefficient=0.0)
    assert np.array_equal(token_losses(with_z, windows, 5), token_losses(without, windows, 5))


def test_losses_under_an_intervention(make_model, windows):
    off = Intervention.layers_off([0])
    plain, ablated = (token_losses(make_model(), windows, 5, intervention=i) for i in (None, off))
    with torch.no_grad():
        logits = make_model()(torch.from_numpy(windows), intervention=off).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, torch.from_numpy(windows[:, 1:]), reduction="none")
    np.testing.assert_allclose(ablated, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(plain, ablated, atol=1e-2)


@pytest.mark.parametrize("length", [2, 7, 64])
def test_windows_hold_every_token_of_the_stream_once_and_in_order(data_folder, tokenizer, length):
    file = data_folder / "heldout_c.txt"
    stream = np.concatenate(list(encode_documents(iter(toy_documents(60, seed=2)), tokenizer)))
    windows = heldout_windows(file, tokenizer, length)
    assert windows.dtype == np.int64
    assert windows.shape == (len(stream) // length, length)
    assert np.array_equal(windows.ravel(), stream[: windows.size])
    assert len(stream) - windows.size < length
    assert windows[0, 0] == tokenizer.bos_token_id


def test_windows_stop_at_max_tokens(data_folder, tokenizer):
    file = data_folder / "heldout_c.txt"
    some, all_of_them = heldout_windows(file, tokenizer, 8, max_tokens=43), heldout_windows(file, tokenizer, 8)
    assert np.array_equal(some, all_of_them[:5])


def test_a_text_that_fills_no_window_is_refused(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("At night.\n")
    with pytest.raises(UserError, match=r"short\.txt gives \d+ tokens, less than one window of 64"):
        heldout_windows(tmp_path / "short.txt", tokenizer, 64)
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        heldout_windows(tmp_path / "nowhere.txt", tokenizer, 64)
