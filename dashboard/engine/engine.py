"""`Engine`: a checkpoint that answers prompts, and the one engine of each checkpoint."""

import threading
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from dashboard.engine.device import default_device
from dashboard.engine.live_model import LiveModel
from tide.checkpoint import load_checkpoint
from tide.cli import UserError
from tide.tokens import Vocabulary

DEVICE_VARIABLE = "TIDE_DEVICE"  # how the command line tells the app, which Streamlit runs as a script, its device
LOADED_MODELS = 2  # engines kept; the least recently used one goes
_LOADING = threading.Lock()


class Engine(LiveModel):
    """A loaded checkpoint, with its tokenizer; safe to share between threads.

    Args:
        checkpoint: folder of the model and its tokenizer.
        device: "cpu", "cuda" or "mps"; None takes a GPU where torch has one.
        dtype: of the weights; None is float32 on the CPU and bfloat16 on a GPU.
        mean_injection: as `LiveModel`.

    Raises:
        UserError: one sentence, when the checkpoint is missing, broken or foreign.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        mean_injection: np.ndarray | None = None,
    ):
        model, self.tokenizer = load_checkpoint(checkpoint, device=device or default_device(), dtype=dtype)
        self.vocabulary = Vocabulary(self.tokenizer, model.config.vocab_size)
        super().__init__(model, mean_injection)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            UserError: one sentence, for an empty prompt and for one beyond the model's context.
        """
        if not prompt:
            raise UserError("The prompt is empty; type some text.")
        ids = tuple(self.tokenizer(prompt).input_ids)
        self._check_tokens(ids)
        return ids


def shared_engine(
    checkpoint: Path, fingerprint: str, device: str | None = None, dtype: torch.dtype | None = None
) -> Engine:
    """The one engine of a checkpoint, device and dtype, loaded when it is first asked for.

    Args:
        checkpoint: folder.
        fingerprint: of its weights; a checkpoint that was trained anew is another model.
        device: as `Engine`.
        dtype: as `Engine`.

    Raises:
        UserError: as `Engine`.
    """
    with _LOADING:  # two sessions that ask at once get one model, not two
        return _load(checkpoint, fingerprint, device or default_device(), dtype)


@lru_cache(maxsize=LOADED_MODELS)
def _load(checkpoint: Path, fingerprint: str, device: str, dtype: torch.dtype | None) -> Engine:
    del fingerprint  # part of the cache's key
    return Engine(checkpoint, device, dtype)
