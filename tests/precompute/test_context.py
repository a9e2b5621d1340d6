"""What stages share: models that are loaded when a stage asks for them, and let go."""

import weakref
from dataclasses import replace

import precompute.stage
from precompute.pipeline import run
from precompute.stage import Context
from precompute.stages import STAGES


def test_only_one_of_the_two_models_is_held(job):
    context = Context(job)
    tide = weakref.ref(context.model)
    assert context.model is tide()
    base = weakref.ref(context.base[0])
    assert context.base[0] is base()
    assert base() is not None
    assert tide() is None
    assert context.model.config.num_memory_blocks
    assert base() is None


def test_the_models_of_a_stage_are_gone_before_the_next(job, tmp_path, monkeypatch):
    loaded, held = [], []
    load, measure = precompute.stage.load_checkpoint, STAGES["geometry"].measure

    def noted(*args, **kwargs):
        model, tokenizer = load(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model, tokenizer

    def measured(context, piece):
        held.append(sum(model() is not None for model in loaded))
        return measure(context, piece)

    monkeypatch.setattr(precompute.stage, "load_checkpoint", noted)
    monkeypatch.setattr(STAGES["geometry"], "measure", measured)
    run(replace(job, out=tmp_path / "artifacts"), ["routing", "specialisation", "geometry"])
    assert len(loaded) == 2
    assert held
    assert not any(held)
