"""The live engine: what it answers, what it refuses, and that sessions do not disturb each other."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dashboard.engine import Engine, ranking, shared_engine
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


def test_a_replacement_by_the_mean_needs_one_of_this_model(checkpoint, prompt):
    engine = Engine(checkpoint, device="cpu")
    intervention = Intervention.layers_off([1], replacement="mean")
    with pytest.raises(UserError, match=r"^Replacing by the mean needs the mean injections, .* run tide-precompute"):
        engine.run(prompt, intervention)
    with pytest.raises(UserError, match=r"shape \[2, 3, 32\], the model needs \[3, 3, 32\]; run tide-precompute"):
        engine.with_mean_injection(np.zeros((2, 3, 32)))
    mean = np.random.default_rng(0).normal(size=(3, 3, 32)).astype(np.float32)
    engine = engine.with_mean_injection(mean)
    trace = engine.model.trace(torch.tensor([prompt]), intervention, mean_injection=torch.tensor(mean))
    assert torch.equal(engine.run(prompt, intervention).trace.hidden, trace.hidden)


def test_a_dtype_can_be_asked_for(checkpoint, prompt):
    engine = Engine(checkpoint, device="cpu", dtype=torch.bfloat16)
    assert engine.description == "cpu bfloat16"
    assert engine.run(prompt).stream.dtype == torch.bfloat16
    assert np.isfinite(engine.surprisal(engine.run(prompt))).all()
    assert len(engine.sweep(prompt, 3, 7)) == 12
    assert len(list(engine.generate(prompt, [Intervention(), Intervention.layers_off([0])], 3))) == 6


def test_all_sessions_share_one_engine_of_a_checkpoint_device_and_dtype(checkpoint):
    with ThreadPoolExecutor(4) as pool:
        engines = set(pool.map(lambda _: shared_engine(checkpoint, "a", "cpu"), range(8)))
    assert len(engines) == 1
    assert shared_engine(checkpoint, "b", "cpu") not in engines  # trained anew
    assert shared_engine(checkpoint, "a", "cpu", torch.bfloat16) not in engines
