"""Recipes: the learning-rate schedule, the values of Table 7, and what is refused."""

import json
from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.cli import UserError
from tide.training.recipe import RECIPES, Recipe


def test_the_papers_recipe():
    recipe = Recipe.named("paper")  # Table 7
    assert (recipe.start_lr, recipe.peak_lr, recipe.floor_lr, recipe.warmup_steps) == (1e-6, 1e-4, 1e-5, 10_000)
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.sequence_length) == (0.9, 0.95, 0.1, 2048)
    assert recipe.z_loss == 1e-6
    stated = {f.name for f in fields(Recipe) if f.metadata["source"] == "Table 7"}
    rates = {"start_lr", "peak_lr", "floor_lr", "warmup_steps"}
    assert stated == rates | {"beta1", "beta2", "weight_decay", "sequence_length", "z_loss"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_schedule_passes_through_start_peak_and_floor(name):
    recipe = Recipe.named(name)
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
        ({"batch_size": -4}, "batch_size is -4; it must be a number from 0 on"),
        ({"peak_lr": -1e-3}, "peak_lr is -0.001; it must be a number"),
        ({"peak_lr": float("nan")}, "peak_lr is nan"),
        ({"floor_lr": float("inf")}, "floor_lr is inf"),
        ({"beta2": 1.0}, "beta2 is 1.0; it must be below 1"),
        ({"sequence_length": 1}, "sequence_length is 1; it must be at least 2"),
        ({"autocast": "float16"}, "autocast is 'float16'"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Recipe.named("demo", **wrong)


def test_settings_that_are_not_given_are_the_recipes():
    assert Recipe.named("demo", steps=None, seed=7) == Recipe.named("demo", seed=7)
    assert Recipe.named("demo", seed=7) != Recipe.named("demo")


def test_a_saved_recipe_is_read_back_and_may_be_changed(tmp_path):
    recipe = Recipe.named("demo", seed=5, autocast="float32")
    whole, bare = tmp_path / "recipe.json", tmp_path / "bare.json"
    whole.write_text(json.dumps({"recipe": asdict(recipe), "config": {}}))
    bare.write_text(json.dumps({"steps": 7, "peak_lr": 1}))
    assert Recipe.named(str(whole)) == recipe
    assert Recipe.named(str(whole), seed=6) == Recipe.named("demo", seed=6, autocast="float32")
    assert Recipe.named(str(bare)) == Recipe(steps=7, peak_lr=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no recipe"),
        ("{", "is no JSON file"),
        ("[1]", "is no recipe"),
        ('{"recipe": {"stepz": 1}}', "has no setting 'stepz'"),
        ('{"steps": "many"}', "steps is 'many'; its type must be int"),
        ('{"compile": 1}', "compile is 1; its type must be bool"),
        ('{"steps": 0}', "steps is 0; it must be at least 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message) as refusal:
        Recipe.named(str(file))
    assert "\n" not in str(refusal.value)


def test_settings_that_only_say_how_a_run_is_computed_are_no_other_run():
    one = Recipe.named("demo")
    assert one.what_is_trained() == Recipe.named("demo", micro_batch_size=1, compile=True).what_is_trained()
    assert one.what_is_trained() != Recipe.named("demo", weight_decay=0.2).what_is_trained()
