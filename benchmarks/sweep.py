"""What the sweep of the Live page saves: all switch-offs of a prompt against one naive forward each.

    python -m benchmarks.sweep [--shapes demo smollm2] [--rounds 3] [--threads 1]

The claims: at least 3 times faster at the demo's size, at least 2 times at SmolLM2's shape. A switch-off is a layer,
or one bank in one layer; its KL and its change of the target's log-probability are computed on both sides. The naive
side is `model(ids, intervention=...)`, logits at every position, as one writes it first; beside it, in the detail,
the same with `logits_to_keep=1`. Controls are left out on both sides: each is one more forward.

The demo is its checkpoint, SmolLM2's shape has random weights, which do not change the speed. The two sides are
interleaved: after every chunk of the sweep one forward of each naive kind runs, of a switch-off of that chunk's layer.
A naive forward costs the same whatever it switches off, so that their mean stands for those that were not run. A
round's ratio is that mean times the number of switch-offs, over the time of the whole sweep, its forward as trained
included; reported is the median over rounds.

The last line is JSON: {"name": "sweep", "ratios": {...}, "detail": {...}}.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

from benchmarks.decode import summary
from benchmarks.shapes import SMOLLM2
from dashboard.engine import LiveModel
from tide import Intervention, TideConfig, TideForCausalLM
from tide.checkpoint import load_checkpoint
from tide.cli import ArgumentParser, run_command, whole_number
from tide.trace import kl_divergence

DEMO_CHECKPOINT = Path(__file__).resolve().parent.parent / "assets" / "demo" / "tide-8e"
NUM_BANKS = 8  # of SmolLM2's shape
LIMITS = {"demo": 3.0, "smollm2": 2.0}  # times faster than naive, at least
NAIVE = {"naive": 0, "naive, logits_to_keep=1": 1}


def load(shape: str) -> TideForCausalLM:
    """The model of a shape, float32 on the CPU."""
    if shape == "demo":
        return load_checkpoint(DEMO_CHECKPOINT, device="cpu", dtype=torch.float32)[0]
    torch.manual_seed(0)
    return TideForCausalLM(TideConfig(**SMOLLM2, num_memory_blocks=NUM_BANKS)).eval()


class NaiveSide:
    """One forward a switch-off, timed, one of each kind whenever it is asked."""

    def __init__(self, model: TideForCausalLM, token_ids: tuple[int, ...], target_id: int):
        self._model = model
        self._input_ids = torch.tensor([token_ids])
        self._target_id = target_id
        self._log_p = self._log_probs(None, 1)
        config = model.config
        per_layer = [[Intervention.layers_off([at])] for at in range(config.num_hidden_layers)]
        for at, switches in enumerate(per_layer):
            switches += [Intervention.off([(at, bank)]) for bank in range(config.num_memory_blocks)]
        self._switches = [switch for switches in per_layer for switch in switches]
        self.seconds: dict[str, list[float]] = {kind: [] for kind in NAIVE}
        self.found: dict[Intervention, tuple[float, float]] = {}
        self.paused = 0.0

    def __call__(self, done: int, of: int) -> None:
        """Runs the last switch-off that the sweep has done; what that takes is noted in `paused`."""
        begun = time.perf_counter()
        switch = self._switches[done - 1]
        for kind, keep in NAIVE.items():
            start = time.perf_counter()
            log_q = self._log_probs(switch, keep)
            kl = float(kl_divergence(self._log_p, log_q))
            self.found[switch] = kl, float(log_q[self._target_id] - self._log_p[self._target_id])
            self.seconds[kind].append(time.perf_counter() - start)
        self.paused += time.perf_counter() - begun

    @torch.inference_mode()
    def _log_probs(self, intervention: Intervention | None, keep: int) -> torch.Tensor:
        logits = self._model(self._input_ids, intervention=intervention, logits_to_keep=keep).logits
        return logits[0, -1].float().log_softmax(dim=-1)


def measure(shape: str, length: int, rounds: int) -> tuple[dict[str, list[float]], dict]:
    """Interleaved rounds.

    Returns:
        The ratio naive / sweep of each round, by kind of naive forward; and what else was measured.
    """
    live = LiveModel(load(shape))
    config = live.model.config
    generator = torch.Generator().manual_seed(0)
    token_ids = tuple(torch.randint(config.vocab_size, (length,), generator=generator).tolist())
    position, target_id = length - 1, token_ids[0]
    switches = config.num_hidden_layers * (config.num_memory_blocks + 1)
    ratios: dict[str, list[float]] = {kind: [] for kind in NAIVE}
    naive_ms: dict[str, list[float]] = {kind: [] for kind in NAIVE}
    sweep_seconds, apart = [], 0.0
    for number in range(1, rounds + 1):
        live.cache.clear()
        naive = NaiveSide(live.model, token_ids, target_id)
        start = time.perf_counter()
        table = live.sweep(token_ids, position, target_id, progress=naive, control_seed=None)
        seconds = time.perf_counter() - start - naive.paused
        sweep_seconds.append(seconds)
        for kind, taken in naive.seconds.items():
            ratios[kind].append(statistics.mean(taken) * switches / seconds)
            naive_ms[kind].append(1000 * statistics.mean(taken))
        for row in table.itertuples():
            pairs = [(row.layer, row.bank)]
            switch = Intervention.layers_off([row.layer]) if row.kind == "layer" else Intervention.off(pairs)
            if switch in naive.found:
                kl, delta = naive.found[switch]
                apart = max(apart, abs(kl - row.kl), abs(delta - row.delta))
        print(f"{shape}, round {number}: {ratios['naive'][-1]:.2f} times faster", file=sys.stderr)
    return ratios, {
        "switch_offs": switches,
        "prompt_tokens": length,
        "sweep_seconds": summary(sweep_seconds),
        "naive_ms_per_forward": {kind: summary(values) for kind, values in naive_ms.items()},
        "naive_forwards_per_round": len(naive.seconds["naive"]),
        "ratio_spread": {kind: summary(values) for kind, values in ratios.items()},
        "largest_difference_nats": apart,
        "limit": LIMITS[shape],
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", choices=list(LIMITS), default=list(LIMITS), help="default: both")
    parser.add_argument("--prompt", type=whole_number(2), default=32, help="tokens of the prompt (default 32)")
    parser.add_argument("--rounds", type=whole_number(1), default=3, help="default 3")
    parser.add_argument("--threads", type=whole_number(1), help="threads of the CPU (default: torch's own)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    measured = {shape: measure(shape, args.prompt, args.rounds) for shape in args.shapes}
    detail = {
        **{shape: parts for shape, (_, parts) in measured.items()},
        "rounds": args.rounds,
        "device": "cpu",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    ratios = {shape: round(statistics.median(by_kind["naive"]), 3) for shape, (by_kind, _) in measured.items()}
    print(json.dumps({"name": "sweep", "ratios": ratios, "detail": detail}))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
