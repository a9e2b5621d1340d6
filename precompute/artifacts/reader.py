"""Opening an artifacts folder, checking what it belongs to, and mapping its files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from precompute.store import COMMAND, ArtifactError, damage, read_manifest
from tide.checkpoint import fingerprint
from tide.cli import UserError

if TYPE_CHECKING:
    import pandas as pd


class Reader:
    """An opened artifacts folder: what all parts of `Artifacts` rest on.

    Attributes:
        folder: where they lie.
        manifest: the content of manifest.json.
        checkpoint: the checkpoint that they were made from, absolute; it may have been moved since.
        base: the Base checkpoint of the collapse study, absolute, or None.
        num_layers: L.
        num_banks: K.
        vocab_size: V.
        tables: "embedding", "unembedding" where it is another table, then banks 0..K-1: the order of stored tables.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], checkpoint: Path | None = None):
        self.folder, self.manifest = folder, manifest
        self.checkpoint = (checkpoint or folder / manifest["checkpoint"]["path"]).resolve()
        self.base = (folder / manifest["base"]["path"]).resolve() if manifest["base"] else None
        model = manifest["model"]
        self.num_layers: int = model["num_layers"]
        self.num_banks: int = model["num_banks"]
        self.vocab_size: int = model["vocab_size"]
        heads = ("embedding",) if model["tied"] else ("embedding", "unembedding")
        self.tables: tuple[str | int, ...] = (*heads, *range(self.num_banks))
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(cls, folder: str | Path, checkpoint: str | Path | None = None) -> Self:
        """Opens an artifacts folder.

        Args:
            folder: what `tide-precompute` wrote.
            checkpoint: the checkpoint that they must belong to; by default the one that the manifest names, where
                that is still there.

        Raises:
            ArtifactError: one sentence, when the folder or its manifest is missing or broken, when a listed file is
                missing, truncated or changed, or when the checkpoint (or the Base checkpoint) is another one by now.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        artifacts = cls(folder, manifest, None if checkpoint is None else Path(checkpoint))
        for stage, entry in manifest["stages"].items():
            if problem := damage(folder, entry):
                raise ArtifactError(f"{folder} is broken: {problem}; run `{artifacts._command(stage)}`.")
        artifacts._check_checkpoint(artifacts.checkpoint, manifest["checkpoint"], required=checkpoint is not None)
        if artifacts.base is not None:
            artifacts._check_checkpoint(artifacts.base, manifest["base"], required=False)
        return artifacts

    def _check_checkpoint(self, checkpoint: Path, recorded: dict[str, str], required: bool) -> None:
        if not required and not checkpoint.is_dir():
            return  # artifacts can be read where the checkpoint is not
        try:
            same = fingerprint(checkpoint) == recorded["fingerprint"]
        except UserError as error:
            raise ArtifactError(f"{self.folder} cannot be matched with its checkpoint: {error}") from error
        if not same:
            raise ArtifactError(
                f"{self.folder} holds artifacts of another checkpoint than {checkpoint} is now; "
                f"delete the folder and run `{self._command()}`."
            )

    def has(self, stage: str) -> bool:
        """Whether a stage was run."""
        return stage in self.manifest["stages"]

    def _command(self, stage: str | None = None) -> str:
        only = f" --only {stage}" if stage else ""
        return f"{COMMAND} {self.checkpoint} --out {self.folder}{only}"

    def _path(self, stage: str, file: str) -> Path:
        """A file of a stage.

        Raises:
            ArtifactError: when the stage was not run.
        """
        if not self.has(stage):
            raise ArtifactError(f"{self.folder} has no stage {stage}; run `{self._command(stage)}`.")
        return self.folder / stage / file

    def tensors(self, stage: str, name: str | None = None) -> Any:
        """The open, memory-mapped tensors of a file of a stage: `.get_slice(name)[...]`, `.get_tensor(name)`.

        Args:
            stage: its name.
            name: of the file, without suffix; by default the stage's.

        Raises:
            ArtifactError: when the stage was not run or the file is broken.
        """
        path = self._path(stage, f"{name or stage}.safetensors")
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="np")
            except (SafetensorError, OSError) as error:
                raise ArtifactError(f"{path} is broken; run `{self._command(stage)}`.") from error
        return self._handles[path]

    def frame(self, stage: str, name: str | None = None, columns: list[str] | None = None) -> "pd.DataFrame":
        """A table of a stage.

        Args:
            stage: its name.
            name: of the file, without suffix; by default the stage's.
            columns: read these alone.

        Raises:
            ArtifactError: when the stage was not run or the file is broken.
        """
        import pandas as pd

        path = self._path(stage, f"{name or stage}.parquet")
        try:
            return pd.read_parquet(path, columns=columns)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ArtifactError(f"{path} is broken; run `{self._command(stage)}`.") from error

    def parameters(self, stage: str) -> dict[str, Any]:
        """How a stage was made, as the manifest says it.

        Raises:
            ArtifactError: when it was not run.
        """
        self._path(stage, "")
        return self.manifest["stages"][stage]["parameters"]

    def _check_token(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"There is no token id {token_id}; they go from 0 to {self.vocab_size - 1}.")
        return int(token_id)

    @property
    def table_names(self) -> list[str]:
        """What `tables` are called in file names and data frames: "embedding", perhaps "unembedding", "bank_0", ..."""
        return [self._table_name(table) for table in self.tables]

    def _table_name(self, table: str | int) -> str:
        """The name of a table, as in `table_names`."""
        known = self.tables[self._table_row(table)]
        return known if isinstance(known, str) else f"bank_{known}"

    def _table_row(self, table: str | int) -> int:
        """Where a table stands among the stored ones: the order of `tables`."""
        is_known = not isinstance(table, bool) and isinstance(table, (str, int, np.integer))
        if not is_known or table not in self.tables:
            heads = " or ".join(f'"{name}"' for name in self.tables if isinstance(name, str))
            has = f" or a bank 0..{self.num_banks - 1}" if self.num_banks else "; the model has no banks"
            raise ValueError(f"There is no table {table!r}; it is {heads}{has}.")
        return self.tables.index(table)

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"There is no layer {layer}; they go from 0 to {self.num_layers - 1}.")
        return int(layer)

    def _check_bank(self, bank: int, with_null: bool = True) -> int:
        last = self.num_banks if with_null else self.num_banks - 1
        if not 0 <= bank <= last:
            null = ", the last being null" if with_null else ""
            raise ValueError(f"There is no bank {bank}; they go from 0 to {last}{null}.")
        return int(bank)
