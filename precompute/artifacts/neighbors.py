"""Reading the stage `neighbors`: stored lists, and live queries of the indexes."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from precompute.artifacts.reader import Reader
from precompute.search import open_index, search
from precompute.store import ArtifactError
from tide.cli import UserError

if TYPE_CHECKING:
    import faiss
    import pandas as pd


class NeighborReader(Reader):
    """Neighbours (table 6)."""

    def __init__(self, folder: Path, manifest: dict[str, Any], checkpoint: Path | None = None):
        super().__init__(folder, manifest, checkpoint)
        self._indexes: dict[str, faiss.Index] = {}
        self._opening = Lock()

    def neighbors(self, token_id: int, table: str | int = "embedding", k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The nearest tokens of a token by cosine, the nearest first, itself left out (table 6).

        Args:
            token_id: 0..V-1.
            table: "embedding", the input embedding, "unembedding", where it is another table, or a bank 0..K-1, whose
                vectors are M_k(v).
            k: how many, at most the number stored (50, or V - 1).

        Returns:
            Token ids [k] int64 and cosines [k] float32. An index that is not exact gives those of the rounded rows.

        Raises:
            ValueError: for a token id, table or k that is not there.
        """
        token_id, stored = self._check_token(token_id), self.tensors("neighbors", self._table_name(table))
        self._check_k(k)
        ids, cosines = (stored.get_slice(name)[token_id : token_id + 1, :k][0] for name in ("ids", "cosines"))
        return ids.astype(np.int64), cosines

    def nearest_to(
        self, vector: np.ndarray | Sequence[float], table: str | int = "embedding", k: int = 10
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearest tokens to any vector by cosine: a mixed memory vector m, a hidden state, a sum of tokens (ours).

        The index stays open, mapped into memory: the first query reads it from the disk, and every thread may ask.

        Args:
            vector: [d] or [Q, d], of any length.
            table: "embedding", "unembedding" or a bank 0..K-1.
            k: how many, 1 to V.

        Returns:
            Token ids int64 and cosines float32, [k] or [Q, k], the nearest first.

        Raises:
            ArtifactError: when the stage was not run, or FAISS is not installed.
            ValueError: for a table or k that is not there, or a vector that is not of the table's width or not finite.
        """
        index, vectors = self._index(table), np.asarray(vector, dtype=np.float32)
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != index.d:
            shape = " x ".join(map(str, vectors.shape)) or "single"
            raise ValueError(f"There are {shape} values; the vectors of the table have {index.d} each.")
        if not np.isfinite(vectors).all():
            raise ValueError("A vector holds a value that is not finite.")
        if not 1 <= k <= self.vocab_size:
            raise ValueError(f"k is {k}; the table has 1 to {self.vocab_size} tokens.")
        ids, cosines = search(index, np.atleast_2d(vectors), k)
        ids = ids.astype(np.int64)
        return (ids, cosines) if vectors.ndim == 2 else (ids[0], cosines[0])

    def vectors(self, token_ids: Sequence[int] | np.ndarray, table: str | int = "embedding") -> np.ndarray:
        """Vectors of tokens at unit length, of a bank M_k(v): what `nearest_to` compares with (ours).

        Args:
            token_ids: [n] of 0..V-1.
            table: "embedding", "unembedding" or a bank 0..K-1.

        Returns:
            [n, d] float32; a row of zeros stays zero. An index that is not exact has rounded them.

        Raises:
            ArtifactError: when the stage was not run, or FAISS is not installed.
            ValueError: for a token id or table that is not there.
        """
        index = self._index(table)
        rows = np.array([self._check_token(token_id) for token_id in token_ids], dtype=np.int64)
        if not len(rows):
            return np.empty((0, index.d), dtype=np.float32)
        found = index.reconstruct_batch(rows)
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        return found / np.where(lengths > 0, lengths, 1)

    def index_recall(self) -> "pd.DataFrame":
        """How many of the exact neighbours the stored lists hold (ours).

        Returns:
            Columns table, k (the nearest that are compared), recall (0 to 1; 1 for the exact kind, "flat"), n (tokens
            of the sample; all V where the index is exact).
        """
        return self.frame("neighbors", "recall")

    def _check_k(self, k: int) -> None:
        most = self.parameters("neighbors")["k"]
        if not 1 <= k <= most:
            raise ValueError(f"k is {k}; 1 to {most} neighbours are stored.")

    def _index(self, table: str | int) -> "faiss.Index":
        """The index of a table, opened once."""
        name = self._table_name(table)
        path = self._path("neighbors", f"{name}.faiss")
        with self._opening:
            if name not in self._indexes:
                try:
                    self._indexes[name] = open_index(path)
                except UserError as error:
                    raise ArtifactError(str(error)) from error
            return self._indexes[name]
