"""Whether the Live page answers at once with a large model: a forward, a switch, and what the memory costs a token.

    python -m benchmarks.live_gpu [--preset 1b] [--device cuda] [--rounds 9]

The claims, on a GPU with the 1b preset and K = 8: a forward of 128 tokens and a switch take under 50 ms each. Weights
are random: they do not change the speed. A forward is what the engine does for a new prompt: everything that the model
did is recorded, routing and injection sizes come to the host. A switch is the same with one bank off in one layer,
started from the cached stream at that layer, and the comparison of the two predictions; the layers are evenly spread.
Every round has a new prompt, so that nothing comes from the cache. The decode ratio is measured as in
`benchmarks.decode`: milliseconds a token of `generate()`, K = 8 over K = 0 on one backbone, within a round.

The last line is JSON: {"name": "live_gpu", "ratios": {...}, "detail": {...}}. A ratio "/limit" below 1 keeps the claim.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import transformers

from benchmarks.decode import DTYPES, build_models, summary
from benchmarks.decode import measure as measure_decode
from dashboard.engine import LiveModel
from tide import Intervention, TideForCausalLM
from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import PRESETS

LIMIT_MS = 50.0
NUM_BANKS = 8
DECODE_PROMPT = 32


def measure(live: LiveModel, length: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a forward, of a switch, and of a switch in layer 0, in every round; the first warms up.

    Args:
        live: the model.
        length: tokens of a prompt.
        rounds: that count.
    """
    generator = torch.Generator().manual_seed(0)
    num_layers = live.model.config.num_hidden_layers
    taken: dict[str, list[float]] = {"forward": [], "switch": [], "switch_layer_0": []}
    for number in range(rounds + 1):
        token_ids = tuple(torch.randint(live.model.config.vocab_size, (length,), generator=generator).tolist())
        start = time.perf_counter()
        trained = live.run(token_ids)
        forward = time.perf_counter() - start
        spread = num_layers * max(0, number - 1) // rounds
        switches = []
        for layer, bank in ((spread, 0), (0, 1)):
            start = time.perf_counter()
            switched = live.run(token_ids, Intervention.off([(layer, bank)]))
            live.compare(trained, switched, length - 1)
            switches.append(time.perf_counter() - start)
            assert switched.reused_from == layer
        if number:
            for name, seconds in zip(taken, (forward, *switches), strict=True):
                taken[name].append(1000 * seconds)
    return taken


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.live_gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="1b", help="shape of the backbone (default 1b)")
    parser.add_argument("--prompt", type=whole_number(2), default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--tokens", type=whole_number(2), default=64, help="new tokens a generation (default 64)")
    parser.add_argument("--rounds", type=whole_number(1), default=9, help="default 9")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or mps (default cuda)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: float32 on the CPU, else bfloat16")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    args = build_parser().parse_args(argv)
    longest = PRESETS[args.preset]["max_position_embeddings"]
    if max(args.prompt, DECODE_PROMPT + args.tokens) > longest:
        raise UserError(f"--prompt or --tokens is more than the {longest} positions of preset {args.preset}.")
    try:
        device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {args.device} is not usable on this machine; choose another.") from error
    dtype_name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")

    built = build_models(args.preset, device, DTYPES[dtype_name])
    models = {name: built[name] for name in ("k0", f"k{NUM_BANKS}")}
    del built
    with_memory = models[f"k{NUM_BANKS}"]
    assert isinstance(with_memory, TideForCausalLM)
    taken = measure(LiveModel(with_memory), args.prompt, args.rounds)
    prompt = torch.arange(DECODE_PROMPT, device=device).unsqueeze(0)
    decode = measure_decode(models, prompt, args.tokens, args.rounds)
    decode_ratios = [a / b for a, b in zip(decode[f"k{NUM_BANKS}"], decode["k0"], strict=True)]
    for name, values in taken.items():
        print(f"{name}: {statistics.median(values):.1f} ms", file=sys.stderr)

    ratios = {f"{name}/limit": round(statistics.median(taken[name]) / LIMIT_MS, 4) for name in ("forward", "switch")}
    ratios[f"decode k{NUM_BANKS}/k0"] = round(statistics.median(decode_ratios), 4)
    detail = {
        "ms": {name: summary(values) for name, values in taken.items()},
        "limit_ms": LIMIT_MS,
        "decode_ms_per_token": {name: summary(values) for name, values in decode.items()},
        "decode_ratio_spread": summary(decode_ratios),
        "preset": args.preset,
        "num_memory_blocks": NUM_BANKS,
        "weights": "random",
        "prompt_tokens": args.prompt,
        "decode_prompt_tokens": DECODE_PROMPT,
        "decode_tokens": args.tokens,
        "rounds": args.rounds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"name": "live_gpu", "ratios": ratios, "detail": detail}))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
