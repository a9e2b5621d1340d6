"""`Artifacts`: reading what `tide-precompute` wrote, a few rows at a time.

Nothing here loads torch, FAISS or transformers, and no tensor is read whole to answer for one token: tensors are
memory-mapped and sliced. Layers and banks are 0-based; the null bank is the last column of every routing table.
"""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from precompute.store import COMMAND, ArtifactError, damage, read_manifest
from tide.checkpoint import fingerprint
from tide.cli import UserError

if TYPE_CHECKING:
    import pandas as pd

OVERLAP_K = 10  # figure 13 compares the 10 nearest neighbours
METRICS = ("l2", "normalized_l2", "cosine_distance")


class Artifacts:
    """The artifacts of one checkpoint. Make it with `Artifacts.open`; safe to share between threads.

    Attributes:
        folder: where they lie.
        manifest: the content of manifest.json.
        checkpoint: the checkpoint that they were made from, absolute; it may have been moved since.
        base: the Base checkpoint of the collapse study, absolute, or None.
        num_layers: L.
        num_banks: K.
        vocab_size: V.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], checkpoint: Path | None = None):
        self.folder, self.manifest = folder, manifest
        self.checkpoint = (checkpoint or folder / manifest["checkpoint"]["path"]).resolve()
        self.base = (folder / manifest["base"]["path"]).resolve() if manifest["base"] else None
        model = manifest["model"]
        self.num_layers: int = model["num_layers"]
        self.num_banks: int = model["num_banks"]
        self.vocab_size: int = model["vocab_size"]
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: str | Path, checkpoint: str | Path | None = None) -> "Artifacts":
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
        """Whether a stage (frequency, routing, neighbors, collapse) was run."""
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

    def _tensors(self, stage: str) -> Any:
        """The open, memory-mapped tensors of a stage."""
        path = self._path(stage, f"{stage}.safetensors")
        if stage not in self._handles:
            try:
                self._handles[stage] = safe_open(path, framework="np")
            except (SafetensorError, OSError) as error:
                raise ArtifactError(f"{path} is broken; run `{self._command(stage)}`.") from error
        return self._handles[stage]

    def _column(self, name: str) -> Any:
        """One column of the token table, as an Arrow array."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._path("frequency", "tokens.parquet")
        try:
            return pq.read_table(path, columns=[name]).column(name)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"{path} is broken; run `{self._command('frequency')}`.") from error

    def _check_token(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"There is no token id {token_id}; they go from 0 to {self.vocab_size - 1}.")
        return int(token_id)

    # --- The vocabulary (appendix B) -------------------------------------------------------------------------

    @cached_property
    def counts(self) -> np.ndarray:
        """Occurrences of every token id in `count_corpus`: [V] int64."""
        return self._column("count").to_numpy()

    @cached_property
    def bins(self) -> np.ndarray:
        """Frequency decile of every token id, 0 rarest to 9 most common, -1 none: [V] int8 (appendix B)."""
        return self._column("decile").to_numpy()

    @property
    def count_corpus(self) -> str:
        """Names the text whose tokens were counted."""
        self._path("frequency", "")
        return self.manifest["stages"]["frequency"]["parameters"]["count_corpus"]

    @cached_property
    def texts(self) -> list[str]:
        """Decoded text of every token id, [V]; bytes that are no whole character are U+FFFD."""
        return self._column("text").to_pylist()

    @cached_property
    def shown(self) -> list[str]:
        """Visible form of every token id, [V] (`tide.tokens.Vocabulary.show`)."""
        return self._column("shown").to_pylist()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(np.flatnonzero(self._column("special").to_numpy()).tolist())

    # --- Neighbours (table 6, figure 13) ---------------------------------------------------------------------

    def neighbors(self, token_id: int, table: str | int = "embedding", k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The nearest tokens of a token by cosine, the nearest first, itself left out (table 6).

        Args:
            token_id: 0..V-1.
            table: "embedding", the input embedding, or a bank 0..K-1, whose vectors are M_k(v).
            k: how many, at most the number stored (50, or V - 1).

        Returns:
            Token ids [k] int64 and cosines [k] float32.

        Raises:
            ValueError: for a token id, table or k that is not there.
        """
        token_id, row = self._check_token(token_id), self._table_row(table)
        stored = self._tensors("neighbors")
        self._check_k(k, stored)
        ids = stored.get_slice("ids")[row : row + 1, token_id : token_id + 1, :k]
        cosines = stored.get_slice("cosines")[row : row + 1, token_id : token_id + 1, :k]
        return ids[0, 0].astype(np.int64), cosines[0, 0]

    def _table_row(self, table: str | int) -> int:
        if isinstance(table, str) and table == "embedding":
            return 0
        is_bank = isinstance(table, (int, np.integer)) and not isinstance(table, bool)
        if not is_bank or not 0 <= int(table) < self.num_banks:
            has = f" or a bank 0..{self.num_banks - 1}" if self.num_banks else "; the model has no banks"
            raise ValueError(f'There is no table {table!r}; it is "embedding"{has}.')
        return 1 + int(table)

    def _check_k(self, k: int, stored: Any) -> None:
        most = stored.get_slice("ids").get_shape()[2]
        if not 1 <= k <= most:
            raise ValueError(f"k is {k}; 1 to {most} neighbours are stored.")

    def overlap(self, token_id: int) -> np.ndarray:
        """Jaccard overlap of a token's 10 nearest in each bank with the 10 nearest in the input embedding (figure 13).

        Returns:
            [K] float32, 0 (none in common) to 1 (the same).

        Raises:
            ValueError: for a token id that is not there.
        """
        token_id, stored = self._check_token(token_id), self._tensors("neighbors")
        if not self.num_banks:  # safetensors does not slice an empty tensor
            return np.empty(0, dtype=np.float32)
        return stored.get_slice("overlap")[token_id : token_id + 1][0]

    def overlap_by_decile(self) -> "pd.DataFrame":
        """Mean of `overlap` over the tokens of each frequency decile (figure 13 by decile).

        Returns:
            Columns decile, bank, mean, sd (sample standard deviation, NaN for n < 2), n (tokens).
        """
        import pandas as pd

        overlap = pd.DataFrame(self._tensors("neighbors").get_tensor("overlap"), dtype=np.float64)
        rows = (
            overlap.assign(decile=self.bins).query("decile >= 0").melt("decile", var_name="bank", value_name="overlap")
        )
        rows["bank"] = rows["bank"].astype(np.int64)
        table = rows.groupby(["decile", "bank"], as_index=False)["overlap"].agg(mean="mean", sd="std", n="count")
        return table.astype({"decile": np.int64})

    def overlap_matrix(self, token_id: int, k: int = OVERLAP_K) -> np.ndarray:
        """Jaccard overlap of a token's k nearest neighbours between every two tables.

        Returns:
            [K+1, K+1] float32; the input embedding first, then bank 0..K-1; symmetric, ones on the diagonal.

        Raises:
            ValueError: for a token id or k that is not there.
        """
        token_id = self._check_token(token_id)
        stored = self._tensors("neighbors")
        self._check_k(k, stored)
        ids = stored.get_slice("ids")[:, token_id : token_id + 1, :k][:, 0]  # (K+1, k)
        common = (ids[:, None, :, None] == ids[None, :, None, :]).sum(axis=(2, 3))
        return (common / (2 * k - common)).astype(np.float32)

    # --- Routing (figure 10) ---------------------------------------------------------------------------------

    def routing(self, token_id: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Routing weights at the positions of the text that hold this token.

        Returns:
            mean [L, K+1] and sample standard deviation [L, K+1], float32, null last, and n, the number of
            positions. A mean of no position and a deviation of fewer than two are NaN.

        Raises:
            ValueError: for a token id that is not there.
        """
        token_id = self._check_token(token_id)
        stored, row = self._tensors("routing"), slice(token_id, token_id + 1)
        n = int(stored.get_slice("n")[row][0])
        return stored.get_slice("mean")[row][0], stored.get_slice("sd")[row][0], n

    def routing_by_decile(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Routing weights over all positions whose token is of a frequency decile (figure 10).

        Returns:
            mean [10, L, K+1] and sample standard deviation [10, L, K+1], float32, null last, and n [10] int64,
            positions.
        """
        stored = self._tensors("routing")
        return tuple(stored.get_tensor(f"decile_{name}") for name in ("mean", "sd", "n"))  # type: ignore[return-value]

    def routing_overall(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Routing weights over all positions: mean [L, K+1], sample standard deviation [L, K+1], float32, and n."""
        stored = self._tensors("routing")
        return (
            stored.get_tensor("overall_mean"),
            stored.get_tensor("overall_sd"),
            int(stored.get_tensor("overall_n")[0]),
        )

    def mean_injection(self) -> np.ndarray:
        """Mean over all positions of alpha_k M_k(v), what each (layer, bank) injects: [L, K, d] float32 (equation 3.6).

        n is that of `routing_overall`. It stands in for a bank that is switched off with the replacement "mean".

        Raises:
            ArtifactError: when the artifacts are older than this measurement.
        """
        return self._later("mean_injection")

    def once_contexts(self) -> list[np.ndarray]:
        """Contexts of up to 32 random tokens that the text holds once, by which their routing can be repeated live.

        Returns:
            Token ids [T] int64 of each, T up to 16; the last one is the token, its `routing` that of this position.

        Raises:
            ArtifactError: when the artifacts are older than this measurement.
        """
        return [context[context >= 0].astype(np.int64) for context in self._later("once_contexts")]

    def _later(self, name: str) -> np.ndarray:
        """A tensor that artifacts of an earlier version lack."""
        try:
            return self._tensors("routing").get_tensor(name)
        except SafetensorError as error:
            raise ArtifactError(f"{self.folder} is older than {name}; run `{self._command('routing')}`.") from error

    def top_tokens(self, layer: int, bank: int, k: int = 20, n_min: int = 5, largest: bool = True) -> "pd.DataFrame":
        """The tokens whose mean routing weight on a bank is largest (or smallest) in a layer.

        Args:
            layer: 0..L-1.
            bank: 0..K-1, or K for the null bank.
            k: how many tokens.
            n_min: tokens seen at fewer positions of the text are left out.
            largest: False for the smallest means.

        Returns:
            Columns token_id, mean, sd, n (positions), decile, count; ordered by mean, ties by token id.

        Raises:
            ValueError: for a layer or bank that is not there.
        """
        import pandas as pd

        if not 0 <= layer < self.num_layers:
            raise ValueError(f"There is no layer {layer}; they go from 0 to {self.num_layers - 1}.")
        if not 0 <= bank <= self.num_banks:
            raise ValueError(f"There is no bank {bank}; they go from 0 to {self.num_banks}, the last being null.")
        stored = self._tensors("routing")
        n = stored.get_tensor("n")
        cell = (slice(None), slice(layer, layer + 1), slice(bank, bank + 1))
        mean, sd = (stored.get_slice(name)[cell].reshape(-1) for name in ("mean", "sd"))
        seen = np.flatnonzero(n >= max(n_min, 1))
        order = seen[np.argsort(-mean[seen] if largest else mean[seen], kind="stable")][: max(k, 0)]
        return pd.DataFrame(
            {
                "token_id": order,
                "mean": mean[order],
                "sd": sd[order],
                "n": n[order],
                "decile": self.bins[order],
                "count": self.counts[order],
            }
        )

    # --- The collapse study (figures 2 and 6) ----------------------------------------------------------------

    @cached_property
    def _collapse(self) -> "pd.DataFrame":
        return self._frame("collapse.parquet")

    def _frame(self, file: str) -> "pd.DataFrame":
        import pandas as pd

        path = self._path("collapse", file)
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ArtifactError(f"{path} is broken; run `{self._command('collapse')}`.") from error

    def collapse(self, category: str | None = None, pair: str | None = None) -> "pd.DataFrame":
        """Distance between the hidden states of two words in the same template, by layer (figures 2 and 6).

        Args:
            category: one of `collapse_pairs().category`; None for all.
            pair: one of `collapse_pairs().pair`; None for all.

        Returns:
            Columns model ("base", "tide"), layer (the residual stream before the final norm: 0 is the embedding, l
            is the stream after decoder layer l-1, up to L), metric ("l2"; "normalized_l2", L2 of the vectors
            scaled to length one; "cosine_distance", 1 - cosine), mean, sd (sample standard deviation, NaN for n < 2)
            and n, over every pair and template that was selected.

        Raises:
            ValueError: for a category or pair that is not there, also for a pair of another category.
        """
        rows = self._collapse
        for column, value in (("category", category), ("pair", pair)):
            if value is None:
                continue
            known = rows[column].unique()
            rows = rows[rows[column] == value]
            if rows.empty:
                raise ValueError(f"There is no {column} {value!r}; there are {', '.join(map(repr, known))}.")
        long = rows.melt(["model", "layer"], list(METRICS), var_name="metric", value_name="distance")
        return long.groupby(["model", "layer", "metric"], as_index=False, sort=True)["distance"].agg(
            mean="mean", sd="std", n="count"
        )

    def collapse_pairs(self) -> "pd.DataFrame":
        """The pairs of words of the collapse study.

        Returns:
            Columns category, pair ("their / there"), word_a, word_b, tokens_a, tokens_b: the number of tokens of each
            word. A word of more than one is read at its last token.
        """
        return self._frame("pairs.parquet").copy()
