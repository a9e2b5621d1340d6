"""Random requests to a live model, for its tests."""

import random
from collections.abc import Callable

import torch

from dashboard.engine import LiveModel, LiveRun
from tests.conftest import VOCAB_SIZE, tiny_model
from tide import Intervention
from tide.intervention import Off, Rule, Swap

LAYERS, BANKS, LONGEST = 3, 3, 12  # of the tiny model, and of its prompts


def live_model(**config_fields) -> LiveModel:
    """A tiny model, live, with mean injections."""
    model = tiny_model(**config_fields)
    config = model.config
    shape = (config.num_hidden_layers, config.num_memory_blocks, config.hidden_size)
    return LiveModel(model, torch.randn(shape, generator=torch.Generator().manual_seed(5)).numpy())


def random_prompt(rng: random.Random, longest: int = LONGEST) -> tuple[int, ...]:
    """1..longest token ids."""
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest)))


def random_intervention(rng: random.Random) -> Intervention:
    """Up to three edits of any kind, anywhere."""

    def off() -> Off:
        layer = rng.choice([None, *range(LAYERS)])
        bank = rng.choice([None, *range(BANKS)])
        how = rng.choice(["zero", "mean", "random"])
        return Off(layer, bank, positions(), how, rng.randrange(5), rng.random() < 0.3)

    def rule() -> Rule:
        kind, value = rng.choice([("uniform", 0), ("null", 0), ("only", rng.randrange(BANKS)), ("temperature", 0.5)])
        return Rule(kind, value, rng.choice([None, *range(LAYERS)]), positions())

    def swap() -> Swap:
        return Swap(rng.randrange(VOCAB_SIZE), rng.randrange(VOCAB_SIZE), positions())

    def positions() -> frozenset[int] | None:
        return None if rng.random() < 0.6 else frozenset(rng.sample(range(LONGEST), rng.randint(1, 3)))

    kinds: list[Callable[[], Off | Rule | Swap]] = [off, off, off, rule, swap]
    return Intervention(tuple(rng.choice(kinds)() for _ in range(rng.randint(0, 3))))


def same_bits(a: LiveRun, b: LiveRun) -> bool:
    """Whether two runs did the same, to the last bit, in all that a run keeps."""
    parts_a, parts_b = vars(a.trace), vars(b.trace)
    tensors = [name for name, part in parts_a.items() if isinstance(part, torch.Tensor)]
    absent = [name for name, part in parts_a.items() if part is None]
    return (
        {"routing", "hidden", "memory", "attention", "feed_forward"} <= set(tensors)
        and all(torch.equal(parts_a[name], parts_b[name]) for name in tensors)
        and all(parts_b[name] is None for name in absent)
        and torch.equal(a.stream, b.stream)
        and (a.routing == b.routing).all()
        and (a.injection_ratio == b.injection_ratio).all()
    )
