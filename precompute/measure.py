"""What a stage costs: seconds and peak memory, for the manifest."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # Linux: sets the peak resident size (VmHWM) back to the present one


class Cost:
    """Measures a `with` block.

    Attributes:
        seconds: wall-clock time.
        peak_memory_mb: largest resident size of the process, in MB (10^6 bytes): during the block on Linux, since the
            process began elsewhere.
        peak_gpu_memory_mb: largest memory allocated by torch on the GPU during the block; 0 without one.
    """

    seconds = 0.0
    peak_memory_mb = 0.0
    peak_gpu_memory_mb = 0.0

    def __enter__(self) -> "Cost":
        self._start = time.perf_counter()
        with contextlib.suppress(OSError):  # another system, or not permitted: then the peak is the whole process's
            _CLEAR_REFS.write_text(_RESET_PEAK)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self

    def record(self) -> dict[str, float]:
        """The attributes by name."""
        names = ("seconds", "peak_memory_mb", "peak_gpu_memory_mb")
        return {name: getattr(self, name) for name in names}

    def __exit__(self, *_: object) -> None:
        self.seconds = round(time.perf_counter() - self._start, 2)
        self.peak_memory_mb = round(peak_resident_bytes() / 1e6, 1)
        if torch.cuda.is_available():
            self.peak_gpu_memory_mb = round(torch.cuda.max_memory_allocated() / 1e6, 1)


def peak_resident_bytes() -> int:
    """Largest resident size of this process so far (on Linux, since it was last set back)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The cost of pieces that were made one after another or side by side: seconds of all, peaks of the largest."""
    listed = list(costs)
    peaks = {name: max(cost[name] for cost in listed) for name in ("peak_memory_mb", "peak_gpu_memory_mb")}
    return {"seconds": round(sum(cost["seconds"] for cost in listed), 2), **peaks}
