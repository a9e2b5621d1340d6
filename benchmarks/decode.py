"""What the memory costs while a text is generated: milliseconds a token of HF LLaMA and of TIDE with K = 0, 8, 24.

    python -m benchmarks.decode [--preset demo] [--tokens 128] [--repeats 9] [--device cpu] [--threads 1]

The claim is Table 4 of the paper, one B200: Base 11.085 ms a token, K = 8 12.688 (+14.5 %), K = 24 13.422 (+21.1 %).
Milliseconds are the machine's; only the ratios can be compared with the paper's.

All models share one backbone, the very same tensors. Weights are random: they do not change the speed. Each round
runs every model once, in an order that moves by one from round to round, so that a machine that slows down slows
all of them down. A ratio is taken within a round, then its median over the rounds. What is timed is `generate()`,
greedy, with a KV cache, batch of one: the time from one new token to the next, the median of a generation, so that
what else the machine does now and then does not count. The first new token, which ends the prefill, starts the clock.

The last line is JSON: {"name": "decode", "ratios": {...}, "detail": {...}}.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from tide.cli import ArgumentParser, UserError, run_command, whole_number
from tide.config import PRESETS, ParameterBudget, TideConfig

BANKS = (0, 8, 24)
RATIOS = (("k0", "hf"), ("k8", "k0"), ("k24", "k0"))
PAPER_RATIOS = {"k8/k0": 12.688 / 11.085, "k24/k0": 13.422 / 11.085}  # Table 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 8


class TokenClock(BaseStreamer):
    """A streamer for `generate()` that notes when each token was there. The first call brings the prompt."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with every new token."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called when generation is over."""

    @property
    def decode_ms(self) -> float:
        """Milliseconds from one new token to the next, the median; prefill left out."""
        new = self.times[1:]
        return 1000 * statistics.median(later - earlier for earlier, later in pairwise(new))


def build_models(preset: str, device: torch.device, dtype: torch.dtype) -> dict[str, LlamaForCausalLM]:
    """HF LLaMA and TIDE with each K, in evaluation mode, on one and the same backbone.

    Args:
        preset: one of `tide.config.PRESETS`.
        device: where the weights are made and stay.
        dtype: of the weights.
    """
    torch.manual_seed(0)
    # No token ends a generation, so that every run makes the same number of tokens.
    shape = {**PRESETS[preset], "eos_token_id": None, "pad_token_id": None}
    with torch.device(device):
        llama: LlamaForCausalLM = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype)
        models: dict[str, LlamaForCausalLM] = {"hf": llama}
        for num_banks in BANKS:
            config = TideConfig(**{**shape, "num_memory_blocks": num_banks})
            model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
            loaded = model.load_state_dict(llama.state_dict(), strict=False, assign=True)
            assert not loaded.unexpected_keys
            model.tie_weights()
            models[f"k{num_banks}"] = model
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def decode_ms(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int) -> float:
    """Milliseconds a token of one greedy generation of `tokens` tokens after `prompt` [1, T]."""
    clock = TokenClock(prompt.device)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        streamer=clock,
    )
    assert len(clock.times) == tokens + 1, "a generation ended early"
    return clock.decode_ms


def measure(
    models: dict[str, LlamaForCausalLM], prompt: torch.Tensor, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Interleaved rounds: for each model, its milliseconds a token in every round."""
    names = list(models)
    for name in names:
        decode_ms(models[name], prompt, min(tokens, WARM_UP_TOKENS))
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in tqdm(range(repeats), desc="rounds", disable=None):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken[name].append(decode_ms(models[name], prompt, tokens))
    return taken


def report(taken: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, dict]]:
    """Ratios by the median over rounds, and the spread of everything.

    Returns:
        ({"k8/k0": ratio, ...}, {"ms_per_token": {...}, "ratio_spread": {...}}).
    """
    by_round = {f"{a}/{b}": [x / y for x, y in zip(taken[a], taken[b], strict=True)] for a, b in RATIOS}
    spread = {
        "ms_per_token": {name: summary(values) for name, values in taken.items()},
        "ratio_spread": {name: summary(values) for name, values in by_round.items()},
    }
    return {name: round(statistics.median(values), 4) for name, values in by_round.items()}, spread


def summary(values: list[float]) -> dict[str, float]:
    """Median, extremes and number of some measurements."""
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**{name: round(value, 4) for name, value in numbers.items()}, "n": len(values)}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="shape of the backbone (default demo)")
    parser.add_argument("--tokens", type=whole_number(2), default=128, help="new tokens a generation (default 128)")
    parser.add_argument("--prompt", type=whole_number(1), default=32, help="tokens of the prompt (default 32)")
    parser.add_argument("--repeats", type=whole_number(1), default=9, help="rounds (default 9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: float32 on the CPU, else bfloat16")
    parser.add_argument("--threads", type=whole_number(1), help="threads of the CPU (default: torch's own)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    longest = PRESETS[args.preset]["max_position_embeddings"]
    if args.prompt + args.tokens > longest:
        raise UserError(f"--prompt and --tokens are more than the {longest} positions of preset {args.preset}.")
    try:
        device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {args.device} is not usable on this machine; choose another, such as cpu."
        ) from error
    dtype_name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")

    models = build_models(args.preset, device, DTYPES[dtype_name])
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(PRESETS[args.preset]["vocab_size"], (1, args.prompt), generator=generator).to(device)
    ratios, spread = report(measure(models, prompt, args.tokens, args.repeats))
    for name, values in spread["ms_per_token"].items():
        print(f"{name:>4}: {values['median']:.3f} ms/token ({values['min']:.3f}..{values['max']:.3f})", file=sys.stderr)

    detail = {
        **spread,
        "paper": {"ratios": {name: round(value, 4) for name, value in PAPER_RATIOS.items()}, "where": "Table 4, B200"},
        "preset": args.preset,
        "weights": "random; the backbone's tensors are shared by all models",
        "memory_parameters": {f"k{k}": memory_parameters(args.preset, k) for k in BANKS},
        "tokens": args.tokens,
        "prompt_tokens": args.prompt,
        "rounds": args.repeats,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"name": "decode", "ratios": ratios, "detail": detail}))
    return 0


def memory_parameters(preset: str, num_banks: int) -> int:
    """Parameters that the memory adds to the backbone: tables and their gains."""
    budget = ParameterBudget.of(TideConfig.from_preset(preset, num_memory_blocks=num_banks))
    return budget.memory + budget.memory_norms


if __name__ == "__main__":
    raise SystemExit(run_command(main))
