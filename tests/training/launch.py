"""Trains tiny runs on CPU processes that torchrun starts; the distributed tests compare them with one process."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import AutoTokenizer

from tests.conftest import tiny_config
from tide.training.__main__ import main
from tide.training.data import WindowDataset, tokenize
from tide.training.loop import Run, Schedule
from tide.training.recipe import Recipe
from tide.training.sources import DataSource

STEPS = 8
SAVE_EVERY = 3
SEQUENCE_LENGTH = 16


@dataclass(frozen=True)
class Job:
    """One run, in words that a command line can carry.

    Attributes:
        out: folder of the run.
        engine: "ddp", "fsdp", or "fsdp-empty", where only the main process makes the initial weights.
        tied: whether the unembedding is the embedding.
        resume: go on with the run in `out`.
        stop_at: stop after this step.
        dies_at: the last process kills itself before the batch of this step.
        batch_size: of a step, over all processes.
    """

    out: str
    engine: str = "ddp"
    tied: bool = True
    resume: bool = False
    stop_at: int | None = None
    dies_at: int | None = None
    batch_size: int = 4

    def train(self, data_folder: Path) -> None:
        """Trains in this process, together with the others where there are any."""
        run = self.run(data_folder)
        if self.dies_at is not None and run.accelerator.is_last_process:
            at_batch(run, self.dies_at, kill_this_process)
        run.train(self.resume, Schedule(save_every=SAVE_EVERY, log_every=1, stop_at=self.stop_at))

    def run(self, data_folder: Path) -> Run:
        """Builds the run; two micro batches a step in each of two processes, four in one."""
        tokenizer: Any = AutoTokenizer.from_pretrained(data_folder / "tokenizer")
        recipe = Recipe(
            steps=STEPS,
            batch_size=self.batch_size,
            micro_batch_size=1,
            sequence_length=SEQUENCE_LENGTH,
            warmup_steps=2,
            peak_lr=1e-2,
            start_lr=1e-3,
            floor_lr=1e-3,
            autocast="float32",
        )
        config = tiny_config(
            vocab_size=len(tokenizer), num_hidden_layers=2, num_memory_blocks=2, tie_word_embeddings=self.tied
        )
        tokens = tokenize(DataSource.parse(str(data_folder)), tokenizer, show_progress=False)
        data = WindowDataset(tokens, recipe.sequence_length, recipe.batch_size, recipe.seed)
        probe = tokens.read(0, 4 * SEQUENCE_LENGTH).reshape(4, -1).astype(np.int64)
        engine = make_engine(self.engine)
        return Run(Path(self.out), config, recipe, data, tokenizer, probe, engine, save_dtype=torch.float32)


def make_engine(name: str) -> Accelerator:
    """An engine on the CPU, with FSDP set by hand: Accelerate offers it on GPUs only, PyTorch on CPUs too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    if name.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TideDecoderLayer"],
            cpu_ram_efficient_loading=name == "fsdp-empty",
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state._shared_state["fsdp_plugin"] = plugin
    return accelerator


def at_batch(run: Run, step: int, act: Callable[[], None]) -> None:
    """Makes a run act when it asks for the batch of a step, at which it may die."""
    data: Any = run.data
    batch = data.batch

    def acting(number: int, *shard: int) -> torch.Tensor:
        if number == step:
            act()
        return batch(number, *shard)

    data.batch = acting


def kill_this_process() -> None:
    """As a machine that goes away."""
    os.kill(os.getpid(), signal.SIGKILL)


def launched(data_folder: Path, jobs: list[Job], command: list[str] | None = None) -> list[str]:
    """The program and the arguments that train these jobs, then run `tide-train` with the command's arguments."""
    return ["tests.training.launch", str(data_folder), json.dumps([asdict(job) for job in jobs]), *(command or [])]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[2]):
        Job(**job).train(Path(sys.argv[1]))
    if command := sys.argv[3:]:
        AcceleratorState._reset_state(reset_partial_state=True)
        sys.exit(main(command))
    torch.distributed.destroy_process_group()
