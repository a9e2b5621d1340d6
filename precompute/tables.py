"""The tables of a checkpoint, read from its files a tile at a time: no model is loaded, no table is held whole.

A table is "embedding" (the input embedding), "unembedding" (where it is another one), or a bank 0..K-1. A bank's
vectors are M_k(v), what the model reads: after RMSNorm and its gain (equation 3.3); raw rows E_k[v] where asked for.
"""

import json
import math
import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers.utils import SAFE_WEIGHTS_NAME

from tide.checkpoint import INDEX_FILE
from tide.config import TideConfig
from tide.memory import BankRMSNorm
from tide.table_file import TableFile

EMBEDDING, UNEMBEDDING = "embedding", "unembedding"
Table = str | int

_WEIGHTS = {EMBEDDING: "model.embed_tokens.weight", UNEMBEDDING: "lm_head.weight"}
MAPPED_BYTES = 2**25  # of a file at once, while its rows are copied
_MEMORY, _GAIN = "model.memory.weight", "model.memory.norm.weight"


class CheckpointTables:
    """The tables of one checkpoint.

    Attributes:
        names: all tables, in the order in which artifacts store them.
        vocab_size: V, rows of each.
        hidden_size: d, their width.
        num_banks: K.
    """

    def __init__(self, checkpoint: Path, config: TideConfig):
        self._checkpoint = checkpoint
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_banks = config.num_memory_blocks
        heads: list[Table] = [EMBEDDING] if config.tie_word_embeddings else [EMBEDDING, UNEMBEDDING]
        self.names: tuple[Table, ...] = (*heads, *range(self.num_banks))
        self._eps = config.rms_norm_eps
        self._weights: dict[str, MappedWeight] = {}

    def read(self, table: Table, start: int, stop: int, raw: bool = False) -> np.ndarray:
        """Rows start..stop-1 of a table: [stop - start, d] float32.

        Args:
            table: one of `names`.
            start: first row.
            stop: behind the last row.
            raw: of a bank, the rows E_k[v] as they are stored, for norms.
        """
        if isinstance(table, str):
            return self._weight(_WEIGHTS[table]).read(start, stop).numpy()
        rows = self._weight(_MEMORY).read(start, stop, table)
        return self._normed(rows.unsqueeze(1), slice(table, table + 1), raw)[:, 0]

    def read_banks(self, start: int, stop: int, raw: bool = False) -> np.ndarray:
        """Rows start..stop-1 of every bank, one contiguous read: [stop - start, K, d] float32."""
        if not self.num_banks:
            return np.empty((stop - start, 0, self.hidden_size), dtype=np.float32)
        return self._normed(self._weight(_MEMORY).read(start, stop), slice(None), raw)

    def tiles(self, table: Table, rows: int, raw: bool = False) -> Iterator[np.ndarray]:
        """A table from its first row to its last, `rows` at a time."""
        for start in range(0, self.vocab_size, rows):
            yield self.read(table, start, min(start + rows, self.vocab_size), raw)

    @torch.no_grad()
    def _normed(self, rows: torch.Tensor, banks: slice, raw: bool) -> np.ndarray:
        if raw:
            return rows.numpy()
        gain = self._gain[banks]
        norm = BankRMSNorm(gain.shape[0], gain.shape[1], self._eps)
        norm.weight.copy_(gain)
        return norm(rows).numpy()

    @cached_property
    def _gain(self) -> torch.Tensor:
        return self._weight(_GAIN).read(0, self.num_banks)

    @cached_property
    def _files(self) -> dict[str, str]:
        index = self._checkpoint / INDEX_FILE
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}

    def _weight(self, name: str) -> "MappedWeight":
        if name not in self._weights:
            file = self._checkpoint / self._files.get(name, SAFE_WEIGHTS_NAME)
            self._weights[name] = MappedWeight(TableFile(file, name))
        return self._weights[name]


class MappedWeight:
    """A weight in its file, mapped; pages that were read are given back at once, and are no part of what a stage takes.

    Args:
        table: the weight [V, ...].
    """

    def __init__(self, table: TableFile):
        with table.file.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(table.shape)
        whole = torch.frombuffer(self._map, dtype=table.dtype, count=count, offset=table.start)
        self._rows = whole.view(table.shape)
        self._rows_at_once = max(1, MAPPED_BYTES // (math.prod(table.shape[1:]) * table.dtype.itemsize))

    def read(self, start: int, stop: int, bank: int | None = None) -> torch.Tensor:
        """Rows start..stop-1, of a table [V, K, d] those of one bank where it is named: float32, a copy."""
        wanted = self._rows if bank is None else self._rows[:, bank]
        read = torch.empty((stop - start, *wanted.shape[1:]))
        for first in range(start, stop, self._rows_at_once):
            last = min(first + self._rows_at_once, stop)
            read[first - start : last - start] = wanted[first:last]
            if hasattr(self._map, "madvise"):  # not on Windows
                self._map.madvise(mmap.MADV_DONTNEED)
        return read


def table_name(table: Table) -> str:
    """The name of a table in file names and data frames: "embedding", "unembedding", "bank_0"."""
    return table if isinstance(table, str) else f"bank_{table}"
