"""One device, many requests: which there is, who computes next, and what to do when its memory runs out."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache

import torch

from tide.cli import UserError

WAITING_REQUESTS = 16  # requests that may wait for a device; one more is refused
OUT_OF_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory")  # of CUDA and MPS, and of the CPU


class DeviceQueue:
    """Lets one request at a time compute, in the order in which they came.

    A lock would not do: a long job that gives it back between two steps would mostly win it again at once.

    Args:
        limit: requests that may wait.
    """

    def __init__(self, limit: int = WAITING_REQUESTS):
        self.limit = limit
        self._waiting: deque[object] = deque()
        self._busy = False
        self._holder: int | None = None  # the thread whose turn it is
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    @contextlib.contextmanager
    def turn(self, admitted: bool = False) -> Iterator[None]:
        """Waits until it is the caller's turn, which ends with the block.

        Args:
            admitted: the next step of a job whose first step had its turn: it is never refused.

        Raises:
            UserError: one sentence, when too many wait already.
            RuntimeError: inside a turn of the same thread, which would wait for itself.
        """
        if self._holder == threading.get_ident():
            raise RuntimeError("It is this thread's turn already; work on the device must not ask for the device.")
        ticket = object()
        with self._changed:
            if not admitted and len(self._waiting) >= self.limit:
                raise UserError(f"The model is busy: {len(self._waiting)} requests are waiting; try again in a moment.")
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: not self._busy and self._waiting[0] is ticket)
                self._busy, self._holder = True, threading.get_ident()
            finally:
                self._waiting.remove(ticket)
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._holder = False, None
                self._changed.notify_all()


@cache
def queue_of(device: torch.device) -> DeviceQueue:
    """The one queue of a device, which all models on it share.

    Args:
        device: with its index, as a tensor's device has it.
    """
    del device  # the cache's key
    return DeviceQueue()


def default_device() -> str:
    """The GPU where torch has one, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory is full; on CPU and MPS torch raises a bare `RuntimeError`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_WORDS)


def release_memory(device: torch.device) -> None:
    """Gives what torch holds in reserve back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
