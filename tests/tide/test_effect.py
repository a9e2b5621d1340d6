"""What interventions do to token ids and routing weights, against plain loops."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_config
from tests.tide.test_intervention import BANKS, EDITS, LAYERS, TOKENS
from tide import Intervention
from tide.effect import Effect, random_direction
from tide.intervention import Off, Rule, Swap

SIZE = 32  # d of the tiny model
MEAN = torch.randn(LAYERS, BANKS, SIZE, generator=torch.Generator().manual_seed(5))
CONFIG = tiny_config()
SEEDS = st.integers(0, 2**16)


def drawn(seed, rows, length):
    """Routing weights, memory, token ids and position ids of a forward that never ran."""
    generator = torch.Generator().manual_seed(seed)
    routing = (3 * torch.randn(rows, length, BANKS + 1, generator=generator)).softmax(-1)
    memory = torch.randn(rows, length, BANKS, SIZE, generator=generator)
    ids = torch.randint(2, TOKENS + 1, (rows, length), generator=generator)
    shared = torch.rand((), generator=generator) < 0.5
    starts = torch.randint(0, 4, (1 if shared else rows, 1), generator=generator)
    return routing, memory, ids, starts + torch.arange(length)


def strongest(edits, kind, position, layer=None, bank=None, token=None):
    """The edit that wins at one place, by the words of `tide.intervention`; None where none acts."""
    best, best_rank = None, None
    for edit in edits:
        if not isinstance(edit, kind) or (edit.positions is not None and position not in edit.positions):
            continue
        if isinstance(edit, Swap) and edit.token != token:
            continue
        has_layer = getattr(edit, "layer", None) is not None
        has_bank = getattr(edit, "bank", None) is not None
        if (has_layer and edit.layer != layer) or (has_bank and edit.bank != bank):
            continue
        place = {(True, True): 3, (True, False): 2, (False, True): 1, (False, False): 0}[has_layer, has_bank]
        rank = (edit.positions is not None, place, -len(edit.positions or ()), sorted(edit.positions or ()))
        if best_rank is None or rank > best_rank:
            best, best_rank = edit, rank
    return best


def by_hand(edits, layer, weights, rows, position):
    """One place: its K+1 weights and K rows to the K+1 weights that take effect and what is injected in place."""
    weights = [float(weight) for weight in weights]
    rule = strongest(edits, Rule, position, layer)
    if rule is not None and rule.kind == "uniform":
        weights = [1 / len(weights)] * len(weights)
    elif rule is not None and rule.kind == "temperature":
        logits = [math.log(max(weight, 1e-38)) / rule.value for weight in weights]
        powers = [math.exp(logit - max(logits)) for logit in logits]
        weights = [power / sum(powers) for power in powers]
    elif rule is not None:
        chosen = BANKS if rule.kind == "null" else rule.value
        weights = [float(number == chosen) for number in range(BANKS + 1)]

    left, shared, any_shared, replaced = list(weights), 0.0, False, torch.zeros(SIZE)
    for bank in range(BANKS):
        off = strongest(edits, Off, position, layer, bank)
        if off is None:
            continue
        left[bank] = 0.0
        if off.renormalize:
            shared, any_shared = shared + weights[bank], True
        else:
            left[BANKS] += weights[bank]
        if off.replacement == "mean":
            replaced = replaced + MEAN[layer, bank]
        elif off.replacement == "random":
            length = (weights[bank] * rows[bank]).norm()
            replaced = replaced + length * random_direction(off.seed, layer, bank, SIZE)
    if any_shared:
        total = sum(left)
        left = [weight / total for weight in left] if total > 0 else [0.0] * BANKS + [1.0]
    return torch.tensor(left), replaced


@given(edits=st.lists(EDITS, min_size=1, max_size=3), seed=SEEDS, length=st.integers(1, 5))
@settings(max_examples=100)
@example(edits=[(Off(0), Off(0, 1, {2, 3, 4}, "mean"))], seed=0, length=5)  # banks 0 and 2 stay off there
@example(edits=[(Off(1, 1, {2, 9}, "mean"), Off(1, 1, {2, 10}, "random"))], seed=0, length=5)  # later ones
def test_every_place_is_what_plain_loops_say(edits, seed, length):
    interventions = [Intervention(each) for each in edits]
    rows = len(interventions) if len(interventions) > 1 else 2
    routing, memory, ids, positions = drawn(seed, rows, length)
    before = routing.clone(), memory.clone(), ids.clone()
    effect = Effect.of(interventions, CONFIG, positions, rows, MEAN)
    if effect is None:
        assert not any(interventions)
        return
    read = effect.lookup_ids(ids)
    changed = [effect.route(layer, routing, memory) for layer in range(LAYERS)]
    for row in range(rows):
        acting = interventions[row if len(interventions) > 1 else 0].edits
        for t in range(length):
            position = int(positions[row if len(positions) > 1 else 0, t])
            token = int(ids[row, t])
            swap = strongest(acting, Swap, position, token=token)
            assert read[row, t] == (token if swap is None else swap.reads)
            for layer, (weights, replaced) in enumerate(changed):
                expected = by_hand(acting, layer, routing[row, t], memory[row, t], position)
                torch.testing.assert_close(weights[row, t], expected[0], rtol=1e-4, atol=1e-6)
                there = torch.zeros(SIZE) if replaced is None else replaced[row, t]
                torch.testing.assert_close(there, expected[1], rtol=1e-4, atol=1e-5)
    for weights, replaced in changed:
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(rows, length))
        assert replaced is None or replaced.shape == (rows, length, SIZE)
    assert all(torch.equal(a, b) for a, b in zip(before, (routing, memory, ids), strict=True))


HERE, HERE_TOO = frozenset({0}), frozenset({0, 1})


@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [
        ({}, {"bank": 1}),
        ({"bank": 1}, {"layer": 1}),
        ({"layer": 1}, {"layer": 1, "bank": 1}),
        ({"layer": 1, "bank": 1}, {"positions": HERE}),  # positions before everything else
        ({"positions": HERE}, {"bank": 1, "positions": HERE}),
        ({"bank": 1, "positions": HERE}, {"layer": 1, "positions": HERE_TOO}),
        ({"layer": 1, "positions": HERE_TOO}, {"layer": 1, "bank": 1, "positions": HERE}),
        ({"layer": 1, "positions": HERE_TOO}, {"layer": 1, "positions": HERE}),  # fewer positions
        ({"layer": 1, "bank": 1, "positions": {0, 9}}, {"layer": 1, "bank": 1, "positions": {0, 10}}),  # later ones
    ],
)
def test_where_two_switches_meet_the_more_specific_wins_and_the_other_does_nothing(weaker, stronger):
    routing, memory, _, _ = drawn(1, 1, 1)
    mean = torch.zeros_like(MEAN)
    mean[1, 1] = MEAN[1, 1]
    for order in (1, -1):
        for how in ({"replacement": "mean"}, {"renormalize": True}):
            for edits in ((Off(**weaker), Off(**stronger, **how)), (Off(**weaker, **how), Off(**stronger))):
                both, alone = (
                    Effect.of(Intervention(each[::order]), CONFIG, torch.zeros(1, 1).long(), 1, mean)
                    for each in (edits, edits[1:])
                )
                weights, replaced = both.route(1, routing, memory)
                assert weights[0, 0, 1] == 0
                if "replacement" in how:
                    assert torch.equal(replaced[0, 0], mean[1, 1] if edits[1].replacement == "mean" else 0 * mean[1, 1])
                elif (edits[0].layer, edits[0].bank) == (edits[1].layer, edits[1].bank):
                    assert torch.equal(weights, alone.route(1, routing, memory)[0])


@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [
        ({}, {"layer": 1}),
        ({"layer": 1}, {"positions": HERE}),
        ({"positions": HERE}, {"layer": 1, "positions": HERE_TOO}),
        ({"layer": 1, "positions": HERE_TOO}, {"layer": 1, "positions": HERE}),
    ],
)
def test_where_two_rules_meet_the_more_specific_wins_and_the_other_does_nothing(weaker, stronger):
    routing, memory, _, positions = drawn(2, 1, 1)
    for loser in ("null", "uniform", "temperature"):
        edits = (Rule(loser, 3.0, **weaker), Rule("temperature", 0.5, **stronger))
        both, alone = (Effect.of(Intervention(each), CONFIG, 0 * positions, 1) for each in (edits, edits[1:]))
        assert torch.equal(both.route(1, routing, memory)[0], alone.route(1, routing, memory)[0])


def test_rules_come_before_switches_and_swaps_do_not_chain():
    routing, memory, _, positions = drawn(3, 1, 4)
    effect = Effect.of(Intervention.route("only", 1) | Intervention.banks_off([1]), CONFIG, positions, 1)
    assert torch.equal(effect.route(0, routing, memory)[0], torch.tensor([0.0, 0, 0, 1]).expand(1, 4, 4))
    ids = torch.tensor([[5, 6, 7, 5]])
    chain = Intervention.swap(5, 6) | Intervention.swap(6, 7) | Intervention.swap(5, 9, positions=[3])
    assert Effect.of(chain, CONFIG, torch.arange(4)[None], 1).lookup_ids(ids).tolist() == [[6, 7, 7, 9]]


def test_renormalised_weights_keep_their_proportions():
    routing, memory, _, positions = drawn(4, 2, 3)
    weights, _ = Effect.of(Intervention.off([(0, 1)], renormalize=True), CONFIG, positions, 2).route(0, routing, memory)
    on = routing[..., [0, 2, 3]]
    torch.testing.assert_close(weights[..., [0, 2, 3]], on / on.sum(-1, keepdim=True))
    assert (weights[..., 1] == 0).all()
    everything = Intervention.route("only", 2) | Intervention.all_off(renormalize=True)
    weights, _ = Effect.of(everything, CONFIG, positions, 2).route(0, routing, memory)
    assert torch.equal(weights, torch.tensor([0.0, 0, 0, 1]).expand(2, 3, 4))  # nothing remains: all null


@pytest.mark.parametrize("value", [5e-324, 1e-40, 1e-3, 1.0, 40.0, 1e30, 1e300])
def test_weights_sum_to_one_at_any_temperature_and_with_any_logits(value):
    logits = torch.tensor([[[0.0, 0, 0, 0], [200, 0, -200, 100], [1e-3, 0, 0, 0], [90, 0, 0, -90], [0, 88, 0, 0]]])
    effect = Effect.of(Intervention.route("temperature", value), CONFIG, torch.arange(5)[None], 1)
    weights, _ = effect.route(0, logits.softmax(-1), torch.zeros(1, 5, BANKS, SIZE))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 5))
    if value == 1:
        torch.testing.assert_close(weights, logits.softmax(-1), rtol=1e-4, atol=1e-7)
    if value > 1e20:
        torch.testing.assert_close(weights, torch.full_like(weights, 0.25))
    if value < 1e-30:
        assert (weights[0, 1:].max(-1).values == 1).all()


@pytest.mark.parametrize("rule", [Intervention(), Intervention.route("uniform")])
def test_a_random_direction_is_as_long_as_what_it_replaces(rule):
    routing, memory, _, positions = drawn(6, 2, 5)
    for layer in range(LAYERS):
        switch = rule | Intervention.off([(layer, 2)], replacement="random", seed=3)
        weights, replaced = Effect.of(switch, CONFIG, positions, 2).route(layer, routing, memory)
        alpha = 0.25 if rule else routing[..., 2]
        torch.testing.assert_close(replaced.norm(dim=-1), alpha * memory[:, :, 2].norm(dim=-1))
        cosine = torch.cosine_similarity(replaced, random_direction(3, layer, 2, SIZE), dim=-1)
        torch.testing.assert_close(cosine, torch.ones(2, 5))
        assert (weights[..., 2] == 0).all()


def test_random_directions_are_fixed_distinct_and_unrelated():
    with torch.inference_mode():
        directions = [random_direction(s, layer, k, 512) for s in range(3) for layer in range(4) for k in range(4)]
    directions = torch.stack(directions)
    off_diagonal = (directions @ directions.T - torch.eye(len(directions))).abs()
    assert off_diagonal.max() < 0.2  # sd 1 / sqrt(512) = 0.044
    assert not random_direction(2, 3, 3, 512).is_inference()  # could not take part in training
    random_direction.cache_clear()
    torch.manual_seed(99)
    assert torch.equal(random_direction(2, 3, 3, 512), directions[-1])
    assert random_direction(2**32 - 1, 0, 0, 8).norm() == pytest.approx(1)


def test_nothing_to_do_is_nothing_done(make_model, input_ids):
    positions = torch.arange(9).unsqueeze(0)
    for nothing in (None, Intervention(), (), [Intervention(), Intervention()]):
        assert Effect.of(nothing, CONFIG, positions, 2) is None
    routing, memory, ids, positions = drawn(7, 2, 3)
    everything = Intervention.layers_off([1], replacement="mean") | Intervention.route("null", layers=[1])
    effect = Effect.of(everything, CONFIG, positions, 2, MEAN)
    assert effect.lookup_ids(ids) is ids
    for layer in (0, 2):
        weights, replaced = effect.route(layer, routing, memory)
        assert weights is routing
        assert replaced is None
    assert Effect.of(Intervention.layers_off([1]), CONFIG, positions, 2).route(1, routing, memory)[1] is None


@pytest.mark.parametrize(
    ("intervention", "mean", "message"),
    [
        ([Intervention.all_off()] * 3, None, "There are 3 interventions for 2 rows; give one, or one a row."),
        (Intervention.all_off(replacement="mean"), None, "needs mean_injection"),
        (Intervention.all_off(replacement="mean"), MEAN[1:], r"mean_injection is \[2, 3, 32\], .* needs \[3, 3, 32\]"),
        ([Intervention(), Intervention.layers_off([5])], None, "names layer 5"),
    ],
)
def test_what_does_not_fit_the_batch_or_the_model_is_refused(make_model, input_ids, intervention, mean, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_model()(input_ids, intervention=intervention, mean_injection=mean)
    assert "\n" not in str(refusal.value)


def test_the_mean_is_what_it_says_exactly():
    routing, memory, _, positions = drawn(8, 2, 3)
    for layer in range(LAYERS):
        for bank in range(BANKS):
            switch = Intervention.off([(layer, bank)], replacement="mean")
            replaced = Effect.of(switch, CONFIG, positions, 2, MEAN).route(layer, routing, memory)[1]
            assert torch.equal(replaced, MEAN[layer, bank].expand(2, 3, SIZE))
