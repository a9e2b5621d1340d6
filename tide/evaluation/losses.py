"""Cross entropy of held-out text, position by position."""

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.cli import UserError
from tide.intervention import Intervention
from tide.model import TideForCausalLM
from tide.training.corpus import read_documents
from tide.training.data import encode_documents

MAX_LOGITS_BYTES = 256 * 2**20
CPU_POSITIONS = 256  # most that are unembedded at once on a CPU, where the logits of more cost a third more time


def heldout_windows(
    file: str | Path, tokenizer: PreTrainedTokenizerFast, length: int, max_tokens: int | None = None
) -> np.ndarray:
    """Cuts a text into windows as the training stream does: documents one after another, each with its BOS in front.

    Windows do not overlap. The tokens that fill no last window, fewer than `length`, are left out.

    Args:
        file: UTF-8 text, a blank line between documents.
        tokenizer: the models' own.
        length: T, tokens a window.
        max_tokens: read no further than this many tokens.

    Returns:
        Token ids [N, T] int64.

    Raises:
        UserError: when the file does not exist, is not UTF-8, or holds less than one window.
    """
    parts, total = [], 0
    for ids in encode_documents(read_documents(file), tokenizer):
        parts.append(ids)
        total += len(ids)
        if max_tokens is not None and total >= max_tokens:
            break
    stream = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    stream = stream[:max_tokens]
    if len(stream) < length:
        raise UserError(f"{file} gives {len(stream)} tokens, less than one window of {length}; give a longer text.")
    return stream[: len(stream) // length * length].reshape(-1, length)


@torch.no_grad()
def target_losses(model: TideForCausalLM, streams: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every predicted position, a few positions unembedded at a time.

    Args:
        model: whose unembedding is used.
        streams: [..., B, T, d], after the final norm.
        input_ids: [B, T].

    Returns:
        [..., B, T-1] float32, nats; column t is the loss of token t+1.
    """
    streams = streams[..., :-1, :]
    shape = streams.shape[:-1]
    targets = input_ids[:, 1:].expand(shape)
    positions = max(1, MAX_LOGITS_BYTES // (4 * model.config.vocab_size))
    if streams.device.type == "cpu":
        positions = min(positions, CPU_POSITIONS)
    pairs = zip(streams.flatten(0, -2).split(positions), targets.flatten().split(positions), strict=True)
    parts = [F.cross_entropy(model.lm_head(stream).float(), target, reduction="none") for stream, target in pairs]
    return torch.cat(parts).view(shape)


@torch.no_grad()
def token_losses(
    model: TideForCausalLM,
    windows: np.ndarray,
    batch_size: int,
    intervention: Intervention | None = None,
    progress: str | None = None,
) -> np.ndarray:
    """Cross entropy of every predicted position; the z-loss is no part of it.

    The unembedding is applied to a few positions at a time, so that logits never take more than 256 MB.

    Args:
        model: the model, on its device.
        windows: token ids [N, T].
        batch_size: windows a forward.
        intervention: what the forwards do differently.
        progress: name of a progress bar on stderr; None draws none.

    Returns:
        [N, T-1] float32, nats; column t is the loss of token t+1 of the window.
    """
    ids = torch.as_tensor(windows)
    losses = []
    for batch in tqdm(ids.split(batch_size), desc=progress, unit="batch", disable=progress is None):
        batch = batch.to(model.device)
        streams = model.model(batch, intervention=intervention, use_cache=False).last_hidden_state
        losses.append(target_losses(model, streams, batch).cpu())
    return torch.cat(losses).numpy()


def perplexity(losses: np.ndarray) -> float:
    """The exponential of the mean over all positions, whatever the shape of `losses` (nats)."""
    return math.exp(np.asarray(losses, dtype=np.float64).mean())
