"""The folder of a run: what it holds, what may be written when, and what a kill or a full disk leaves."""

import contextlib
import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tide.cli import UserError
from tide.files import write_text

RECIPE_FILE = "recipe.json"
LOG_FILE = "train_log.jsonl"
STATE_PREFIX = "state-"
KEPT_PREFIX = "step-"
LEAST_FREE_BYTES = 2**20


class RunFolder:
    """A run's folder.

    It holds `recipe.json`, the log, the summaries and, while the run is not finished, the latest `state-STEP`
    folder, from which it can be resumed. A state is written under a temporary name and renamed, and only then is the
    older one removed, so that a kill at any moment leaves a whole one. `step-STEP` folders are checkpoints that the
    run was asked to keep. When the last step is done the folder itself is the checkpoint: config.json comes last.
    """

    def __init__(self, path: Path):
        self.path = path

    def open(self, settings: dict[str, Any], about: dict[str, Any], resume: bool, logs: tuple[str, ...]) -> int:
        """Checks the folder against this run, or begins it.

        Args:
            settings: what must be the same for a run to be resumed.
            about: all that `recipe.json` is to say; written when the run begins.
            resume: go on with the run that the folder holds.
            logs: files of one JSON record a line, which are cut back to the latest state.

        Returns:
            The step to go on from.

        Raises:
            UserError: when the folder holds another run, a finished one, or one while `resume` is False. Nothing
                was changed then.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.path} cannot be made a folder: {error.strerror}.") from error
        recipe_file = self.path / RECIPE_FILE
        if not recipe_file.exists():
            with saving(self.path, recipe_file.name):
                write_text(recipe_file, json.dumps({**settings, **about}, indent=2) + "\n")
            return 0
        try:
            saved = json.loads(recipe_file.read_text(encoding="utf-8"))
        except ValueError as error:  # not JSON, or not text
            raise UserError(f"{recipe_file} is damaged; choose another --out.") from error
        if difference := self._difference(saved, settings):
            raise UserError(f"{self.path} holds a run with other {difference}; choose another --out.")
        if (self.path / "config.json").exists():
            raise UserError(f"{self.path} holds a finished run; choose another --out.")
        if not resume:
            raise UserError(f"{self.path} holds an unfinished run; add --resume to go on, or choose another --out.")
        start = self.latest_step()
        for name in logs:
            cut_log(self.path / name, start or -1)  # without a state, step 0 is done again too
        return start

    @staticmethod
    def _difference(saved: Any, settings: dict[str, Any]) -> str | None:
        """What differs between a saved run and this one, in words; None when nothing does.

        A setting that the saved run does not know, because a later version added it, is no difference.
        """
        if not isinstance(saved, dict):
            return "settings"
        for part, value in json.loads(json.dumps(settings)).items():
            stored = saved.get(part)
            if isinstance(value, dict) and isinstance(stored, dict):
                for name, number in value.items():
                    if name in stored and stored[name] != number:
                        return f"settings ({part}: {name} is {stored[name]}, not {number})"
            elif stored != value:
                return f"settings ({part})"
        return None

    def latest_step(self) -> int:
        """Step of the latest whole state, 0 where there is none."""
        return max((int(state.name.removeprefix(STATE_PREFIX)) for state in self._states()), default=0)

    def _states(self) -> list[Path]:
        return [p for p in self.path.glob(f"{STATE_PREFIX}*") if p.name.removeprefix(STATE_PREFIX).isdigit()]

    def state(self, step: int) -> Path:
        """The folder of the state after `step` steps."""
        return self.path / f"{STATE_PREFIX}{step:07d}"

    def kept(self, step: int) -> Path:
        """The folder of a checkpoint that the run keeps."""
        return self.path / f"{KEPT_PREFIX}{step:07d}"

    def temporary(self, target: Path) -> Path:
        """An empty place for what is to become `target`."""
        place = target.with_name(target.name + ".tmp")
        shutil.rmtree(place, ignore_errors=True)
        return place

    def replace(self, temporary: Path, target: Path) -> None:
        """Gives a whole folder its name; of states, only the new one stays."""
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        if target.name.startswith(STATE_PREFIX):
            for other in self._states():
                if other != target:
                    shutil.rmtree(other)

    def finish(self, checkpoint: Path) -> None:
        """Moves a whole checkpoint into the folder, config.json last, and removes the states."""
        for file in sorted(checkpoint.iterdir(), key=lambda f: f.name == "config.json"):
            os.replace(file, self.path / file.name)
        checkpoint.rmdir()
        for state in self.path.glob(f"{STATE_PREFIX}*"):  # also what a kill left half written
            shutil.rmtree(state)


@contextlib.contextmanager
def saving(folder: Path, what: str) -> Iterator[None]:
    """Tells a full disk in one sentence, whatever the library that met it raised.

    Raises:
        UserError: when the disk of `folder` is full.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _disk_is_full(folder, error):
            raise
        raise UserError(
            f"{what} could not be saved in {folder}: the disk is full; free space and go on with --resume."
        ) from error


def _disk_is_full(folder: Path, error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < LEAST_FREE_BYTES


def cut_log(file: Path, step: int) -> None:
    """Keeps the whole lines of a log that are not later than `step`: a killed run can leave half a line."""
    if file.exists():
        kept = [line for line in file.read_text(encoding="utf-8").splitlines() if _is_up_to(line, step)]
        write_text(file, "".join(line + "\n" for line in kept))


def _is_up_to(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def quiet_single_process() -> Iterator[None]:
    """Without the warning of torch.distributed.checkpoint that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        yield
