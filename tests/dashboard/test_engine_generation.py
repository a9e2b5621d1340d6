"""Texts written side by side: each is its intervention's own, from shared random numbers, and they can be stopped."""

import threading

import pytest
import torch

from dashboard.engine import LiveModel
from tests.conftest import tiny_model
from tests.dashboard.live_models import live_model
from tide import Intervention
from tide.cli import UserError

PROMPT = (5, 9, 17, 9, 33)
SIDES = (Intervention(), Intervention.layers_off([0, 1]), Intervention.off([(2, 1)], replacement="mean"))


@pytest.fixture(scope="module")
def live():
    return live_model()


def texts(stream, rows):
    written = [[] for _ in range(rows)]
    for which, token in stream:
        written[which].append(token)
    return written


def by_hand(live, intervention, steps, temperature=0.0, seed=0):
    """Without a cache and without a batch: a whole forward a token."""
    ids, generator = list(PROMPT), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        logits = live.model(torch.tensor([ids]), intervention=intervention, mean_injection=live._mean.injection).logits[
            0, -1
        ]
        if temperature:
            noise = torch.empty_like(logits).exponential_(generator=generator)
            logits = logits / temperature - noise.log()
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_each_text_is_the_one_its_intervention_writes_alone(live, temperature):
    together = texts(live.generate(PROMPT, SIDES, 12, temperature, seed=4), 3)
    assert together == [by_hand(live, side, 12, temperature, seed=4) for side in SIDES]
    assert together[0] != together[1]


def test_greedy_is_what_transformers_generates(live):
    expected = live.model.generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, pad_token_id=1)
    assert texts(live.generate(PROMPT, SIDES[:1], 10), 1)[0] == expected[0, len(PROMPT) :].tolist()


def test_equal_predictions_draw_equal_tokens(live):
    one, other = texts(live.generate(PROMPT, (SIDES[1], SIDES[1]), 20, temperature=2.0, seed=1), 2)
    assert one == other
    assert len(set(one)) > 5  # drawn, not stuck


def test_a_seed_names_a_text(live):
    a, b, c = (texts(live.generate(PROMPT, SIDES[:1], 20, 1.5, seed=s), 1) for s in (1, 1, 2))
    assert a == b != c


def test_tokens_are_drawn_as_often_as_they_are_likely(live):
    run = live.run(PROMPT)
    expected = live.log_probs(run, len(PROMPT) - 1).exp()
    first = [next(live.generate(PROMPT, SIDES[:1], 1, 1.0, seed=seed))[1] for seed in range(400)]
    seen = torch.bincount(torch.tensor(first), minlength=len(expected)) / len(first)
    assert float((seen - expected).abs().sum()) / 2 < 0.2  # total variation; a temperature of 2 or 0.5 gives above 0.3


def test_a_text_ends_with_the_token_that_ends_texts_and_the_other_goes_on(live):
    plain = texts(live.generate(PROMPT, SIDES[:2], 12), 2)
    end = next(token for token in plain[0] if token not in plain[1])
    live.model.generation_config.eos_token_id = [end]
    try:
        short, whole = texts(live.generate(PROMPT, SIDES[:2], 12), 2)
    finally:
        live.model.generation_config.eos_token_id = None
    assert short == plain[0][: plain[0].index(end) + 1]
    assert whole == plain[1]


def test_a_text_ends_at_the_context_length():
    live = LiveModel(tiny_model(max_position_embeddings=8))
    assert len(texts(live.generate(PROMPT, SIDES[:1], 50), 1)[0]) == 3
    with pytest.raises(UserError, match=r"^The prompt fills the 8 tokens that the model reads; shorten it\.$"):
        live.generate((*PROMPT, 1, 2, 3), SIDES[:1], 1)


def test_stop_ends_all_texts_before_their_next_token(live):
    stop, came = threading.Event(), []
    for which, token in live.generate(PROMPT, SIDES, 50, stop=stop):
        came.append((which, token))
        if len(came) == 6:
            stop.set()
    assert [which for which, _ in came] == [0, 1, 2, 0, 1, 2]


def test_others_are_answered_while_a_text_is_written(live):
    live.cache.clear()
    for number, _ in enumerate(live.generate(PROMPT, SIDES[:1], 3)):
        live.run(PROMPT, Intervention.layers_off([number]))  # hangs if the generation kept the device
    assert number == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PROMPT, SIDES, 5, -1.0), r"^The temperature is -1\.0; it must be 0 or above\.$"),
        ((PROMPT, [Intervention.layers_off([7])], 5), "names layer 7"),
        (((), SIDES, 5), "The prompt is empty"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(live, arguments, message):
    with pytest.raises(UserError, match=message):
        live.generate(*arguments)


def test_too_many_tokens_are_refused(live, monkeypatch):
    monkeypatch.setattr("dashboard.engine.live_model.REQUEST_TOKENS", 64)
    with pytest.raises(UserError, match=r"^The 3 texts would have 75 tokens together, more than 64; shorten"):
        live.generate(PROMPT, SIDES, 20)
