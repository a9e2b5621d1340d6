"""The log as CSV and for TensorBoard: the numbers of the JSON lines, each once, also when a run was interrupted."""

import csv
import importlib.util
import json
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.launch import at_batch
from tests.training.tiny_run import SAVE_EVERY, every_step, tiny_run
from tide.cli import UserError
from tide.training.__main__ import main
from tide.training.log import TRACKERS, check_trackers, flat

STEPS = 12


class Killed(BaseException):
    """Stands for a kill inside this process."""


def die():
    raise Killed


def train(data_folder, out, trackers, dies_at=None, resume=False, **changes):
    """Trains, or trains and dies before the batch of a step."""
    run = tiny_run(data_folder, out, steps=STEPS, **changes)
    schedule = every_step(trackers=trackers)
    if dies_at is None:
        run.train(resume, schedule)
        return
    at_batch(run, dies_at, die)
    with pytest.raises(Killed):
        run.train(resume, schedule)


def wait_for_the_next_second():
    """TensorBoard reads a run's files in the order of the seconds in their names."""
    time.sleep(1 - time.time() % 1)


def records_of(folder):
    """Rows of the JSON lines, one number a column."""
    return [flat(json.loads(line)) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def csv_of(folder):
    with (folder / "train_log.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file, strict=True)]


def tensorboard_of(folder):
    """Rows as TensorBoard shows them."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    rows: dict[int, dict] = {}
    for name in board.Tags()["scalars"]:
        for event in board.Scalars(name):
            row = rows.setdefault(event.step, {"step": event.step})
            assert name not in row, f"{name} of step {event.step} is there twice"
            row[name] = event.value
    return [rows[step] for step in sorted(rows)]


def assert_logs_agree(folder, num_steps=STEPS):
    records = records_of(folder)
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    assert csv_of(folder) == records
    shown = tensorboard_of(folder)
    assert [row.keys() for row in shown] == [record.keys() for record in records]
    for row, record in zip(shown, records, strict=True):
        assert row == {name: pytest.approx(float(np.float32(value))) for name, value in record.items()}


def test_all_logs_hold_the_same_numbers(data_folder, tmp_path):
    train(data_folder, tmp_path, TRACKERS)
    assert_logs_agree(tmp_path)
    header = (tmp_path / "train_log.csv").read_text().splitlines()[0]
    assert header == (
        "step,tokens,loss,gradient_norm,learning_rate,tokens_per_second,null_weight/layer_0,null_weight/layer_1"
    )


def test_a_base_model_has_no_columns_of_the_null_bank(data_folder, tmp_path):
    train(data_folder, tmp_path, TRACKERS, num_banks=0)
    assert_logs_agree(tmp_path)
    assert not [name for name in csv_of(tmp_path)[0] if name.startswith("null_weight")]


@pytest.mark.parametrize("dies_at", [3, SAVE_EVERY, SAVE_EVERY + 3])  # without a state, at one, beyond one
def test_an_interrupted_run_logs_every_step_once(data_folder, tmp_path, dies_at):
    train(data_folder, tmp_path, TRACKERS, dies_at=dies_at)
    assert_logs_agree(tmp_path, num_steps=dies_at)
    with (tmp_path / "train_log.csv").open("a") as file:
        file.write("9,576,4.")  # and half a row
    wait_for_the_next_second()
    train(data_folder, tmp_path, TRACKERS, dies_at=SAVE_EVERY + 4, resume=True)
    assert_logs_agree(tmp_path, num_steps=SAVE_EVERY + 4)
    wait_for_the_next_second()
    train(data_folder, tmp_path, TRACKERS, resume=True)
    assert_logs_agree(tmp_path)


def test_a_csv_that_is_asked_for_late_has_the_rows_from_before(data_folder, tmp_path):
    train(data_folder, tmp_path, (), dies_at=SAVE_EVERY + 1)
    assert not (tmp_path / "train_log.csv").exists()
    train(data_folder, tmp_path, ("csv",), resume=True)
    assert csv_of(tmp_path) == records_of(tmp_path)
    assert len(csv_of(tmp_path)) == STEPS
    assert not (tmp_path / "tensorboard").exists()


def test_without_its_package_tensorboard_is_refused_before_anything_is_made(data_folder, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec

    def without_tensorboard(name, *package):
        return None if name == "tensorboard" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r'pip install "tide-explorer\[tensorboard\]"') as refusal:
        main(["--data", str(data_folder), "--out", str(out), "--device", "cpu", "--log-with", "csv", "tensorboard"])
    assert "\n" not in str(refusal.value)
    assert not out.exists()
    assert check_trackers(["csv"]) == ("csv",)


def test_the_packages_behind_the_trackers_are_found_where_they_are():
    assert check_trackers(list(TRACKERS)) == TRACKERS


def test_lists_become_a_column_for_each_layer():
    record = {"step": 3, "loss": 1.5, "null_weight": [0.25, 0.5], "empty": []}
    assert flat(record) == {"step": 3, "loss": 1.5, "null_weight/layer_0": 0.25, "null_weight/layer_1": 0.5}
