"""What it costs to keep the memory tables elsewhere than in the model: resident, int8, int4 and disk, side by side.

    python -m benchmarks.storage CHECKPOINT [--cap MB] [--prompt 128] [--tokens 64] [--repeats 5] [--threads 1]

The paper plans with tables that are quantised or stay on an SSD (figure 4, appendix M, table 5) and measures no speed.
Every measurement is a process of its own: it loads the checkpoint, drops the file's pages from the system's cache
(Linux), generates greedily after the same prompt, batch of one, first cold and then warm. Prefill is the time to the
first new token, decoding the median time from one new token to the next. Each round runs every storage once, in an
order that moves by one from round to round; a ratio to `resident` is taken within a round, then its median.

Only `disk` reads the file by then: for the others cold is the first run after loading, and tells the noise.

`--cap` (Linux) limits the memory that a process may allocate from the load on, the checkpoint's file included, which is
mapped while it is loaded; a storage that does not fit says so. Bytes read are what the process asked of files while it
generated. Tokens are compared with those of `resident`: `disk` must give the same, fewer bits need not.

The last line is JSON: {"name": "storage", "ratios": {...}, "detail": {...}}.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from benchmarks.decode import TokenClock, summary
from tide.checkpoint import check_checkpoint, load_checkpoint
from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import TideConfig
from tide.model import STORAGES
from tide.table_file import TableFile

RESIDENT = "resident"
TIMES = ("cold_prefill_ms", "cold_decode_ms", "warm_prefill_ms", "warm_decode_ms")
OUT_OF_MEMORY = 3  # exit code of a process whose storage does not fit


def proc(file: str, field: str) -> int:
    """A number of /proc/self on Linux; 0 elsewhere."""
    try:
        lines = Path("/proc/self", file).read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def resident_mb() -> float:
    """Resident size of this process in MB (10^6 bytes)."""
    return proc("status", "VmRSS") * 1024 / 1e6


def limit_memory(megabytes: int) -> None:
    """Lets this process allocate so much more than it has (Linux)."""
    most = proc("status", "VmData") * 1024 + megabytes * 1_000_000
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def forget(file: Path) -> None:
    """Drops a file's pages from the system's cache, so that it is read from the device again."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@torch.no_grad()
def generate(model: Any, prompt: torch.Tensor, tokens: int, name: str) -> tuple[dict[str, float], list[int]]:
    """One greedy generation: its times and bytes read, named so, and its tokens."""
    asked, clock = proc("io", "rchar"), TokenClock(prompt.device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
    )
    found = {
        f"{name}_prefill_ms": 1000 * (clock.times[1] - clock.times[0]),
        f"{name}_decode_ms": clock.decode_ms,
        f"{name}_bytes_read": proc("io", "rchar") - asked,
    }
    return found, made[0, prompt.shape[1] :].tolist()


def measure_one(args: argparse.Namespace) -> dict[str, Any]:
    """What one process measures of its storage."""
    before = resident_mb()
    if args.cap:
        limit_memory(args.cap)
    model, _ = load_checkpoint(args.checkpoint, args.device, memory=args.storage)
    loaded = resident_mb()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, args.prompt), generator=generator).to(model.device)
    generate(model, prompt[:, :2] * 0, 4, "warm_up")  # what transformers sets up once; reads the row of token 0
    forget(TableFile.of_checkpoint(args.checkpoint).file)
    cold, tokens = generate(model, prompt, args.tokens, "cold")
    warm, again = generate(model, prompt, args.tokens, "warm")
    assert tokens == again
    after = resident_mb()
    return {
        **cold,
        **warm,
        "before_mb": before,
        "loaded_mb": loaded - before,
        "run_mb": after - before,
        "tokens": tokens,
    }


def measure(args: argparse.Namespace, argv: list[str]) -> dict[str, list[dict[str, Any] | None]]:
    """Interleaved rounds: for each storage what its process found in every round; None where it did not fit.

    Raises:
        UserError: when a process fails without a cap; its own message is on screen.
    """
    found: dict[str, list[dict[str, Any] | None]] = {name: [] for name in STORAGES}
    for number in tqdm(range(args.repeats), desc="rounds", disable=None):
        start = number % len(STORAGES)
        for name in STORAGES[start:] + STORAGES[:start]:
            own = [sys.executable, "-m", "benchmarks.storage", *argv, "--storage", name]
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode and not args.cap:  # an allocation that fails deep in a library ends in a signal
                raise UserError(f"The process that measures {name!r} failed; its message is above.")
            found[name].append(json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None)
    return found


def report(found: dict[str, list[dict[str, Any] | None]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Ratios to `resident` where both fit, and everything measured with its spread."""
    ratios: dict[str, float] = {}
    detail: dict[str, Any] = {}
    for name, rounds in found.items():
        fitting = [of for of in rounds if of is not None]
        if not fitting:
            detail[name] = None
            continue
        numbers = [key for key in fitting[0] if key != "tokens"]
        detail[name] = {key: summary([of[key] for of in fitting]) for key in numbers}
        pairs = [(of, kept) for of, kept in zip(rounds, found[RESIDENT], strict=True) if of and kept]
        if name == RESIDENT or not pairs:
            continue
        detail[name]["same_tokens"] = all(of["tokens"] == kept["tokens"] for of, kept in pairs)
        for key in TIMES:
            ratios[f"{name}/{RESIDENT} {key}"] = round(statistics.median(of[key] / kept[key] for of, kept in pairs), 4)
    return ratios, detail


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.storage", description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a TIDE checkpoint, K > 0")
    parser.add_argument(
        "--cap", type=whole_number(1), metavar="MB", help="memory that a process may add to load and run (Linux)"
    )
    parser.add_argument("--prompt", type=whole_number(2), default=128, help="tokens of the prompt (default 128)")
    parser.add_argument("--tokens", type=whole_number(2), default=64, help="new tokens a generation (default 64)")
    parser.add_argument("--repeats", type=whole_number(1), default=5, help="rounds (default 5)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default cpu)")
    parser.add_argument("--threads", type=whole_number(1), help="threads of the CPU (default: torch's own)")
    parser.add_argument("--storage", choices=STORAGES, help=argparse.SUPPRESS)  # what one process measures
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.storage:
        try:
            print(json.dumps(measure_one(args)))
        except (MemoryError, RuntimeError, UserError) as error:
            if not args.cap:
                raise
            print(f"{args.storage} does not fit in {args.cap} MB: {str(error).splitlines()[0]}", file=sys.stderr)
            return OUT_OF_MEMORY
        return 0

    check_checkpoint(args.checkpoint)
    config = TideConfig.from_pretrained(args.checkpoint)
    if not config.num_memory_blocks:
        raise UserError(f"{args.checkpoint} is a Base model (K = 0) without memory to store; give a TIDE checkpoint.")
    if args.prompt + args.tokens > config.max_position_embeddings:
        raise UserError(f"--prompt and --tokens are more than the model's {config.max_position_embeddings} positions.")
    ratios, detail = report(measure(args, sys.argv[1:] if argv is None else argv))
    for name, of in detail.items():
        if of is None:
            print(f"{name:>8}: does not fit in {args.cap} MB", file=sys.stderr)
            continue
        medians = {key: value["median"] for key, value in of.items() if isinstance(value, dict)}
        times = ", ".join(f"{key.removesuffix('_ms').replace('_', ' ')} {medians[key]:.2f} ms" for key in TIMES)
        read = medians["cold_bytes_read"] / 1e6
        print(f"{name:>8}: {medians['loaded_mb']:.0f} MB loaded, {times}, {read:.1f} MB read", file=sys.stderr)
    detail = {
        "storages": detail,
        "checkpoint": {key: getattr(config, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "num_memory_blocks": config.num_memory_blocks,
        "prompt_tokens": args.prompt,
        "tokens": args.tokens,
        "cap_mb": args.cap,
        "rounds": args.repeats,
        "device": args.device,
        "threads": args.threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"name": "storage", "ratios": ratios, "detail": detail}))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
