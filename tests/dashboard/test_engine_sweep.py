"""The sweep: every switch-off measured as one forward each would, ranked, kept, and never in the way."""

import numpy as np
import pandas as pd
import pytest
import torch

from dashboard.engine import LiveModel
from dashboard.engine.sweep import CHUNK_TOKENS
from tests.conftest import tiny_model
from tests.dashboard.live_models import BANKS, LAYERS, live_model
from tide import Intervention
from tide.cli import UserError

PROMPT = (5, 9, 17, 9, 33, 60, 5, 21, 9)
TARGET = 33


@pytest.fixture(scope="module")
def live():
    return live_model()


def one_by_one(live, position, intervention):
    """(KL, change of log p(target)) by two plain forwards."""
    log_p, log_q = (
        live.model(torch.tensor([PROMPT]), intervention=i).logits[0, position].log_softmax(-1)
        for i in (None, intervention)
    )
    return float((log_p.exp() * (log_p - log_q)).sum()), float((log_q - log_p)[TARGET])


@pytest.mark.parametrize("chunk_tokens", [1, 25, 10_000])
@pytest.mark.parametrize("position", [0, 4, len(PROMPT) - 1])
def test_every_row_is_what_a_forward_of_its_own_finds(live, position, chunk_tokens, monkeypatch):
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", chunk_tokens)
    live.cache.clear()
    table = live.sweep(PROMPT, position, TARGET, control_seed=7)
    wanted = {("layer", layer, -1) for layer in range(LAYERS)}
    wanted |= {("pair", layer, bank) for layer in range(LAYERS) for bank in range(BANKS)}
    assert set(table[["kind", "layer", "bank"]].itertuples(index=False, name=None)) == wanted
    assert len(table) == len(wanted)
    assert table["kl"].is_monotonic_decreasing
    for row in table.itertuples():
        where = Intervention.off if row.kind == "pair" else Intervention.layers_off
        what = [(row.layer, row.bank)] if row.kind == "pair" else [row.layer]
        kl, delta = one_by_one(live, position, where(what))
        control_kl, control_delta = one_by_one(live, position, where(what, replacement="random", seed=7))
        np.testing.assert_allclose(
            [row.kl, row.delta, row.control_kl, row.control_delta],
            [kl, delta, control_kl, control_delta],
            rtol=1e-4,
            atol=2e-6,
        )


def test_without_controls_their_columns_are_empty_and_the_rest_the_same(live):
    with_controls, without = (live.sweep(PROMPT, 4, TARGET, control_seed=seed) for seed in (0, None))
    assert without[["control_kl", "control_delta"]].isna().all(axis=None)
    columns = ["kind", "layer", "bank", "kl", "delta"]
    pd.testing.assert_frame_equal(with_controls[columns], without[columns], atol=1e-6)


def test_progress_counts_switches_up_to_all_of_them(live):
    live.cache.clear()
    told = []
    live.sweep(PROMPT, 8, TARGET, progress=lambda done, of: told.append((done, of)))
    switches = LAYERS * (BANKS + 1)
    assert told == sorted(told)
    assert told[-1] == (switches, switches)


def test_a_sweep_that_ran_is_not_run_again_and_belongs_to_who_asked(live):
    first = live.sweep(PROMPT, 3, TARGET)
    first["kl"] = 0.0
    told = []
    again = live.sweep(PROMPT, 3, TARGET, progress=lambda *counts: told.append(counts))
    assert not told
    assert (again["kl"] > 0).any()


def test_what_progress_raises_ends_the_sweep_and_the_next_request_works(live):
    live.cache.clear()

    def leave(done, of):
        raise KeyError("another page")

    with pytest.raises(KeyError):
        live.sweep(PROMPT, 8, TARGET, progress=leave)
    assert len(live.sweep(PROMPT, 8, TARGET)) == LAYERS * (BANKS + 1)


def test_others_are_answered_while_a_sweep_runs(live):
    live.cache.clear()
    answered = []

    def ask(done, of):  # between two chunks the device is free: a request from elsewhere would otherwise hang here
        answered.append(live.run(PROMPT, Intervention.layers_off([done % LAYERS])))

    live.sweep(PROMPT, 8, TARGET, progress=ask)
    assert len(answered) == LAYERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PROMPT, 9, TARGET), r"^The prompt has no position 9, only 0\.\.8\.$"),
        ((PROMPT, 3, 61), r"^Token id 61 is outside the vocabulary, 0\.\.60\.$"),
        (((5, 99), 0, TARGET), r"^Token id 99 is outside"),
    ],
)
def test_wrong_questions_are_refused_in_one_sentence(live, arguments, message):
    with pytest.raises(UserError, match=message):
        live.sweep(*arguments)


def test_a_sweep_that_is_too_long_says_what_to_do(live, monkeypatch):
    monkeypatch.setattr("dashboard.engine.live_model.SWEEP_TOKENS", 100)
    live.cache.clear()
    with pytest.raises(UserError, match=r"takes 24 forwards of 9 tokens, more than 100 tokens together; mark an earl"):
        live.sweep(PROMPT, 8, TARGET)
    assert len(live.sweep(PROMPT, 3, TARGET)) == LAYERS * (BANKS + 1)


def test_a_base_model_has_nothing_to_sweep():
    with pytest.raises(UserError, match="no memory to switch off"):
        LiveModel(tiny_model(num_memory_blocks=0)).sweep(PROMPT, 3, TARGET)
