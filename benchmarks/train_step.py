"""What the memory costs in training: seconds a step and peak memory of K = 0 and K = 8 at SmolLM2's shape.

    python -m benchmarks.train_step [--banks 8] [--rounds 5] [--threads 2] [--compile] [--device cpu]

The shape is that of SmolLM2-135M (30 layers, d 576, V 49,152, tied), the step 4,096 tokens of real text in float32
parameters and bfloat16 matrix products, exactly as `tide-train` does it, the measuring of gradient norms included.
Weights are random: they do not change the speed. Each K trains in a process of its own, so that peak memory is its
own; the processes take their steps in turn, one at a time, and a ratio is taken between neighbouring steps, then its
median over the rounds.

The last line is JSON: {"name": "train_step", "ratios": {...}, "detail": {...}}.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.shapes import SMOLLM2
from tide.cli import ArgumentParser, run_command, whole_number

SEQUENCES, LENGTH, MICRO_BATCH = 8, 512, 2
TOKENIZER = Path("assets/demo/base")
TEXT = Path("assets/heldout/heldout_books.txt")


def serve(pipe: Connection, num_banks: int, args: argparse.Namespace) -> None:
    """Trains a model of K banks step by step, each when asked for one, and answers with seconds and peak memory."""
    import torch
    from transformers import AutoTokenizer

    from tide.config import TideConfig
    from tide.training.data import WindowDataset, tokenize
    from tide.training.loop import Run, make_accelerator
    from tide.training.recipe import Recipe
    from tide.training.sources import DataSource

    torch.set_num_threads(args.threads)
    recipe = Recipe(
        batch_size=SEQUENCES, sequence_length=LENGTH, micro_batch_size=MICRO_BATCH, compile=args.compile, steps=1000
    )
    config = TideConfig(**SMOLLM2, num_memory_blocks=num_banks)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
        tokens = tokenize(DataSource.parse(str(TEXT)), tokenizer, Path(folder), show_progress=False)
        data = WindowDataset(tokens, LENGTH, SEQUENCES, seed=0)
        run = Run(
            Path(folder), config, recipe, data, tokenizer, data.batch(0).numpy(), make_accelerator(recipe, args.device)
        )
        run.prepare()
        step = 0
        while pipe.recv():
            began = time.perf_counter()
            loss, _, _ = run.step(step)
            loss.item()  # waits for the device
            seconds, step = time.perf_counter() - began, step + 1
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if run.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(run.device)
            pipe.send((seconds, peak))


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    parser = ArgumentParser(prog="python -m benchmarks.train_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--banks", type=whole_number(1), default=8, metavar="K", help="memory banks (default 8)")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="steps of each (default 5), one to warm up")
    parser.add_argument("--threads", type=whole_number(1), default=2, help="CPU threads (default 2)")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args(argv)

    context = multiprocessing.get_context("spawn")
    workers: dict[int, Connection] = {}
    for num_banks in (0, args.banks):
        workers[num_banks], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, num_banks, args), daemon=True).start()
    seconds: dict[int, list[float]] = {k: [] for k in workers}
    peak = dict.fromkeys(workers, 0)
    for number in range(args.rounds + 1):  # the first warms up
        for num_banks, pipe in workers.items():
            pipe.send(True)
            taken, peak[num_banks] = pipe.recv()
            print(f"K = {num_banks}: {taken:.2f} s, peak {peak[num_banks] / 2**30:.2f} GiB", file=sys.stderr)
            if number:
                seconds[num_banks].append(taken)
    for pipe in workers.values():
        pipe.send(False)
    base, tide = seconds[0], seconds[args.banks]
    ratio = statistics.median(t / b for t, b in zip(tide, base, strict=True))
    report = {
        "name": "train_step",
        "ratios": {f"k{args.banks}/k0": round(ratio, 3), "peak_memory": round(peak[args.banks] / peak[0], 3)},
        "detail": {
            "seconds": {f"k{k}": [round(s, 3) for s in taken] for k, taken in seconds.items()},
            "peak_gib": {f"k{k}": round(value / 2**30, 2) for k, value in peak.items()},
            "tokens_a_step": SEQUENCES * LENGTH,
            "threads": args.threads,
            "compile": args.compile,
            "device": args.device,
        },
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
