"""Texts that a model writes side by side: one row of a batch for each intervention, from the same random numbers."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import DynamicCache, LlamaModel

from tide import Intervention, TideForCausalLM

# The name of the cache argument changed between transformers releases.
_CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class Generation:
    """Continues one prompt under several interventions, one token of every row a step.

    With a temperature, a token is drawn by the Gumbel-max trick with one noise for all rows: rows whose predictions
    agree draw the same token, and rows whose predictions are close mostly do, so that what differs between two texts
    comes from what differs between two interventions.

    Args:
        model: in evaluation mode.
        token_ids: [T], the prompt.
        interventions: one a row.
        mean_injection: [L, K, d], for a replacement by the mean.
        temperature: 0 takes the likeliest token.
        seed: of the random numbers, which are drawn on the CPU: the same on every device.
    """

    def __init__(
        self,
        model: TideForCausalLM,
        token_ids: Sequence[int],
        interventions: Sequence[Intervention],
        mean_injection: torch.Tensor | None,
        temperature: float,
        seed: int,
    ):
        self._model = model
        self._interventions = tuple(interventions)
        self._mean_injection = mean_injection
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._next = torch.tensor([list(token_ids)] * len(self._interventions), device=model.device)  # (R, T)
        self._cache = DynamicCache(config=model.config)

    def step(self) -> list[int]:
        """The next token of every row."""
        output = self._model(
            input_ids=self._next,
            **{_CACHE: self._cache},
            use_cache=True,
            logits_to_keep=1,
            intervention=self._interventions,
            mean_injection=self._mean_injection,
        )
        logits = output.logits[:, -1].float()  # (R, V)
        if self._temperature > 0:
            waiting = torch.empty(logits.shape[-1]).exponential_(generator=self._generator)
            logits = logits / self._temperature - waiting.log().to(logits.device)
        self._next = logits.argmax(dim=-1, keepdim=True)
        return self._next.squeeze(-1).tolist()


def stream(
    generation: Generation,
    num_rows: int,
    max_new_tokens: int,
    end_ids: frozenset[int],
    stop: threading.Event | None,
    on_device: Callable[[Callable[[], list[int]], bool], list[int]],
) -> Iterator[tuple[int, int]]:
    """Tokens as they come.

    Args:
        generation: the rows.
        num_rows: how many there are.
        max_new_tokens: steps at most.
        end_ids: tokens that end a row; they are yielded too.
        stop: ends the generation before its next step.
        on_device: runs one step, given whether the generation has been let in before.

    Yields:
        (row, token id).
    """
    running = set(range(num_rows))
    for number in range(max_new_tokens):
        if not running or (stop is not None and stop.is_set()):
            return
        for row, token_id in enumerate(on_device(generation.step, number > 0)):
            if row in running:
                yield row, token_id
                if token_id in end_ids:
                    running.remove(row)


def end_ids_of(model: TideForCausalLM) -> frozenset[int]:
    """The tokens that end a text."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
