"""Interventions: what they switch off, what they leave alone, and that they never touch the model."""

import pickle
import threading
import time
from dataclasses import FrozenInstanceError
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_config, tiny_model
from tide import Intervention
from tide.effect import Effect
from tide.intervention import REPLACEMENTS, Off, Rule, Swap

LAYERS, BANKS, TOKENS = 3, 3, 8  # of the tiny model, and token ids that the tests use

LAYER, BANK = (st.none() | st.integers(0, number - 1) for number in (LAYERS, BANKS))
POSITIONS = st.none() | st.frozensets(st.integers(0, 7), max_size=5)
OFFS = st.builds(Off, LAYER, BANK, POSITIONS, st.sampled_from(REPLACEMENTS), st.integers(0, 2), st.booleans())
RULES = st.one_of(
    st.builds(Rule, st.sampled_from(["uniform", "null"]), layer=LAYER, positions=POSITIONS),
    st.builds(Rule, st.just("only"), st.integers(0, BANKS - 1), LAYER, POSITIONS),
    st.builds(Rule, st.just("temperature"), st.floats(0.05, 20), LAYER, POSITIONS),
)
SWAPS = st.builds(Swap, st.integers(2, TOKENS), st.integers(2, TOKENS), POSITIONS)
EDITS = st.lists(OFFS | RULES | SWAPS, max_size=6).map(tuple)
ANYTHING = EDITS.map(Intervention)  # every kind of edit, in places of the tiny model

PAIRS = st.frozensets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, BANKS - 1)))
INTERVENTIONS = st.builds(
    lambda pairs, layers: Intervention.off(pairs) | Intervention.layers_off(layers),
    PAIRS,
    st.frozensets(st.integers(0, LAYERS - 1), max_size=2),
)


def logits_of(model, ids, intervention=None):
    with torch.no_grad():
        return model(ids, intervention=intervention).logits


def test_the_empty_intervention_equals_none_bit_for_bit(make_model, input_ids):
    model = make_model()
    assert torch.equal(logits_of(model, input_ids, Intervention()), logits_of(model, input_ids))
    assert not Intervention()
    assert Intervention.off([]) == Intervention.layers_off([]) == Intervention()


def test_it_is_a_frozen_hashable_value():
    a, b = Intervention.off([(2, 0), (0, 1)]), Intervention.off([(0, 1), (2, 0), (2, 0)])
    assert a == b
    assert len({a, b, Intervention.layers_off([1])}) == 2
    with pytest.raises(FrozenInstanceError):
        a.edits = ()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Off(1, replacement="mean", seed=5), Off(1, replacement="mean")),  # a seed means nothing there
        (Off(np.int64(1), np.int32(2), [3, 3, 4]), Off(1, 2, frozenset({4, 3}))),
        (Off(1, renormalize=1), Off(1, renormalize=True)),
        (Rule("uniform", 7.0), Rule("uniform")),
        (Rule("only", 2.0), Rule("only", 2)),
        (Rule("temperature", 2), Rule("temperature", 2.0)),
        (Swap(np.int64(3), 4, range(2)), Swap(3, 4, frozenset({0, 1}))),
    ],
)
def test_what_means_the_same_is_the_same(a, b):
    assert a == b
    assert hash(a) == hash(b)
    assert a.text() == b.text()
    assert len({Intervention((a,)), Intervention((b,))}) == 1


def test_an_edit_that_acts_nowhere_is_none():
    assert not Intervention.off([(1, 2)], positions=[])
    assert not Intervention.route("null", positions=[]) | Intervention.swap(3, 4, positions=[])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Off(1, replacement="median"), "no replacement 'median'; it is zero, mean, random"),
        (lambda: Off(1, replacement="random", seed=-1), "The seed is -1; it must be 0..4294967295"),
        (lambda: Off(1, replacement="random", seed=2**32), "The seed is 4294967296; it must be 0..4294967295"),
        (lambda: Rule("learned"), "no router rule 'learned'; it is uniform, null, only, temperature"),
        (lambda: Rule("temperature"), "temperature is 0; it must be a finite number above 0"),
        (lambda: Rule("temperature", float("nan")), "temperature is nan"),
        (lambda: Rule("temperature", float("inf")), "temperature is inf"),
        (lambda: Rule("only", 1.5), "names bank 1.5, which is not a whole number"),
        (lambda: Rule("only", float("inf")), "names bank inf, which is not a whole number"),
    ],
)
def test_edits_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


@given(a=ANYTHING, b=ANYTHING, c=ANYTHING)
def test_combining_is_a_union_in_which_the_later_wins(a, b, c):
    assert a | a == a
    assert a | Intervention() == Intervention() | a == a
    assert (a | b) | c == a | (b | c)
    theirs = {(type(edit), edit.place) for edit in b.edits}
    assert set((a | b).edits) == set(b.edits) | {e for e in a.edits if (type(e), e.place) not in theirs}
    if not theirs & {(type(edit), edit.place) for edit in a.edits}:
        assert a | b == b | a
    assert Intervention(a.edits[::-1]) == a


@given(intervention=ANYTHING)
def test_read_equals_written(intervention):
    text = intervention.to_text()
    assert Intervention.from_text(text) == intervention
    assert str(intervention) == text == Intervention.from_text(text).to_text()
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789*.~!:@,-_")  # none that a URL must escape but these
    assert pickle.loads(pickle.dumps(intervention)) == intervention


@given(value=st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False))
def test_every_temperature_is_written_exactly(value):
    assert Intervention.from_text(Intervention.route("temperature", value).to_text()).rules[0].value == value


def test_the_text_form():
    text = "3_3.5~mean!@0,4-6_3.10_*!_.5~random7_null:2@1_only5_swap120.88@3_temperature0.5:2_uniform:1"
    assert Intervention.from_text(text) == (
        Intervention.all_off(renormalize=True)
        | Intervention.banks_off([5], replacement="random", seed=7)
        | Intervention.layers_off([3])
        | Intervention.off([(3, 5)], replacement="mean", renormalize=True, positions=[6, 0, 5, 4])
        | Intervention.off([(3, 10)])
        | Intervention.route("null", layers=[2], positions=[1])
        | Intervention.route("only", 5)
        | Intervention.swap(120, 88, positions=[3])
        | Intervention.route("temperature", 0.5, layers=[2])
        | Intervention.route("uniform", layers=[1])
    )
    assert Intervention.from_text(text).to_text() == text
    assert Intervention.from_text("") == Intervention()
    assert Intervention.from_text("03.05@2,1,1-2").to_text() == "3.5@1-2"


JUNK = """
    ! @ . ~ - _ 3_ _3 3__4 3. 3.. 3.5.6 -1 3.-1 +3 3@ 3@- 3@1- 3@,1 3@1,,2 3@a 3@1@2 3!! !3 3!~mean 3~ 3~zero 3~mean5
    3~random 3~random-1 *3 *.3 ** 3* only only-1 only:1 uniform3 null0 uniform: uniform:a temperature temperature-1
    temperature:1 temperature1.2.3 temperature1e temperature.5 temperature1.e5 temperature0 temperature1e999 only1.5
    temperature1e-999 temperaturenan temperatureinf swap swap1 swap1. swap.1 swap1.2.3 swap-1.2 swap1.2! swap1.2:3
    Swap1.2 learned off 3@5-2 ٣ 3.٥ ３ 3@１ ² nan None 0x3 1e3 3,4 3;4 %33 3~random99999999999
    3~random4294967296 3@0-9999999
""".split()
HUGE = [
    "9" * 5000,
    "3." + "9" * 5000,
    "3@" + "9" * 5000,
    "3@0-" + "9" * 12,
    "3~random" + "9" * 5000,
    "only" + "9" * 5000,
    "temperature" + "9" * 5000,
    "swap1." + "9" * 5000,
    "_".join(f"{layer}@0-999999" for layer in range(3000)),
    "3@" + ",".join(["0-999999"] * 5000),
    "3_" * 1_000_000,
    "3@" + "1," * 1_000_000,
    "~" * 60_000,
]


@pytest.mark.parametrize(
    "text", [*JUNK, "3\u2028", " 3", "3 ", "3\n", "3 4", "3\x00", *HUGE], ids=lambda text: ascii(text[:16])
)
def test_junk_is_refused_in_one_short_sentence_at_once(text):
    start = time.process_time()
    with pytest.raises(ValueError, match=r"^.{1,250}\.$") as refusal:
        Intervention.from_text(text)
    assert "\n" not in str(refusal.value)
    assert time.process_time() - start < 1


@given(st.text(alphabet="0123456789.*~!@,-_:eswapmnrdolyutifxc ٣", max_size=12))
@settings(max_examples=300)
def test_any_text_is_read_or_refused(text):
    try:
        intervention = Intervention.from_text(text)
    except ValueError:
        return
    assert Intervention.from_text(intervention.to_text()) == intervention


@given(intervention=ANYTHING)
def test_what_is_off_and_where_it_begins(intervention):
    for layer in range(LAYERS):
        offs = [
            e for e in intervention.edits if isinstance(e, Off) and e.layer in (None, layer) and e.positions is None
        ]
        expected = [bank for bank in range(BANKS) if any(off.bank in (None, bank) for off in offs)]
        assert intervention.off_in(layer, BANKS) == expected
    layers = [0 if isinstance(edit, Swap) or edit.layer is None else edit.layer for edit in intervention.edits]
    assert intervention.first_layer(LAYERS) == min(layers, default=LAYERS)
    assert intervention.needs_mean == any(e.replacement == "mean" for e in intervention.edits if isinstance(e, Off))


@given(a=INTERVENTIONS, b=INTERVENTIONS)
def test_combining_switches_off_what_either_does(a, b):
    both = a | b
    assert both == b | a
    assert a | Intervention() == a
    for layer in range(LAYERS):
        expected = set(a.off_in(layer, BANKS)) | set(b.off_in(layer, BANKS))
        assert set(both.off_in(layer, BANKS)) == expected


@given(intervention=INTERVENTIONS, seed=st.integers(0, 2**16))
@settings(max_examples=20)
def test_a_bank_that_is_off_hands_its_weight_to_null_and_the_rest_stay(intervention, seed):
    routing = torch.randn(2, 5, BANKS + 1, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    before, memory, config = routing.clone(), torch.ones(2, 5, BANKS, 32), tiny_config()
    effect = Effect.of(intervention, config, torch.arange(5).unsqueeze(0), 2)
    assert (effect is None) == (not intervention)
    for layer in range(LAYERS):
        off = intervention.off_in(layer, BANKS)
        on = [k for k in range(BANKS) if k not in off]
        effective, replaced = effect.route(layer, routing, memory) if effect else (routing, None)
        assert replaced is None
        assert torch.equal(routing, before)  # the router's own weights are not written to
        assert (effective[..., off] == 0).all()
        assert torch.equal(effective[..., on], before[..., on])
        torch.testing.assert_close(effective[..., -1], before[..., -1] + before[..., off].sum(-1))
        torch.testing.assert_close(effective.sum(-1), torch.ones(2, 5))


@given(intervention=INTERVENTIONS, seed=st.integers(0, 100))
@settings(max_examples=15)
def test_a_forward_injects_what_the_banks_that_are_on_hold(intervention, seed):
    model, ids = tiny_model(seed), torch.tensor([[7, 8, 9, 8]])
    trace = model.trace(ids, intervention=intervention)
    for layer in range(LAYERS):
        on = [k for k in range(BANKS) if k not in intervention.off_in(layer, BANKS)]
        injection = sum(
            (trace.routing[:, :, layer, k, None] * trace.memory[:, :, k] for k in on), torch.zeros(1, 4, 32)
        )
        torch.testing.assert_close(trace.injection()[:, :, layer], injection)
    assert torch.equal(trace.logits, logits_of(model, ids, intervention))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_is_off_injects_nothing_and_the_layers_below_do_not_notice(make_model, input_ids, layer):
    model = make_model()
    plain, off = model.trace(input_ids), model.trace(input_ids, intervention=Intervention.layers_off([layer]))
    assert (off.injection()[:, :, layer] == 0).all()
    assert (off.routing[:, :, layer, -1] - 1).abs().max() < 1e-6  # all null
    assert torch.equal(off.hidden[:, :, : layer + 1], plain.hidden[:, :, : layer + 1])
    assert torch.equal(off.routing[:, :, :layer], plain.routing[:, :, :layer])
    assert not torch.allclose(off.hidden[:, :, layer + 1], plain.hidden[:, :, layer + 1], atol=1e-3)
    torch.testing.assert_close(
        plain.hidden[:, :, layer + 1] - off.hidden[:, :, layer + 1],
        plain.injection()[:, :, layer],
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_layer_off_equals_all_of_its_pairs_off(make_model, input_ids):
    model = make_model()
    by_pairs = Intervention.off((1, bank) for bank in range(BANKS))
    assert torch.equal(logits_of(model, input_ids, Intervention.layers_off([1])), logits_of(model, input_ids, by_pairs))


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (Intervention.layers_off([3]), "names layer 3, but the model has layers 0..2"),
        (Intervention.layers_off([-1]), "names layer -1, but the model has layers 0..2"),
        (Intervention.off([(7, 0)]), "names layer 7, but the model has layers 0..2"),
        (Intervention.off([(1, 3)]), "names bank 3 in layer 1, but the model has banks 0..2"),  # 3 is the null bank
        (Intervention.off([(1, -1)]), "names bank -1 in layer 1, but the model has banks 0..2"),
        (Intervention.banks_off([9]), "names bank 9, but the model has banks 0..2"),
        (Intervention.all_off(positions=[3, 64, 99]), "names position 64, but a text has positions 0..63"),
        (Intervention.all_off(positions=[3, -2]), "names position -2, but a text has positions 0..63"),
        (Intervention.route("null", layers=[0, 3]), "names layer 3, but the model has layers 0..2"),
        (Intervention.route("only", 3), "router rule names bank 3, but the model has banks 0..2"),
        (
            Intervention.route("only", -1, layers=[1]),
            "router rule names bank -1 in layer 1, but the model has banks 0..2",
        ),
        (Intervention.swap(61, 3), "row swap names token 61, but the ids are 0..60"),
        (Intervention.swap(3, -1), "row swap names token -1, but the ids are 0..60"),
        (Intervention.from_text("999999999999"), "names layer 999999999999, but the model has layers 0..2"),
    ],
)
def test_layers_and_banks_that_do_not_exist_are_refused(make_model, input_ids, intervention, message):
    model = make_model()
    for call in (model, model.trace, partial(model.generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match=message) as refusal:
            call(input_ids, intervention=intervention)
        assert "\n" not in str(refusal.value)


def test_the_base_model_has_no_banks_to_switch_off(make_model, input_ids):
    base = make_model(num_memory_blocks=0)
    with pytest.raises(ValueError, match="the model has no memory banks"):
        base(input_ids, intervention=Intervention.off([(0, 0)]))
    assert torch.equal(logits_of(base, input_ids, Intervention.layers_off([0])), logits_of(base, input_ids))


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_equals_stepwise_greedy_decoding_under_the_same_intervention(make_model, input_ids, use_cache):
    model, off = make_model(), Intervention.off([(0, 0), (2, 1)]) | Intervention.layers_off([1])
    tokens = model.generate(input_ids, intervention=off, max_new_tokens=8, do_sample=False, use_cache=use_cache)
    expected = input_ids
    for _ in range(8):
        expected = torch.cat([expected, logits_of(model, expected, off)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, expected)
    assert not torch.equal(tokens, model.generate(input_ids, max_new_tokens=8, do_sample=False))


def test_threads_with_different_interventions_share_one_model(make_model, input_ids):
    model = make_model()
    interventions = [None, Intervention.layers_off([0]), Intervention.off([(1, 2)]), Intervention.layers_off([1, 2])]
    serial = [model.trace(input_ids, intervention=i) for i in interventions]
    barrier, wrong = threading.Barrier(len(interventions)), []

    def session(number):
        barrier.wait()
        for _ in range(20):
            trace = model.trace(input_ids, intervention=interventions[number])
            same = torch.equal(trace.logits, serial[number].logits) and torch.equal(
                trace.routing, serial[number].routing
            )
            if not same:
                wrong.append(number)

    threads = [threading.Thread(target=session, args=(i,)) for i in range(len(interventions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def state_of(model):
    """Everything that modules carry: their attributes by identity, and every weight's value."""
    attributes = {
        name: {key: id(value) for key, value in vars(module).items() if not key.startswith("_")}
        for name, module in model.named_modules()
    }
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    return attributes, keys, {name: value.clone() for name, value in model.state_dict().items()}


def hooks_of(model):
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and key.startswith("_") and value
    ]


def test_no_hooks_and_no_module_state_after_any_use(make_model, input_ids):
    model = make_model()
    attributes, keys, weights = state_of(model)
    off = Intervention.off([(0, 1)]) | Intervention.layers_off([2])
    logits_of(model, input_ids, off)
    model.trace(input_ids, intervention=off).attribution(input_ids)
    model.generate(input_ids, intervention=off, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="layer 9"):
        model(input_ids, intervention=Intervention.layers_off([9]))
    after_attributes, after_keys, after_weights = state_of(model)
    assert hooks_of(model) == []
    assert after_keys == keys
    assert after_attributes == attributes
    assert all(torch.equal(value, weights[name]) for name, value in after_weights.items())
