"""Tables that are looked up by token id, where they lie: rows of a checkpoint's file, read when they are asked for.

At V 131,072, d 2048 and K 24 the memory is 12.9 GB in bfloat16, of which a text of 2,048 tokens reads at most 201 MB.
Files are read, not mapped: mapped pages stay in the process's resident size for as long as the system likes.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

MEMORY_WEIGHT = "model.memory.weight"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class RowTable(Protocol):
    """Where the raw rows of a table come from, when it is no parameter of the model."""

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of distinct, ascending token ids [N], on the CPU or the ids' device: of the memory [N, K, d]."""


class TableFile:
    """A table in a checkpoint's safetensors file: the memory [V, K, d], or an embedding [V, d].

    Args:
        file: the safetensors file.
        name: of the tensor in it.

    Attributes:
        file: the safetensors file.
        start: where in it the numbers begin, in bytes.
        shape: of the tensor: (V, K, d) or (V, d).
        dtype: in which it is stored.

    Raises:
        ValueError: when the file's header cannot be read, or names no such tensor of floating-point numbers.
    """

    def __init__(self, file: Path, name: str = MEMORY_WEIGHT):
        self.file = file
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                entry = json.loads(stream.read(size))[name]
            self.shape, self.dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            self.start = 8 + size + entry["data_offsets"][0]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no table {name} of floating-point numbers") from error
        self._row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    @classmethod
    def of_checkpoint(cls, path: str | Path, tensor: str = MEMORY_WEIGHT, **options: Any) -> "TableFile":
        """A table of a checkpoint, a folder or a name on the hub.

        Args:
            path: as `from_pretrained` takes it.
            tensor: its name there.
            **options: as `from_pretrained` takes them; those that say where on the hub are used.

        Raises:
            OSError: when there are no weights in the safetensors format.
            ValueError: when they hold no such table.
        """
        hub = {name: options[name] for name in _HUB_OPTIONS if name in options}
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub)
        name = SAFE_WEIGHTS_NAME
        if index is not None:
            listed = json.loads(Path(index).read_text(encoding="utf-8")).get("weight_map", {})
            if tensor not in listed:
                raise ValueError(f"{index} lists no table {tensor}")
            name = listed[tensor]
        weights: Any = cached_file(path, name, **hub)
        return cls(Path(weights), tensor)

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the table; neighbours in it are read at once.

        Args:
            token_ids: [N] distinct and ascending.

        Returns:
            [N, K, d] or [N, d] in the stored dtype, on the CPU.

        Raises:
            IndexError: for an id that is not in 0..V-1.
            OSError: when the file is gone, or shorter than its header says.
        """
        ids = token_ids.cpu().numpy()
        if len(ids) and not 0 <= ids[0] <= ids[-1] < self.shape[0]:
            raise IndexError(f"token ids {ids[0]} to {ids[-1]} are not all in 0..{self.shape[0] - 1}")
        rows = torch.empty((len(ids), *self.shape[1:]), dtype=self.dtype)
        unread = rows.view(torch.uint8).numpy().reshape(-1)
        with self.file.open("rb", buffering=0) as stream:
            for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
                stream.seek(self.start + int(run[0]) * self._row_bytes if len(run) else 0)
                end = len(unread) - len(run) * self._row_bytes
                while len(unread) > end:
                    count = stream.readinto(unread[: len(unread) - end].data)
                    if not count:
                        raise OSError(f"{self.file} is shorter than its header says; copy the checkpoint anew")
                    unread = unread[count:]
        return rows


class FileEmbedding(nn.Module):
    """An input embedding whose table is no parameter of the model.

    Args:
        table: where its rows are read from.

    Attributes:
        table: where its rows are read from.
    """

    _like: torch.Tensor  # an empty one, of the model's dtype

    def __init__(self, table: RowTable):
        super().__init__()
        self.table = table
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows E_0[v].

        Args:
            token_ids: [...] integer, each in 0..V-1.

        Returns:
            [..., d] in the model's dtype, on the device of the token ids.

        Raises:
            IndexError: for another token id.
            OSError: when the table is a file that can no longer be read.
        """
        distinct, places = token_ids.unique(return_inverse=True)
        rows = self.table.read(distinct).to(token_ids.device, self._like.dtype)
        return F.embedding(places, rows)
