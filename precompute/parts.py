"""The finished pieces of a stage that is not finished: what a killed run leaves, and what several processes share.

    FOLDER/<stage>.parts/<key>/<piece>/<name>.parquet, .safetensors, ...; cost.json

A piece is written under a temporary name and renamed, so that a piece that is there is whole.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors import safe_open

from precompute.measure import Cost
from precompute.store import Tables, told, write_tables

COST_FILE = "cost.json"


class Parts:
    """The pieces of one stage.

    Args:
        folder: the artifacts folder.
        stage: its name.
        key: names what the stage is made from; pieces of another key are none of this.
        pieces: names of all pieces, in the order in which they are combined.
    """

    def __init__(self, folder: Path, stage: str, key: str, pieces: Sequence[str]):
        self.pieces = tuple(pieces)
        self._artifacts = folder
        self._all = folder / f"{stage}.parts"
        self._folder = self._all / key

    def missing(self, pieces: Sequence[str] | None = None) -> list[str]:
        """The pieces, of all or of some, that are not there yet, in order."""
        return [
            piece
            for piece in (self.pieces if pieces is None else pieces)
            if not (self._folder / piece / COST_FILE).is_file()
        ]

    def prepare(self) -> None:
        """Makes the folder, without what runs with other inputs left there."""
        with told(self._artifacts):
            if self._all.is_dir():
                for other in self._all.iterdir():
                    if other != self._folder:
                        shutil.rmtree(other)
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob("*.tmp"):
                shutil.rmtree(leftover)

    def write(self, piece: str, tables: Tables, cost: Cost) -> None:
        """Writes a piece, whole or not at all.

        Raises:
            ArtifactError: when the folder cannot be written.
        """
        temporary = self._folder / f"{piece}.tmp"
        with told(self._artifacts, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_tables(temporary, tables)
            (temporary / COST_FILE).write_text(json.dumps(cost.record()), encoding="utf-8")
            shutil.rmtree(self._folder / piece, ignore_errors=True)
            os.replace(temporary, self._folder / piece)

    def files(self) -> dict[str, Path]:
        """All files of all pieces by name without suffix; the names of different pieces differ."""
        found = [f for piece in self.pieces for f in sorted((self._folder / piece).iterdir()) if f.name != COST_FILE]
        return {file.name: file for file in found}

    def file(self, piece: str, name: str) -> Path:
        """A file of a piece, named with its suffix."""
        return self._folder / piece / name

    def tensors(self, piece: str, name: str) -> dict[str, np.ndarray]:
        """The named arrays of one safetensors file of a piece."""
        with safe_open(self.file(piece, f"{name}.safetensors"), framework="np") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118

    def frame(self, piece: str, name: str) -> pd.DataFrame:
        """One Parquet table of a piece."""
        return pd.read_parquet(self.file(piece, f"{name}.parquet"))

    def costs(self) -> list[dict[str, float]]:
        """What each piece cost."""
        return [json.loads(self.file(piece, COST_FILE).read_text(encoding="utf-8")) for piece in self.pieces]

    def clear(self) -> None:
        """Removes the pieces, once what is made of them is written."""
        shutil.rmtree(self._all, ignore_errors=True)
