"""The training loop: what models of one seed share, and that a run survives being killed."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny_run import SAVE_EVERY, every_step, tiny_recipe, tiny_run
from tide import Intervention, TideForCausalLM
from tide.checkpoint import load_checkpoint
from tide.cli import UserError
from tide.training import loop
from tide.training.module import build_model, build_optimizer

ROOT = Path(__file__).parents[2]
STEPS = 24


def log_of(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def losses(folder):
    return [(record["step"], record["loss"]) for record in log_of(folder)]


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Killed(BaseException):
    """Stands for a kill inside this process."""


def train_until(run, step):
    """Trains and dies before the batch of `step` is used."""
    original = run.data.batch

    def batch(number, *share):
        if number == step:
            raise Killed
        return original(number, *share)

    run.data.batch = batch
    with pytest.raises(Killed):
        run.train(schedule=every_step())


@pytest.fixture(scope="module")
def finished(data_folder, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run = tiny_run(data_folder, out, steps=STEPS)
    assert run.train(schedule=every_step()) == STEPS
    return out, run.plain.model.eval()


def test_the_loss_falls_on_a_text_that_can_be_learnt(data_folder, tmp_path):
    tiny_run(data_folder, tmp_path / "run", steps=90).train(schedule=every_step())
    values = [loss for _, loss in losses(tmp_path / "run")]
    assert len(values) == 90
    assert values[0] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.1)  # a uniform guess among 320 ids
    assert sum(values[-10:]) / 10 < values[0] / 3


def test_the_log_says_steps_tokens_rate_and_null_weight(finished):
    out, _ = finished
    records = log_of(out)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["tokens"] for r in records] == [64 * step for step in range(1, STEPS + 1)]
    assert records[0]["learning_rate"] == pytest.approx(1e-4)
    assert records[4]["learning_rate"] == pytest.approx(1e-2)
    assert records[-1]["learning_rate"] == pytest.approx(1e-3)
    assert all(len(r["null_weight"]) == 2 and all(0 < w < 1 for w in r["null_weight"]) for r in records)
    assert all(r["gradient_norm"] > 0 and r["tokens_per_second"] > 0 for r in records)


def test_a_finished_run_is_a_checkpoint_with_the_counts_of_its_tokens(data_folder, finished):
    out, model = finished
    assert not list(out.glob("state-*"))
    assert not list(out.glob("*.tmp"))
    loaded = TideForCausalLM.from_pretrained(out).eval()
    assert loaded.dtype == torch.bfloat16
    trained = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.state_dict().items())
    load_checkpoint(out)  # tokenizer and all
    data = tiny_run(data_folder, out, steps=STEPS).data
    seen = torch.cat([data.batch(step) for step in range(STEPS)]).flatten()
    counts = load_file(out / "token_counts.safetensors")["counts"]
    assert counts.tolist() == seen.bincount(minlength=320).tolist()


def test_base_and_tide_see_the_same_batches_and_start_from_the_same_backbone(data_folder, tmp_path):
    base, tide = (tiny_run(data_folder, tmp_path / str(k), num_banks=k) for k in (0, 2))
    for step in (0, 1, 17, 400):
        assert torch.equal(base.data.batch(step), tide.data.batch(step))
    base_model, tide_model = (build_model(run.config, seed=5) for run in (base, tide))
    weights = tide_model.state_dict()
    for name, value in base_model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    off = Intervention.layers_off(range(2))
    with torch.no_grad():
        ids = tide.data.batch(0)
        assert torch.equal(tide_model(ids, intervention=off).logits, base_model(ids).logits)
    other = build_model(base.config, seed=6).state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(other, weights["model.embed_tokens.weight"])


def test_accumulated_gradients_are_those_of_the_whole_batch(data_folder, tmp_path):
    for micro in (1, 4):
        tiny_run(data_folder, tmp_path / str(micro), steps=6, micro_batch_size=micro).train(schedule=every_step())
    one, four = ([loss for _, loss in losses(tmp_path / str(m))] for m in (1, 4))
    assert one == pytest.approx(four, abs=2e-4)


def test_weight_decay_spares_norm_gains_and_biases(make_model):
    model = make_model(router_null_bias=True)
    recipe = tiny_recipe()
    decayed, spared = build_optimizer(model, recipe).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (recipe.weight_decay, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    spared_names = {names[id(p)] for p in spared["params"]}
    assert spared_names == {name for name in names.values() if "norm" in name or "bias" in name}
    assert "model.memory.norm.weight" in spared_names  # a matrix, but of gains
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_a_killed_run_resumes_to_exactly_the_losses_of_an_uninterrupted_one(data_folder, tmp_path):
    steps, out = 45, tmp_path / "killed"
    command = [sys.executable, "-m", "tests.training.tiny_run", str(data_folder), str(out), str(steps)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob("state-*[0-9]")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.6))  # any moment: between steps, in a step, while a state is written
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"

    tiny_run(data_folder, out, steps=steps).train(resume=True, schedule=every_step())
    tiny_run(data_folder, tmp_path / "whole", steps=steps).train(schedule=every_step())
    assert losses(out) == losses(tmp_path / "whole")
    assert [step for step, _ in losses(out)] == list(range(1, steps + 1))
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not list(out.glob("state-*"))


@pytest.mark.parametrize("died_at", [SAVE_EVERY, SAVE_EVERY + 1, 4 * SAVE_EVERY - 1])
def test_a_run_resumes_from_its_latest_state_wherever_it_died(data_folder, tmp_path, finished, died_at):
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), died_at)
    assert [step for step, _ in losses(tmp_path)] == list(range(1, died_at + 1))
    with (tmp_path / "train_log.jsonl").open("a") as log:
        log.write('{"step": 99, "lo')  # and half a line
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step())
    assert losses(tmp_path) == losses(finished[0])


def test_a_run_that_died_before_its_first_state_starts_over(data_folder, tmp_path, finished):
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), 3)
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step())
    assert losses(tmp_path) == losses(finished[0])


def test_a_kill_while_a_state_is_written_leaves_the_one_before_it(data_folder, tmp_path, finished, monkeypatch):
    save, calls = loop.dcp.save, []

    def die_at_the_second(state, checkpoint_id, **kwargs):
        calls.append(checkpoint_id)
        if len(calls) == 2:
            checkpoint_id.mkdir()
            (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
            raise Killed
        return save(state, checkpoint_id=checkpoint_id, **kwargs)

    monkeypatch.setattr(loop.dcp, "save", die_at_the_second)
    with pytest.raises(Killed):
        tiny_run(data_folder, tmp_path, steps=STEPS).train(schedule=every_step())
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.glob("state-*")) == ["state-0000005", "state-0000010.tmp"]
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step(save_every=7))
    assert losses(tmp_path) == losses(finished[0])
    assert not list(tmp_path.glob("state-*"))


def test_of_two_states_the_later_is_used(data_folder, tmp_path, finished):
    """A kill between the rename of the new state and the removal of the old one leaves both."""
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), SAVE_EVERY + 1)
    shutil.copytree(tmp_path / "state-0000005", tmp_path / "state-0000003")
    (tmp_path / "state-0000003" / "__0_0.distcp").unlink()
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step())
    assert losses(tmp_path) == losses(finished[0])


@pytest.mark.parametrize("change", [{"steps": STEPS + 1}, {"num_banks": 3}, {"seed": 1}, {"peak_lr": 2e-2}])
def test_resuming_with_other_settings_is_refused_and_changes_nothing(data_folder, tmp_path, change):
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), SAVE_EVERY + 2)
    before = files_of(tmp_path)
    with pytest.raises(UserError, match=r"holds a run with other settings \(.*\); choose another --out") as refusal:
        tiny_run(data_folder, tmp_path, **{"steps": STEPS, **change}).train(resume=True)
    assert "\n" not in str(refusal.value)
    assert files_of(tmp_path) == before


def test_an_unfinished_run_is_not_overwritten_and_a_finished_one_not_resumed(data_folder, tmp_path, finished):
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), SAVE_EVERY + 2)
    for folder, resume, message in ((tmp_path, False, "add --resume"), (finished[0], True, "holds a finished run")):
        before = files_of(folder)
        with pytest.raises(UserError, match=message):
            tiny_run(data_folder, folder, steps=STEPS).train(resume=resume)
        assert files_of(folder) == before


def test_a_damaged_recipe_is_told(data_folder, tmp_path):
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(UserError, match=r"recipe\.json is damaged"):
        tiny_run(data_folder, tmp_path).train(resume=True)


def test_how_a_run_is_computed_may_change_when_it_is_resumed(data_folder, tmp_path, finished):
    """Micro batches, attention and checkpointing change no more than the order of sums."""
    train_until(tiny_run(data_folder, tmp_path, steps=STEPS), SAVE_EVERY + 2)
    other = tiny_run(
        data_folder, tmp_path, steps=STEPS, micro_batch_size=4, attention="eager", gradient_checkpointing=True
    )
    assert other.settings == tiny_run(data_folder, tmp_path, steps=STEPS).settings
    other.train(resume=True, schedule=every_step())
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx([loss for _, loss in losses(finished[0])], abs=1e-3)


def test_a_run_stops_where_it_is_told_keeps_a_checkpoint_and_goes_on(data_folder, tmp_path, finished):
    schedule = every_step(stop_at=13, keep=(9,))
    assert tiny_run(data_folder, tmp_path, steps=STEPS).train(schedule=schedule) == 13
    assert [p.name for p in tmp_path.glob("state-*")] == ["state-0000013"]
    assert not (tmp_path / "config.json").exists()
    kept, _ = load_checkpoint(tmp_path / "step-0000009", dtype=torch.bfloat16)
    counts = load_file(tmp_path / "step-0000009" / "token_counts.safetensors")["counts"]
    assert counts.sum() == 9 * 64
    assert json.loads((tmp_path / "step-0000009" / "recipe.json").read_text())["steps_done"] == 9

    assert tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step()) == STEPS
    assert losses(tmp_path) == losses(finished[0])
    assert (tmp_path / "model.safetensors").read_bytes() == (finished[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "step-0000009" / "model.safetensors").exists()
    whole = TideForCausalLM.from_pretrained(finished[0]).state_dict()
    assert any(not torch.equal(weight, whole[name]) for name, weight in kept.state_dict().items())


@pytest.mark.parametrize("name", ["flash_attention_2", "nonsense"])
def test_attention_that_is_not_to_be_had_is_refused_in_one_sentence(data_folder, tmp_path, name):
    with pytest.raises(UserError, match=rf"^Attention '{name}' cannot be had here \(.+\); give --attention sdpa\.$"):
        tiny_run(data_folder, tmp_path, steps=2, attention=name).train()


def test_gradient_checkpointing_changes_no_number(data_folder, tmp_path, finished):
    run = tiny_run(data_folder, tmp_path, steps=STEPS, gradient_checkpointing=True)
    run.train(schedule=every_step())
    assert losses(tmp_path) == losses(finished[0])


def test_a_compiled_run_has_the_same_losses(data_folder, tmp_path, finished):
    tiny_run(data_folder, tmp_path, steps=6, compile=True, warmup_steps=4).train(schedule=every_step())
    eager = tiny_run(data_folder, tmp_path / "eager", steps=6, warmup_steps=4)
    eager.train(schedule=every_step())
    compiled, plain = ([loss for _, loss in losses(folder)] for folder in (tmp_path, tmp_path / "eager"))
    assert compiled == pytest.approx(plain, abs=1e-3)


def test_a_frozen_backbone_stays_as_it_was(data_folder, tmp_path):
    run = tiny_run(data_folder, tmp_path, freeze_backbone=True, steps=3)
    before = {name: weight.clone() for name, weight in run.initial().state_dict().items()}
    run.train(schedule=every_step())
    for name, weight in run.plain.model.state_dict().items():
        learns = "memory" in name or "router" in name
        assert torch.equal(weight, before[name]) != learns, name


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail] No space left")]
)
def test_a_full_disk_is_told_and_the_latest_state_stays(data_folder, tmp_path, finished, monkeypatch, error):
    save, calls = loop.dcp.save, []

    def full_at_the_second(state, checkpoint_id, **kwargs):
        calls.append(checkpoint_id)
        if len(calls) == 2:
            raise error
        return save(state, checkpoint_id=checkpoint_id, **kwargs)

    monkeypatch.setattr(loop.dcp, "save", full_at_the_second)
    with pytest.raises(
        UserError, match=r"state-0000010 could not be saved in .*: the disk is full; free space"
    ) as told:
        tiny_run(data_folder, tmp_path, steps=STEPS).train(schedule=every_step())
    assert "\n" not in str(told.value)
    monkeypatch.undo()
    assert (tmp_path / "state-0000005").is_dir()
    tiny_run(data_folder, tmp_path, steps=STEPS).train(resume=True, schedule=every_step())
    assert losses(tmp_path) == losses(finished[0])
