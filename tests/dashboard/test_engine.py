"""The live engine: what it answers, what it refuses, and that sessions do not disturb each other."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dashboard.engine import CACHED_RUNS, Engine, ranking
from tests.conftest import tiny_model, toy_documents
from tide import Intervention
from tide.cli import UserError
from tide.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(iter(toy_documents(50)), 300)
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.encode("The red fox counts the stars")


def test_log_probs_are_the_models_own(engine, prompt):
    expected = engine.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    run = engine.run(prompt)
    for position in (0, len(prompt) - 1):
        torch.testing.assert_close(engine.log_probs(run, position), expected[position])


def test_a_run_with_nothing_switched_is_the_run_as_trained(engine, prompt):
    assert engine.run(prompt, Intervention()) is engine.run(prompt)
    assert engine.compare(engine.run(prompt), engine.run(prompt, Intervention()), 3).kl == 0.0


def test_a_switch_changes_the_prediction_and_not_the_trained_run(engine, prompt):
    before = engine.log_probs(engine.run(prompt), 4).clone()
    switched = engine.run(prompt, Intervention.layers_off([0, 1, 2]))
    comparison = engine.compare(engine.run(prompt), switched, 4)
    assert comparison.kl > 0
    np.testing.assert_allclose(switched.routing[..., -1], 1.0, rtol=1e-6)
    assert np.all(switched.injection_ratio == 0.0)
    torch.testing.assert_close(engine.log_probs(engine.run(prompt), 4), before, rtol=0, atol=0)


def test_ranks_and_changes_of_the_two_tables_agree(engine, prompt):
    trained, switched = engine.run(prompt), engine.run(prompt, Intervention.off([(0, 1), (2, 0)]))
    log_p, log_q = engine.log_probs(trained, 5), engine.log_probs(switched, 5)
    table = ranking(log_q, log_p, k=len(log_q))
    assert sorted(table["other_rank"]) == list(range(1, len(log_q) + 1))
    np.testing.assert_allclose(table["probability"].sum(), 1.0, rtol=1e-5)
    row = table.iloc[7]
    assert row["delta"] == pytest.approx(float(log_q[int(row["token_id"])] - log_p[int(row["token_id"])]), abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "The prompt is empty"), ("fox " * 200, "The prompt has .* tokens, the model reads at most 64")],
)
def test_prompts_that_cannot_be_read_are_refused_in_one_sentence(engine, prompt, message):
    with pytest.raises(UserError, match=message):
        engine.encode(prompt)


def test_a_token_id_out_of_range_is_refused_in_one_sentence(engine):
    with pytest.raises(UserError, match=r"^Token id 5000 is outside the vocabulary, 0\.\.\d+\.$"):
        engine.run((0, 5000))


def test_an_intervention_of_another_model_is_refused_in_one_sentence(engine, prompt):
    with pytest.raises(UserError, match=r"names layer 9, but the model has layers 0\.\.2\."):
        engine.run(prompt, Intervention.layers_off([9]))


def test_a_foreign_checkpoint_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="There is no checkpoint folder"):
        Engine(tmp_path / "nothing", device="cpu")


def test_the_cache_is_bounded(engine, prompt):
    for length in range(1, len(prompt)):
        for layer in range(3):
            for bank in range(3):
                engine.run(prompt[:length], Intervention.off([(layer, bank)]))
    assert len(engine._runs) <= CACHED_RUNS


def test_threads_with_different_switches_get_their_serial_results(checkpoint, prompt):
    wanted = [Intervention.off([(layer, bank)]) for layer in range(3) for bank in range(3)] * 4
    serial_engine, shared = Engine(checkpoint, device="cpu"), Engine(checkpoint, device="cpu")
    serial = [serial_engine.log_probs(serial_engine.run(prompt, i), 4) for i in wanted]
    with ThreadPoolExecutor(8) as pool:
        threaded = list(pool.map(lambda i: shared.log_probs(shared.run(prompt, i), 4), wanted))
    for a, b in zip(serial, threaded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
