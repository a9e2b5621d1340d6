"""What a setting costs in training: seconds a step and peak memory of two ways of training, side by side.

    python -m benchmarks.train_step [memory] [--banks 8] [--rounds 5] [--threads 2] [--compile] [--device cpu]
    python -m benchmarks.train_step attention --rounds 20 --threads 1

`memory` compares K = 8 with K = 0 at SmolLM2-135M's shape (30 layers, d 576, V 49,152, tied), 4,096 tokens a step.
`attention` compares transformers' eager attention with the fused kernel (sdpa), compiled, at the demo's shape and
recipe with K = 8, also 4,096 tokens a step. Both train on real text with float32 parameters and bfloat16 matrix
products, exactly as `tide-train` does it, the measuring of gradient norms included. Weights are random: they do not
change the speed. Each way trains in a process of its own, so that peak memory is its own; the processes take their
steps in turn, one at a time, and a ratio is taken between neighbouring steps, then its median over the rounds.

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
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import SMOLLM2
from tide.cli import ArgumentParser, run_command, whole_number

if TYPE_CHECKING:
    from tide.config import TideConfig
    from tide.training.recipe import Recipe

SEQUENCES, LENGTH, MICRO_BATCH = 8, 512, 2
TOKENIZER = Path("assets/demo/base")
TEXT = Path("assets/heldout/heldout_books.txt")


def two_ways(args: argparse.Namespace) -> "dict[str, tuple[TideConfig, Recipe]]":
    """What is compared: by name, the one that the ratio divides by first."""
    from tide.config import TideConfig
    from tide.training.recipe import Recipe

    if args.what == "attention":
        config = TideConfig.from_preset("demo", num_memory_blocks=args.banks)
        ways = {name: Recipe.named("demo", attention=name, compile=True) for name in ("sdpa", "eager")}
        return {name: (config, recipe) for name, recipe in ways.items()}
    recipe = Recipe(
        batch_size=SEQUENCES, sequence_length=LENGTH, micro_batch_size=MICRO_BATCH, compile=args.compile, steps=1000
    )
    return {f"k{k}": (TideConfig(**SMOLLM2, num_memory_blocks=k), recipe) for k in (0, args.banks)}


def serve(pipe: Connection, way: str, args: argparse.Namespace) -> None:
    """Trains one of the two ways step by step, each when asked for one, and answers with seconds and peak memory."""
    import torch
    from transformers import AutoTokenizer

    from tide.training.data import WindowDataset, tokenize
    from tide.training.loop import Run, make_accelerator
    from tide.training.sources import DataSource

    torch.set_num_threads(args.threads)
    config, recipe = two_ways(args)[way]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
        tokens = tokenize(DataSource.parse(str(TEXT)), tokenizer, Path(folder), show_progress=False)
        data = WindowDataset(tokens, recipe.sequence_length, recipe.batch_size, seed=0)
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
    parser.add_argument(
        "what", nargs="?", choices=("memory", "attention"), default="memory", help="what to compare (default memory)"
    )
    parser.add_argument("--banks", type=whole_number(1), default=8, metavar="K", help="memory banks (default 8)")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="steps of each (default 5), one to warm up")
    parser.add_argument("--threads", type=whole_number(1), default=2, help="CPU threads (default 2)")
    parser.add_argument("--compile", action="store_true", help="memory: through torch.compile")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    args = parser.parse_args(argv)

    context = multiprocessing.get_context("spawn")
    ways = two_ways(args)
    workers: dict[str, Connection] = {}
    for way in ways:
        workers[way], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, way, args), daemon=True).start()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peak = dict.fromkeys(ways, 0)
    for number in range(args.rounds + 1):  # the first warms up
        for way, pipe in workers.items():
            pipe.send(True)
            taken, peak[way] = pipe.recv()
            print(f"{way}: {taken:.2f} s, peak {peak[way] / 2**30:.2f} GiB", file=sys.stderr)
            if number:
                seconds[way].append(taken)
    for pipe in workers.values():
        pipe.send(False)
    first, second = ways
    ratio = statistics.median(b / a for a, b in zip(seconds[first], seconds[second], strict=True))
    config, recipe = ways[second]
    report = {
        "name": "train_step",
        "ratios": {f"{second}/{first}": round(ratio, 3), "peak_memory": round(peak[second] / peak[first], 3)},
        "detail": {
            "seconds": {way: [round(s, 3) for s in taken] for way, taken in seconds.items()},
            "peak_gib": {way: round(value / 2**30, 2) for way, value in peak.items()},
            "banks": config.num_memory_blocks,
            "tokens_a_step": recipe.tokens_per_step,
            "threads": args.threads,
            "compile": recipe.compile,
            "device": args.device,
        },
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
