"""The artifacts folder on disk: its manifest, how a stage is written to it, and what is checked before it is read.

    FOLDER/manifest.json           what was measured, on what, with what; which files there are
    FOLDER/<stage>/<name>.parquet  tables
    FOLDER/<stage>/<name>.safetensors  tensors
    FOLDER/<stage>/<name>.faiss    neighbour indexes, in FAISS's own form
    FOLDER/<stage>.parts/          finished pieces of a stage that is not finished (`precompute.parts`)

A stage is written to a temporary folder and renamed; the manifest, rewritten whole after each stage, then says that
it is there. A kill at any moment leaves a folder whose manifest tells the truth. No pickle anywhere.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tide.checkpoint import file_fingerprint
from tide.cli import UserError
from tide.files import write_text

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
COMMAND = "tide-precompute"


@dataclass(frozen=True)
class OwnForm:
    """A file in a form of its own.

    Attributes:
        suffix: ".faiss".
        write: writes it under the name that it is given.
    """

    suffix: str
    write: Callable[[Path], None]


Tables = Mapping[str, "pd.DataFrame | dict[str, np.ndarray] | OwnForm | Path"]
"""What a stage makes, by file name without suffix: a table (Parquet), named arrays (safetensors), a file in a form of
its own, or a file of one of its pieces, which is taken as it is."""


class ArtifactError(UserError):
    """An artifacts folder that cannot be used: one sentence that says why and what to run."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest of an artifacts folder.

    Raises:
        ArtifactError: when the folder or its manifest is missing, broken or of another schema version.
    """
    file = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise ArtifactError(
            f"There is no artifacts folder {folder}; make it with `{COMMAND} CHECKPOINT --out {folder}`."
        )
    again = f"delete the folder and run `{COMMAND} CHECKPOINT --out {folder}`"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} is no artifacts folder: it has no {MANIFEST_FILE}; "
            f"run `{COMMAND} CHECKPOINT` with another --out."
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} is broken: it cannot be read as JSON; {again}.") from error
    if not isinstance(manifest, dict) or "schema" not in manifest:
        raise ArtifactError(f"{file} is broken: it does not say its schema version; {again}.")
    if manifest["schema"] != SCHEMA_VERSION:
        raise ArtifactError(
            f"{folder} has schema version {manifest['schema']}, this program reads version {SCHEMA_VERSION}; {again}."
        )
    if not _is_complete(manifest):
        raise ArtifactError(f"{file} is broken: entries are missing; {again}.")
    return manifest


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether everything that readers take for granted is there, in the right type."""
    try:
        checkpoint, base, model = manifest["checkpoint"], manifest["base"], manifest["model"]
        texts = [checkpoint["path"], checkpoint["fingerprint"]] + ([base["path"], base["fingerprint"]] if base else [])
        if not isinstance(model["tied"], bool):
            return False
        numbers = [model[key] for key in ("num_layers", "num_banks", "vocab_size", "hidden_size")]
        for stage in manifest["stages"].values():
            texts += [stage["key"], *stage["needs"].values()]
            for name, entry in stage["files"].items():
                texts.append(entry["fingerprint"])
                numbers.append(entry["bytes"])
                path = PurePosixPath(name)  # a manifest must not lead out of its folder
                if path.is_absolute() or ".." in path.parts:
                    return False
    except (KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)


def damage(folder: Path, stage: dict[str, Any]) -> str | None:
    """What is wrong with the files of a stage, as a clause of a sentence; None where nothing is."""
    for name, entry in stage["files"].items():
        try:
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} is truncated or replaced: it has {size:,} bytes, the manifest says {entry['bytes']:,}"
            if file_fingerprint(folder / name) != entry["fingerprint"]:
                return f"{name} was changed since it was written"
        except OSError:
            return f"{name} is missing"
    return None


class Store:
    """An artifacts folder that is being written.

    Args:
        folder: made where it does not exist.
        identity: the manifest's entries "checkpoint" and "model"; a folder that holds artifacts of another
            checkpoint is refused.

    Raises:
        ArtifactError: when the folder holds something else, or artifacts of another checkpoint, or is broken.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise ArtifactError(f"--out {folder} is a file; give a folder.")
        with told(folder):
            self._open(identity)

    def _open(self, identity: dict[str, Any]) -> None:
        folder = self.folder
        if folder.is_dir() and any(folder.iterdir()):
            self.manifest = read_manifest(folder)
            if self.manifest["checkpoint"]["fingerprint"] != identity["checkpoint"]["fingerprint"]:
                raise ArtifactError(
                    f"{folder} holds artifacts of another checkpoint ({self.manifest['checkpoint']['path']}, as it was "
                    f"then); delete the folder or choose another --out."
                )
            self.manifest.update(identity)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.manifest = {"schema": SCHEMA_VERSION, **identity, "base": None, "text": None, "stages": {}}
        for leftover in folder.glob("*.tmp"):  # of a run that was killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self._write_manifest()

    @classmethod
    def reopen(cls, folder: Path) -> "Store":
        """The folder as it is on disk now, which this or another process has opened before."""
        store = cls.__new__(cls)
        store.folder, store.manifest = folder, read_manifest(folder)
        return store

    def is_done(self, stage: str, key: str) -> bool:
        """Whether a stage is there, whole, and made from the very inputs that `key` names."""
        entry = self.manifest["stages"].get(stage)
        return entry is not None and entry["key"] == key and damage(self.folder, entry) is None

    def write_stage(
        self, stage: str, key: str, tables: Tables, record: dict[str, Any], top: dict[str, Any] | None = None
    ) -> None:
        """Writes a finished stage, whole or not at all.

        Args:
            stage: its name.
            key: names the inputs and parameters it was made from.
            tables: its files.
            record: what else the manifest says about it: "needs", the keys of the stages that it was made from;
                parameters, versions, seconds, peak memory.
            top: entries of the manifest itself that this stage brings: "text", "base".

        Raises:
            ArtifactError: when the folder cannot be written.
        """
        with told(self.folder, self.folder / f"{stage}.tmp"):
            self._write_stage(stage, key, tables, record, top or {})

    def _write_stage(self, stage: str, key: str, tables: Tables, record: dict[str, Any], top: dict[str, Any]) -> None:
        temporary, target = self.folder / f"{stage}.tmp", self.folder / stage
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        files = {
            f"{stage}/{file.name}": {"bytes": file.stat().st_size, "fingerprint": file_fingerprint(file)}
            for file in write_tables(temporary, tables)
        }
        if self.manifest["stages"].pop(stage, None) is not None:
            self._write_manifest()  # from here until the end the stage is not there
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        self.manifest["stages"][stage] = {"key": key, **record, "files": files}
        self.manifest.update(top)
        self._drop_stale()
        self._write_manifest()

    def _drop_stale(self) -> None:
        """Takes the stages out that were made from another version of a stage than is there now."""
        stages = self.manifest["stages"]
        while stale := [name for name, entry in stages.items() if self._is_stale(entry)]:
            for name in stale:
                del stages[name]
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _is_stale(self, entry: dict[str, Any]) -> bool:
        keys = {name: other["key"] for name, other in self.manifest["stages"].items()}
        return any(keys.get(name) != key for name, key in entry["needs"].items())

    def _write_manifest(self) -> None:
        write_text(self.folder / MANIFEST_FILE, json.dumps(self.manifest, indent=2) + "\n")


@contextlib.contextmanager
def told(folder: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Turns a full disk or a missing permission into one sentence, and removes what was half written.

    Args:
        folder: the artifacts folder.
        unfinished: folder that is removed when the block fails.

    Raises:
        ArtifactError: in the place of an error of writing.
    """
    try:
        yield
    except (OSError, SafetensorError, pa.ArrowException) as error:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise ArtifactError(f"{folder} cannot be written ({error}); make room or choose another --out.") from error


def write_tables(folder: Path, tables: Tables) -> list[Path]:
    """Writes tables into a folder; returns the files."""
    return [_write_table(folder, name, table) for name, table in tables.items()]


def _write_table(folder: Path, name: str, table: "pd.DataFrame | dict[str, np.ndarray] | OwnForm | Path") -> Path:
    if isinstance(table, Path):
        file = folder / table.name
        try:
            os.link(table, file)  # the piece stays until the stage is whole
        except OSError:  # a disk without links
            shutil.copyfile(table, file)
    elif isinstance(table, OwnForm):
        file = folder / f"{name}{table.suffix}"
        table.write(file)
    elif isinstance(table, dict):
        file = folder / f"{name}.safetensors"
        save_file({key: np.ascontiguousarray(array) for key, array in table.items()}, file)
    else:
        file = folder / f"{name}.parquet"
        table.to_parquet(file, index=False)
    return file
