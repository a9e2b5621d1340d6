"""A cache that is bounded in bytes, not in entries: one long prompt weighs as much as a hundred short ones."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pandas as pd

NUMBER_BYTES = 32  # of a Python number


class ByteCache:
    """Keeps the most recently used results within a number of bytes; safe to share between threads.

    Args:
        limit_bytes: most bytes that all entries together may have. A result above it is not kept.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any | None:
        """The result of a key, None where there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, nbytes: int) -> None:
        """Keeps a result and lets the least recently used ones go.

        Args:
            key: everything that determines the result.
            value: the result, which nobody may change.
            nbytes: what it weighs.
        """
        with self._lock:
            if key in self._entries:
                self._nbytes -= self._entries.pop(key)[1]
            if nbytes > self.limit_bytes:
                return
            self._entries[key] = value, nbytes
            self._nbytes += nbytes
            while self._nbytes > self.limit_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._nbytes -= freed

    def clear(self) -> None:
        """Lets everything go."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0


def size_of(value: Any) -> int:
    """Bytes of an array, a table, or a dataclass of such; next to nothing for a number."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, pd.DataFrame):
        return int(value.memory_usage(deep=True).sum())
    if is_dataclass(value):
        return sum(size_of(part) for part in vars(value).values())
    return NUMBER_BYTES
