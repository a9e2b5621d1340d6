"""What a person does on the Live page as values: the grid, presets, the way back."""

import pytest
import streamlit as st
from hypothesis import given
from hypothesis import strategies as st_

from dashboard.live import state
from dashboard.live.controls import positions_text
from tests.conftest import tiny_config
from tide import Intervention
from tide.intervention import Off, Rule, Swap

CONFIG = tiny_config()
PAIRS = st_.frozensets(st_.tuples(st_.integers(0, 2), st_.integers(0, 2)))
HOWS = st_.builds(
    Off,
    positions=st_.none() | st_.frozensets(st_.integers(0, 9), min_size=1),
    replacement=st_.sampled_from(["zero", "mean", "random"]),
    seed=st_.integers(0, 9),
    renormalize=st_.booleans(),
)


@pytest.fixture
def session(monkeypatch):
    """A session state without a browser."""
    values = {state.SWITCHES: Intervention(), state.PAST: [], state.HOW: Off()}
    monkeypatch.setattr(st, "session_state", values)
    return values


@given(pairs=PAIRS, how=HOWS)
def test_what_the_grid_shows_is_what_was_clicked(pairs, how):
    intervention = state.switched_off(pairs, CONFIG, how)
    assert state.off_pairs(intervention, CONFIG) == pairs
    for off in intervention.offs:
        assert (off.positions, off.replacement, off.seed, off.renormalize) == (
            how.positions,
            how.replacement,
            how.seed,
            how.renormalize,
        )
    assert Intervention.from_text(intervention.to_text()) == intervention


def test_whole_rows_columns_and_all_have_short_names():
    every = frozenset((layer, bank) for layer in range(3) for bank in range(3))
    assert state.switched_off(every, CONFIG, Off()).to_text() == "*"
    layer = frozenset((1, bank) for bank in range(3))
    assert state.switched_off(layer, CONFIG, Off()).to_text() == "1"
    bank = frozenset((layer, 2) for layer in range(3))
    assert state.switched_off(bank | {(0, 0)}, CONFIG, Off()) == Intervention.banks_off([2]) | Intervention.off(
        [(0, 0)]
    )


def test_undo_goes_back_step_by_step(session):
    steps = [Intervention.off([(0, 0)]), Intervention.layers_off([1]), Intervention.all_off()]
    for step in steps:
        state.change(step)
    state.change(steps[-1])  # nothing new: no step to undo
    for step in [*steps[-2::-1], Intervention()]:
        state.undo()
        assert state.switches() == step
    state.undo()
    assert state.switches() == Intervention()


def test_the_grid_leaves_rules_and_swaps_alone(session):
    state.change(Intervention.route("uniform") | Intervention.swap(5, 6) | Intervention.layers_off([0]))
    state.set_pairs(frozenset({(2, 1)}), CONFIG)
    kinds = {type(edit) for edit in state.switches().edits}
    assert kinds == {Off, Rule, Swap}
    assert state.off_pairs(state.switches(), CONFIG) == {(2, 1)}


def test_another_way_of_switching_off_holds_for_what_is_off_and_what_comes(session):
    state.set_pairs(frozenset({(0, 0)}), CONFIG)
    state.set_how(Off(replacement="random", seed=3), CONFIG)
    assert state.switches().to_text() == "0.0~random3"
    state.set_pairs(frozenset({(0, 0), (1, 1)}), CONFIG)
    assert state.switches().to_text() == "0.0~random3_1.1~random3"


def test_presets_do_what_they_say(session):
    every = {(layer, bank) for layer in range(3) for bank in range(3)}
    assert state.off_pairs(state.preset("all off", CONFIG), CONFIG) == every
    assert state.off_pairs(state.preset("only layer 0", CONFIG), CONFIG) == {p for p in every if p[0]}
    assert state.preset("null everywhere", CONFIG) == Intervention.route("null")
    assert state.preset("uniform", CONFIG) == Intervention.route("uniform")


def test_positions_are_shown_as_they_are_typed():
    assert positions_text(Off()) == ""
    assert positions_text(Off(positions=frozenset({0, 4, 5, 6}))) == "0,4-6"
