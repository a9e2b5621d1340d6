"""What a run measures of itself: every number of a summary against brute force, and when a run writes one."""

import itertools
import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.training.launch import at_batch
from tests.training.tiny_run import SAVE_EVERY, every_step, tiny_run
from tide import TideConfig, TideForCausalLM
from tide.cli import UserError
from tide.evaluation.losses import token_losses
from tide.frequency import frequency_deciles
from tide.tokens import Vocabulary
from tide.training.module import TrainingModule
from tide.training.summaries import (
    NUM_BINS,
    SUMMARY_FILE,
    BinnedRouting,
    GradientNorms,
    Summarizer,
    Summary,
    mean_and_sd,
    read_summaries,
    summary_steps,
)

STEPS = 24
ROUNDING = 5.1e-5  # five significant digits


@given(steps=st.integers(1, 10**6))
def test_summaries_are_at_step_0_and_at_steps_that_grow_by_about_one_factor(steps):
    chosen = summary_steps(steps)
    assert chosen == sorted(set(chosen))
    assert chosen[:2] == [0, 1]
    assert chosen[-1] == steps
    assert len(chosen) <= 13
    factor = steps ** (1 / 11)
    for earlier, later in itertools.pairwise(chosen[1:]):
        assert later <= (earlier + 0.5) * factor + 0.5 or later == earlier + 1


def some_summary(num_layers, num_banks, draw):
    """A summary with the right shapes; `draw` makes an array of numbers of a shape."""
    shapes = {"routing": (num_layers, NUM_BINS, num_banks + 1 if num_banks else 0)}
    shapes |= dict.fromkeys(("bank_norm", "bank_norm_sd", "bank_gradient"), (num_banks, NUM_BINS))
    counts = {name: np.arange(NUM_BINS) * 123_457 for name in ("types", "positions", "targets")}
    others = [f.name for f in fields(Summary) if f.name not in {"step", "tokens", *counts}]
    return Summary(
        step=7, tokens=512 * 2048 * 100_000, **counts, **{n: draw(shapes.get(n, (NUM_BINS,))) for n in others}
    )


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@settings(max_examples=30)
@given(data=st.data(), num_layers=st.integers(1, 3), num_banks=st.integers(0, 3))
def test_a_summary_is_a_line_of_json_and_back(data, num_layers, num_banks):
    numbers = st.one_of(st.just(np.nan), st.floats(1e-30, 1e30), st.just(0.0), st.integers(0, 10**9).map(float))
    summary = some_summary(
        num_layers, num_banks, lambda shape: data.draw(hnp.arrays(np.float64, shape, elements=numbers))
    )
    line = summary.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)  # the mean of an empty bin is null, not NaN
    read = Summary.from_json(line)
    assert (read.step, read.tokens) == (summary.step, summary.tokens)
    for field in fields(Summary):
        before, after = np.asarray(getattr(summary, field.name)), np.asarray(getattr(read, field.name))
        assert before.shape == after.shape, field.name
        np.testing.assert_allclose(after, before, rtol=ROUNDING, err_msg=field.name)
    for name in ("types", "positions", "targets"):
        assert np.array_equal(getattr(read, name), getattr(summary, name)), f"{name} are counts: they are not rounded"


def test_a_line_of_the_demo_shape_takes_less_than_16_kb():
    rng = np.random.default_rng(0)
    longest = some_summary(8, 8, lambda shape: 10.0 ** rng.uniform(-9, -5, shape))
    assert len(longest.to_json()) < 16 * 1024


@given(data=st.data(), size=st.integers(1, 40), columns=st.integers(0, 3))
def test_means_and_standard_deviations_by_bin(data, size, columns):
    values = data.draw(hnp.arrays(np.float64, (size, columns), elements=st.floats(-100, 100)))
    bins = data.draw(hnp.arrays(np.int64, size, elements=st.integers(0, NUM_BINS - 1)))
    mean, sd = mean_and_sd(values, bins)
    assert mean.shape == sd.shape == (NUM_BINS, columns)
    for b in range(NUM_BINS):
        for c in range(columns):
            members = [values[i, c] for i in range(size) if bins[i] == b]
            if not members:
                assert np.isnan(mean[b, c])
                assert np.isnan(sd[b, c])
                continue
            average = sum(members) / len(members)
            assert mean[b, c] == pytest.approx(average, abs=1e-9)
            variance = sum((x - average) ** 2 for x in members) / len(members)
            assert sd[b, c] == pytest.approx(variance**0.5, abs=1e-6)


@pytest.mark.parametrize("num_banks", [0, 3])
def test_routing_by_bin_is_the_sum_of_a_trace(make_model, num_banks):
    model = make_model(num_memory_blocks=num_banks)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(2, 61, (3, 10)))
    bins = torch.from_numpy(rng.integers(0, NUM_BINS - 2, (3, 10)))
    recorder = BinnedRouting(bins)
    with torch.no_grad():
        TrainingModule(model).eval()(ids, recorder=recorder)
    if not num_banks:
        assert recorder.sums == []
        return
    routing = model.trace(ids).routing
    for layer, sums in enumerate(recorder.sums):
        for b in range(NUM_BINS):
            torch.testing.assert_close(sums[b], routing[:, :, layer][bins == b].sum(dim=0))


@pytest.mark.parametrize(("num_banks", "tied"), [(0, True), (3, False), (3, True)])
def test_a_summary_is_what_brute_force_measures(make_model, num_banks, tied):
    model = make_model(num_memory_blocks=num_banks, tie_word_embeddings=tied)
    module = TrainingModule(model).train()
    rng = np.random.default_rng(1)
    windows = rng.integers(2, 61, (5, 12))
    deciles = rng.integers(-1, 9, 61).astype(np.int8)  # -1: no decile; 9 has no types
    gradients = GradientNorms(model, torch.device("cpu"))
    gradients.sums.copy_(torch.from_numpy(rng.random(gradients.sums.shape)))

    summary = Summarizer(windows, deciles, batch_size=2).summarize(module, gradients, 3, 99, torch.device("cpu"))

    assert module.training
    assert (summary.step, summary.tokens) == (3, 99)
    losses = token_losses(model.eval(), windows, batch_size=5)
    routing = model.trace(torch.from_numpy(windows)).routing.numpy()
    embedding = model.get_input_embeddings().weight.detach().numpy()
    for b in range(NUM_BINS):
        types = np.flatnonzero(deciles == (b if b < 10 else -1))
        own, targets = np.isin(windows, types), np.isin(windows[:, 1:], types)
        counted = (summary.types[b], summary.positions[b], summary.targets[b])
        assert counted == (len(types), own.sum(), targets.sum())
        if not len(types):
            for name in ("routing", "bank_norm", "bank_gradient"):
                assert np.isnan(getattr(summary, name)[:, b]).all()
            assert np.isnan(summary.loss[b])
            continue
        norms = np.linalg.norm(embedding[types], axis=-1)
        table = {"loss": losses[targets].mean(), "loss_sd": losses[targets].std()}
        table |= {"embedding_norm": norms.mean(), "embedding_norm_sd": norms.std()}
        received = gradients.sums.numpy()[types].mean(axis=0)
        table |= {"embedding_gradient": received[0], "embedding_parameter_gradient": received[-1]}
        table["total_gradient"] = received[:-1].sum()
        for name, expected in table.items():
            assert getattr(summary, name)[b] == pytest.approx(expected, rel=1e-4), name
        np.testing.assert_allclose(summary.bank_gradient[:, b], received[1:-1], rtol=1e-6)
        if num_banks:
            rows = np.linalg.norm(model.model.memory.weight.detach().numpy()[types], axis=-1)
            np.testing.assert_allclose(summary.bank_norm[:, b], rows.mean(axis=0), rtol=1e-5)
            np.testing.assert_allclose(summary.bank_norm_sd[:, b], rows.std(axis=0), rtol=1e-3)
            np.testing.assert_allclose(summary.routing[:, b], routing[own].mean(axis=0), rtol=1e-4, atol=1e-6)
    shapes = (summary.routing.shape, summary.bank_norm.shape)
    assert shapes == ((3, NUM_BINS, num_banks + 1 if num_banks else 0), (num_banks, NUM_BINS))


def untied_twin(model):
    """A model of the same function whose unembedding is a parameter of its own."""
    twin = TideForCausalLM(TideConfig(**{**model.config.to_dict(), "tie_word_embeddings": False}))
    twin.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach().clone()})
    return twin


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_gradient_norms_are_summed_over_steps_before_clipping(data_folder, tmp_path, tied, micro_batch_size):
    """A tied embedding's two gradients, of lookup and unembedding, are those that an untied twin has apart."""
    settings = {"micro_batch_size": micro_batch_size, "grad_clip": 1e-2}
    run = tiny_run(data_folder, tmp_path, shape={"tie_word_embeddings": tied}, **settings)
    run.prepare()
    expected = torch.zeros_like(run.gradients.sums)
    seen = set()
    for step in range(3):
        ids = run.data.batch(step)
        seen |= set(ids.flatten().tolist())
        twin = untied_twin(run.plain.model)
        twin(ids, labels=ids).loss.backward()
        lookup, unembedding = twin.get_input_embeddings().weight.grad, twin.lm_head.weight.grad
        banks = twin.model.memory.weight.grad
        expected[:, 0] += lookup.square().sum(-1)
        expected[:, 1:-1] += banks.square().sum(-1)
        expected[:, -1] += (lookup + unembedding if tied else lookup).square().sum(-1)

        _, norm, _ = run.step(step)

        squares = [p.grad.square().sum() for name, p in twin.named_parameters() if name != "lm_head.weight"]
        squares += [(2 * lookup * unembedding + unembedding.square()).sum() if tied else unembedding.square().sum()]
        assert float(norm) == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-4)
        assert float(norm) > 1e-2  # it was clipped
    torch.testing.assert_close(run.gradients.sums, expected, rtol=1e-3, atol=1e-9)
    unseen = [i for i in range(len(expected)) if i not in seen]
    assert unseen
    assert not run.gradients.sums[unseen, :-1].any()
    assert bool(run.gradients.sums[unseen, -1].all()) is tied  # every row of an unembedding gets a gradient


def test_a_frozen_embedding_receives_no_gradient(data_folder, tmp_path):
    run = tiny_run(data_folder, tmp_path, freeze_backbone=True)
    run.prepare()
    run.step(0)
    assert not run.gradients.sums[:, [0, -1]].any()
    assert run.gradients.sums[:, 1:-1].any(dim=0).all()


class Killed(BaseException):
    """Stands for a kill inside this process."""


def die():
    raise Killed


@pytest.fixture(scope="module")
def whole(data_folder, tmp_path_factory):
    """A run that nothing interrupted."""
    run = tiny_run(data_folder, tmp_path_factory.mktemp("runs") / "whole", steps=STEPS)
    run.train(schedule=every_step())
    return run


def test_a_run_writes_its_summaries_at_their_steps(whole):
    summaries = read_summaries(whole.folder.path)
    assert [s.step for s in summaries] == summary_steps(STEPS)
    assert [s.tokens for s in summaries] == [64 * step for step in summary_steps(STEPS)]
    first, last = summaries[0], summaries[-1]
    assert not np.nan_to_num(first.total_gradient).any()
    assert not np.nan_to_num(first.embedding_parameter_gradient).any()
    np.testing.assert_allclose(np.nan_to_num(first.routing).sum(axis=-1)[:, first.positions > 0], 1, rtol=1e-3)
    for earlier, later in itertools.pairwise(summaries):
        assert (np.nan_to_num(later.total_gradient) >= np.nan_to_num(earlier.total_gradient)).all()
    average = [np.nansum(s.loss * s.targets) / s.targets.sum() for s in (first, last)]
    assert average[1] < average[0] - 1

    counts = whole.data.tokens.counts
    deciles = frequency_deciles(counts, Vocabulary(whole.tokenizer, size=len(counts)))
    assert first.types.tolist() == [(deciles == b).sum() for b in range(10)] + [(deciles == -1).sum()]
    own = token_losses(whole.plain.model.eval(), whole.summarizer.windows, batch_size=4)
    assert average[1] == pytest.approx(own.mean(), rel=1e-4)


def test_ids_that_the_tokenizer_does_not_have_are_types_without_a_decile(data_folder, tmp_path, whole):
    run = tiny_run(data_folder, tmp_path, steps=1, shape={"vocab_size": 330})
    run.train()
    room, exact = (read_summaries(folder)[0].types for folder in (tmp_path, whole.folder.path))
    assert (room - exact).tolist() == [0] * 10 + [10]


def test_kept_steps_are_summarised_too_and_none_twice(data_folder, tmp_path):
    tiny_run(data_folder, tmp_path, steps=STEPS).train(schedule=every_step(keep=(2, 16)))
    assert 2 in summary_steps(STEPS)
    assert 16 not in summary_steps(STEPS)
    assert [s.step for s in read_summaries(tmp_path)] == sorted({*summary_steps(STEPS), 16})


def test_a_run_that_is_to_keep_none_writes_none(data_folder, tmp_path):
    assert summary_steps(STEPS, 0) == []
    tiny_run(data_folder, tmp_path, steps=3).train(schedule=every_step(summaries=0, keep=(2,)))
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / SUMMARY_FILE).exists()


@pytest.mark.parametrize("died_at", [3, SAVE_EVERY, SAVE_EVERY + 4])  # without a state, at one, beyond one
def test_a_resumed_run_writes_every_summary_once_and_as_if_uninterrupted(data_folder, tmp_path, whole, died_at):
    run = tiny_run(data_folder, tmp_path, steps=STEPS)
    at_batch(run, died_at, die)
    with pytest.raises(Killed):
        run.train(schedule=every_step())
    with (tmp_path / SUMMARY_FILE).open("a") as file:
        file.write('{"step":9,"tok')  # and half a line
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step())
    assert (tmp_path / SUMMARY_FILE).read_text() == (whole.folder.path / SUMMARY_FILE).read_text()


def without(name):
    line = json.loads(some_summary(2, 2, np.ones).to_json())
    del line[name]
    return json.dumps(line)


def with_value(name, value):
    return json.dumps({**json.loads(some_summary(2, 2, np.ones).to_json()), name: value})


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('{"step":1,"tok', id="half"),
        pytest.param("", id="blank"),
        pytest.param("[]", id="list"),
        pytest.param("3", id="number"),
        pytest.param(without("routing"), id="no routing"),
        pytest.param(without("step"), id="no step"),
        pytest.param(with_value("loss", "low"), id="text"),
        pytest.param(with_value("bank_norm", 3), id="number for a table"),
        pytest.param(with_value("bank_norm", [[1, 2]]), id="short table"),
        pytest.param(with_value("speed", [1]), id="unknown"),
        pytest.param("\udcff", id="no UTF-8"),
    ],
)
def test_a_damaged_file_is_told_in_one_sentence(tmp_path, line):
    good = some_summary(2, 2, np.ones).to_json()
    text = f"{good}\n{line}\n{good}\n"
    (tmp_path / SUMMARY_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"summaries\.jsonl is damaged \(.*\); remove it or copy it anew\.") as told:
        read_summaries(tmp_path)
    assert "\n" not in str(told.value)


def test_a_folder_without_summaries_has_none(tmp_path):
    assert read_summaries(tmp_path) == []
