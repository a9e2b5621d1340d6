"""The log of a run: one JSON record a line, and by choice the same as CSV or for TensorBoard."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

from tide.cli import UserError
from tide.training.folder import LOG_FILE

CSV_FILE = "train_log.csv"
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS = ("csv", "tensorboard")


class Tracker(Protocol):
    """What Accelerate's trackers offer."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Takes the numbers of one step."""

    def finish(self) -> None:
        """Writes what is left."""


class CsvTracker:
    """One row a record; the columns are those of the first record."""

    def __init__(self, folder: Path):
        self.file = folder / CSV_FILE
        records = [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]
        self.file.unlink(missing_ok=True)  # a resumed run writes what its log still holds, then goes on
        for record in records:
            self.log(flat(record), step=record["step"])

    def log(self, values: dict[str, Any], step: int) -> None:
        """Appends a row, and the header before the first."""
        begins = not self.file.exists()
        with self.file.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=["step", *(key for key in values if key != "step")])
            if begins:
                writer.writeheader()
            writer.writerow({**values, "step": step})

    def finish(self) -> None:
        """Every row is in the file already."""


def make_trackers(names: tuple[str, ...], folder: Path, start: int) -> list[Tracker]:
    """The trackers by name, for the main process.

    Args:
        names: of `TRACKERS`.
        folder: of the run; holds its log already.
        start: step to go on from; what an earlier part of the run logged beyond it is dropped.
    """
    trackers: list[Tracker] = []
    if "csv" in names:
        trackers.append(CsvTracker(folder))
    if "tensorboard" in names:
        from accelerate.tracking import TensorBoardTracker

        board = TensorBoardTracker(TENSORBOARD_FOLDER, logging_dir=folder, purge_step=start + 1)
        board.start()
        trackers.append(board)
    return trackers


def check_trackers(names: list[str]) -> tuple[str, ...]:
    """Checks that the packages behind the trackers are there.

    Raises:
        UserError: when one is not.
    """
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise UserError('--log-with tensorboard needs the package: pip install "tide-explorer[tensorboard]".')
    return tuple(names)


class TrainingLog:
    """Writes records into `train_log.jsonl` and hands them to the trackers."""

    def __init__(self, folder: Path, trackers: tuple[str, ...], start: int):
        self._out = (folder / LOG_FILE).open("a", encoding="utf-8")
        self._trackers = make_trackers(trackers, folder, start)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record, which has a `step`."""
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()
        for tracker in self._trackers:
            tracker.log({k: v for k, v in flat(record).items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        """Closes the files."""
        self._out.close()
        for tracker in self._trackers:
            tracker.finish()


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """A record with one number a key: lists become `key/layer_0`, `key/layer_1`, ..."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        row.update({f"{key}/layer_{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {key: value})
    return row
