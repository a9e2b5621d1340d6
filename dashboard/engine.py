"""Live inference for the dashboard: one model for all sessions. No Streamlit in here."""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tide import Intervention, TideForCausalLM
from tide.checkpoint import load_checkpoint
from tide.cli import UserError
from tide.tokens import Vocabulary
from tide.trace import kl_divergence

DEVICE_VARIABLE = "TIDE_DEVICE"  # how the command line tells the app, which Streamlit runs as a script, its device
LOADED_MODELS = 2  # engines kept; the least recently used one goes
_LOADING = threading.Lock()
CACHED_RUNS = 64  # forwards kept; each costs about T * (d + L * (K + 2)) * 4 bytes


@dataclass(frozen=True)
class LiveRun:
    """One forward of a prompt.

    Attributes:
        token_ids: [T], what the tokenizer made of the prompt, its own document mark included.
        routing: [T, L, K+1] float32, the weights that took effect; null last.
        injection_ratio: [T, L] float32, |m| / |h|.
        stream: [T, d] on the device, the last residual stream after the final norm.
        milliseconds: of the forward, measured once when it ran.
    """

    token_ids: tuple[int, ...]
    routing: np.ndarray
    injection_ratio: np.ndarray
    stream: torch.Tensor
    milliseconds: float


class Engine:
    """A loaded checkpoint that answers prompts; safe to share between threads.

    An intervention is an argument of the forward, never a state of the model, so that two sessions can ask
    different things of one model. Forwards wait for each other: they share the same cores or the same GPU.

    Args:
        checkpoint: folder of the model and its tokenizer.
        device: "cpu", "cuda" or "mps"; None takes a GPU where torch has one.

    Raises:
        UserError: one sentence, when the checkpoint is missing, broken or foreign.
    """

    def __init__(self, checkpoint: Path, device: str | None = None):
        self.device = device or default_device()
        self.model: TideForCausalLM
        self.model, self.tokenizer = load_checkpoint(checkpoint, device=self.device)
        self.vocabulary = Vocabulary(self.tokenizer, self.model.config.vocab_size)
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[tuple[int, ...], Intervention], LiveRun] = OrderedDict()
        self._forward((0,), Intervention())  # the first forward pays for set-up that no prompt should be charged with

    @property
    def description(self) -> str:
        """Device and dtype, as the page shows them."""
        return f"{self.device} {str(self.model.dtype).removeprefix('torch.')}"

    @property
    def context_length(self) -> int:
        """Most tokens that a prompt may have."""
        return self.model.config.max_position_embeddings

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            UserError: one sentence, for an empty prompt and for one beyond the model's context.
        """
        if not prompt:
            raise UserError("The prompt is empty; type some text.")
        ids = tuple(self.tokenizer(prompt).input_ids)
        if len(ids) > self.context_length:
            raise UserError(
                f"The prompt has {len(ids):,} tokens, the model reads at most {self.context_length:,}; shorten it."
            )
        return ids

    def run(self, token_ids: tuple[int, ...], intervention: Intervention | None = None) -> LiveRun:
        """One forward, from the cache where this very one has run before.

        Args:
            token_ids: [T].
            intervention: what the forward does differently.

        Raises:
            UserError: one sentence, when the intervention or a token id is not the model's.
        """
        key = (token_ids, intervention or Intervention())
        with self._lock:
            if key in self._runs:
                self._runs.move_to_end(key)
                return self._runs[key]
            self._check(*key)
            result = self._runs[key] = self._forward(*key)
            while len(self._runs) > CACHED_RUNS:
                self._runs.popitem(last=False)
        return result

    def _check(self, token_ids: tuple[int, ...], intervention: Intervention) -> None:
        size = self.model.config.vocab_size
        if wrong := [i for i in token_ids if not 0 <= i < size]:
            raise UserError(f"Token id {wrong[0]} is outside the vocabulary, 0..{size - 1}.")
        try:
            intervention.validate(self.model.config)
        except ValueError as error:
            raise UserError(str(error)) from error

    @torch.inference_mode()
    def _forward(self, token_ids: tuple[int, ...], intervention: Intervention) -> LiveRun:
        start = time.perf_counter()
        trace = self.model.trace(torch.tensor([token_ids], device=self.device), intervention, with_logits=False)
        routing, ratio = trace.routing[0].cpu().numpy(), trace.injection_ratio()[0].cpu().numpy()
        stream = self.model.model.norm(trace.hidden[0, :, -1])
        return LiveRun(token_ids, routing, ratio, stream, 1000 * (time.perf_counter() - start))

    @torch.inference_mode()
    def log_probs(self, run: LiveRun, position: int) -> torch.Tensor:
        """Log-probabilities of the token after `position`: [V] float32 on the device, in nats."""
        return self.model.lm_head(run.stream[position]).float().log_softmax(dim=-1)

    @torch.inference_mode()
    def compare(self, trained: LiveRun, switched: LiveRun, position: int, k: int = 10) -> "Comparison":
        """What the switches do to the prediction of the token after `position`.

        Args:
            trained: the forward as trained.
            switched: the same prompt with an intervention.
            position: 0..T-1.
            k: rows of each table.
        """
        log_p, log_q = self.log_probs(trained, position), self.log_probs(switched, position)
        kl = float(kl_divergence(log_p, log_q))
        return Comparison(ranking(log_p, log_q, k), ranking(log_q, log_p, k), max(0.0, kl))


@dataclass(frozen=True)
class Comparison:
    """Two next-token predictions side by side.

    Attributes:
        trained: the k likeliest tokens as trained; see `ranking` for the columns.
        switched: the k likeliest tokens with the switches.
        kl: KL(trained || switched) in nats.
    """

    trained: pd.DataFrame
    switched: pd.DataFrame
    kl: float


def ranking(log_probs: torch.Tensor, other: torch.Tensor, k: int) -> pd.DataFrame:
    """The k likeliest tokens of one prediction and where they stand in another.

    Args:
        log_probs: [V] nats.
        other: [V] nats.
        k: rows.

    Returns:
        token_id, probability, rank (1-based), other_rank (1-based), delta (log-probability here minus there, nats).
    """
    values, ids = log_probs.topk(min(k, len(log_probs)))
    other_rank = (other.unsqueeze(0) > other[ids].unsqueeze(1)).sum(dim=1) + 1
    return pd.DataFrame(
        {
            "token_id": ids.cpu().numpy(),
            "probability": values.exp().cpu().numpy(),
            "rank": np.arange(1, len(ids) + 1),
            "other_rank": other_rank.cpu().numpy(),
            "delta": (values - other[ids]).cpu().numpy(),
        }
    )


def shared_engine(checkpoint: Path, fingerprint: str, device: str | None = None) -> Engine:
    """The one engine of a checkpoint and a device, loaded when it is first asked for.

    Args:
        checkpoint: folder.
        fingerprint: of its weights; a checkpoint that was trained anew is another model.
        device: as `Engine`.

    Raises:
        UserError: as `Engine`.
    """
    with _LOADING:  # two sessions that ask at once get one model, not two
        return _load(checkpoint, fingerprint, device)


@lru_cache(maxsize=LOADED_MODELS)
def _load(checkpoint: Path, fingerprint: str, device: str | None) -> Engine:
    del fingerprint  # part of the cache's key
    return Engine(checkpoint, device)


def default_device() -> str:
    """The GPU where torch has one, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
