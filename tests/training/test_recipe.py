"""Recipes: the learning-rate schedule, the values of Table 7, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.cli import UserError
from tide.config import PRESETS
from tide.training.recipe import Recipe


def test_the_papers_recipe():
    recipe = Recipe.for_preset("1b")  # Table 7
    assert (recipe.start_lr, recipe.peak_lr, recipe.floor_lr, recipe.warmup_steps) == (1e-6, 1e-4, 1e-5, 10_000)
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.sequence_length) == (0.9, 0.95, 0.1, 2048)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_schedule_passes_through_start_peak_and_floor(preset):
    recipe = Recipe.for_preset(preset)
    assert recipe.learning_rate(0) == pytest.approx(recipe.start_lr)
    assert recipe.learning_rate(recipe.warmup_steps // 2) == pytest.approx((recipe.start_lr + recipe.peak_lr) / 2)
    assert recipe.learning_rate(recipe.warmup_steps) == pytest.approx(recipe.peak_lr)
    assert recipe.learning_rate(recipe.steps - 1) == pytest.approx(recipe.floor_lr)


@given(warmup=st.integers(0, 60), steps=st.integers(1, 60))
def test_the_schedule_rises_then_falls_and_stays_within_its_bounds(warmup, steps):
    recipe = Recipe(steps=steps, warmup_steps=warmup)
    rates = [recipe.learning_rate(step) for step in range(steps)]
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(recipe.start_lr <= rate <= recipe.peak_lr * (1 + 1e-12) for rate in rates)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"batch_size": -4}, "batch_size is -4; it must not be negative"),
        ({"peak_lr": -1e-3}, "peak_lr is -0.001; it must not be negative"),
        ({"peak_lr": float("nan")}, "peak_lr is nan"),
        ({"batch_size": 6, "micro_batch_size": 4}, "batch_size 6 is no multiple of micro_batch_size 4"),
        ({"autocast": "float16"}, "autocast is 'float16'"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Recipe.for_preset("demo", **wrong)


def test_settings_that_are_not_given_are_the_presets():
    assert Recipe.for_preset("demo", steps=None, seed=7) == Recipe.for_preset("demo", seed=7)
    assert Recipe.for_preset("demo", seed=7) != Recipe.for_preset("demo")
