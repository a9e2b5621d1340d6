import numpy as np
import pytest
import torch

from precompute.routing import routing_statistics
from precompute.text import encode_files, windows
from tests.conftest import tiny_model, toy_documents


@pytest.fixture(scope="module")
def measured():
    """The statistics of a random text, and every single routing weight that went into them."""
    model = tiny_model()
    tokens = np.random.default_rng(0).integers(2, 40, size=7 * 16 + 5).astype(np.int32)  # ids 40..60 never occur
    tokens[3] = 50  # once
    deciles = np.arange(61) % 11 - 1
    made = routing_statistics(model, tokens, deciles, window=16, batch_tokens=48, show_progress=False)["routing"]
    routing = []
    for start in range(0, len(tokens), 16):  # one window at a time
        ids = torch.from_numpy(tokens[start : start + 16].astype(np.int64))[None]
        routing.append(model.trace(ids).routing[0].double().numpy())
    return made, tokens, deciles, np.concatenate(routing)


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:Mean of empty", "ignore:invalid value")
def test_by_token_id(measured):
    made, tokens, _, routing = measured
    for token_id in range(61):
        here = routing[tokens == token_id]
        assert made["n"][token_id] == len(here)
        np.testing.assert_allclose(made["mean"][token_id], here.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(made["sd"][token_id], here.std(axis=0, ddof=1), atol=1e-6)


def test_a_token_seen_once_has_a_mean_and_no_spread(measured):
    made = measured[0]
    assert made["n"][50] == 1
    assert np.isfinite(made["mean"][50]).all()
    assert np.isnan(made["sd"][50]).all()
    assert np.isnan(made["mean"][60]).all()


def test_by_decile_and_overall(measured):
    made, tokens, deciles, routing = measured
    for decile in range(10):
        here = routing[deciles[tokens] == decile]
        assert made["decile_n"][decile] == len(here)
        np.testing.assert_allclose(made["decile_mean"][decile], here.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(made["decile_sd"][decile], here.std(axis=0, ddof=1), atol=1e-6)
    assert made["overall_n"].tolist() == [len(tokens)]
    np.testing.assert_allclose(made["overall_mean"], routing.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(made["overall_sd"], routing.std(axis=0, ddof=1), atol=1e-6)


def test_mean_weights_sum_to_one(measured):
    made = measured[0]
    seen = made["n"] > 0
    np.testing.assert_allclose(made["mean"][seen].sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(("length", "batch_size"), [(4, 3), (7, 1), (100, 2), (5, 100)])
def test_windows_leave_no_token_out_and_follow_one_another(length, batch_size):
    tokens = np.arange(53)
    batches = list(windows(tokens, length, batch_size))
    assert np.concatenate([b.reshape(-1) for b in batches]).tolist() == tokens.tolist()
    assert all(b.shape[1] <= length and b.shape[0] <= batch_size for b in batches)


def test_the_stream_puts_the_document_mark_before_every_document(tmp_path, tokenizer):
    documents = toy_documents(3)
    (tmp_path / "a.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    expected = [i for d in documents for i in [0, *tokenizer(d, add_special_tokens=False)["input_ids"]]]
    assert encode_files([tmp_path / "a.txt"], tokenizer).tolist() == expected
