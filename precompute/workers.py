"""Several processes on one artifacts folder: which pieces are whose, and waiting for one another.

    torchrun --nproc-per-node N -m precompute CHECKPOINT ...

The processes share nothing but the folder, which must be on a disk that all of them see.
"""

import atexit
import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)  # how long to wait for the others: longer than any piece takes


class Workers:
    """This process among those that work on the folder.

    Attributes:
        rank: 0..count-1; rank 0 writes the manifest.
        count: processes.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count > 1:
            import torch.distributed

            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", timeout=PATIENCE)  # only to wait: no GPU takes part
                atexit.register(torch.distributed.destroy_process_group)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what there is one of."""
        return self.rank == 0

    def mine(self, pieces: Sequence[T]) -> Sequence[T]:
        """This process's share, every count-th: neighbours cost alike, so that the shares do too."""
        return pieces[self.rank :: self.count]

    def wait(self) -> None:
        """Returns when all processes have come here."""
        if self.count > 1:
            import torch.distributed

            torch.distributed.barrier()

    def device(self, name: str) -> str:
        """The device of this process: of several GPUs, the one with the number of the process on its computer."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and self.count > 1 else name
