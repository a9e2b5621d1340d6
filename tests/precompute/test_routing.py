import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precompute.routing import ONCE_CONTEXT, ONCE_TOKENS, contexts_of_once, routing_statistics
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


def test_the_mean_injection_is_that_of_single_positions():
    model = tiny_model()
    tokens = np.random.default_rng(1).integers(61, size=5 * 16 + 3)
    made = routing_statistics(model, tokens, np.zeros(61), window=16, batch_tokens=32, show_progress=False)["routing"]
    total = np.zeros((3, 3, 32))
    for start in range(0, len(tokens), 16):
        trace = model.trace(torch.from_numpy(tokens[None, start : start + 16]))
        for routing, memory in zip(trace.routing[0].double(), trace.memory[0].double(), strict=True):
            for layer in range(3):
                for bank in range(3):
                    total[layer, bank] += (routing[layer, bank] * memory[bank]).numpy()
    assert made["mean_injection"].dtype == np.float32
    np.testing.assert_allclose(made["mean_injection"], total / len(tokens), atol=1e-6)


def test_a_model_without_banks_injects_nothing():
    made = routing_statistics(tiny_model(num_memory_blocks=0), np.arange(9), np.zeros(61), show_progress=False)
    assert made["routing"]["mean_injection"].shape == (3, 0, 32)


@given(st.lists(st.integers(0, 40), max_size=400), st.integers(1, 90))
def test_contexts_end_in_a_token_that_occurs_once_and_begin_with_a_window(tokens, window):
    tokens = np.array(tokens, dtype=np.int32)
    n = np.bincount(tokens, minlength=61)
    contexts = contexts_of_once(tokens, n, window)
    wanted = [t for t in np.flatnonzero(n == 1) if np.flatnonzero(tokens == t)[0] % window < ONCE_CONTEXT]
    assert contexts.shape == (min(len(wanted), ONCE_TOKENS), ONCE_CONTEXT)
    ends = []
    for context in contexts:
        ids = context[context >= 0]
        assert (context[len(ids) :] == -1).all()
        place = int(np.flatnonzero(tokens == ids[-1])[0])
        assert ids.tolist() == tokens[place - place % window : place + 1].tolist()
        ends.append(int(ids[-1]))
    assert len(set(ends)) == len(ends)
    assert set(ends) <= set(wanted)


def test_the_routing_of_a_token_seen_once_is_that_of_its_context(measured):
    made = measured[0]
    contexts = [context[context >= 0] for context in made["once_contexts"]]
    assert 50 in [int(context[-1]) for context in contexts]
    for context in contexts:
        live = tiny_model().trace(torch.from_numpy(context[None].astype(np.int64))).routing[0, -1].numpy()
        np.testing.assert_allclose(made["mean"][context[-1]], live, atol=1e-5)


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
