"""One forward of a prompt, whole or from the first layer that an intervention touches."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tide import Intervention, TideForCausalLM
from tide.resume import ResumedRecorder
from tide.trace import Recorder, Trace


class RunKey(NamedTuple):
    """All that determines a forward of one model.

    Attributes:
        token_ids: [T].
        intervention: what the forward does differently.
        mean_digest: names the mean injections; None where the intervention asks for none.
    """

    token_ids: tuple[int, ...]
    intervention: Intervention
    mean_digest: str | None


@dataclass(frozen=True)
class LiveRun:
    """One forward of a prompt.

    Attributes:
        key: what determined it.
        trace: all that it did, B = 1, on the device, without logits.
        routing: [T, L, K+1] float32, the weights that took effect; null last.
        injection_ratio: [T, L] float32, |m| / |h|.
        stream: [T, d] on the device, the last residual stream after the final norm.
        milliseconds: of the forward, measured once when it ran.
        reused_from: the layer from which it was computed; those below are the trained run's. 0 is a whole forward.
    """

    key: RunKey
    trace: Trace
    routing: np.ndarray
    injection_ratio: np.ndarray
    stream: torch.Tensor
    milliseconds: float
    reused_from: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[T], what the tokenizer made of the prompt, its own document mark included."""
        return self.key.token_ids

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps; those that it shares with another run are counted in both."""
        kept = [*vars(self.trace).values(), self.routing, self.injection_ratio, self.stream]
        return sum(part.nbytes for part in kept if isinstance(part, torch.Tensor | np.ndarray))


def forward(
    model: TideForCausalLM, key: RunKey, mean_injection: torch.Tensor | None, trained: LiveRun | None
) -> LiveRun:
    """Runs a prompt.

    Below the first layer that the intervention touches, a forward is what it is as trained. Where the trained run
    is at hand, this one therefore starts from its stream; in float32 on the CPU the bits are those of a whole forward.

    Args:
        model: in evaluation mode.
        key: prompt and intervention.
        mean_injection: [L, K, d], for a replacement by the mean.
        trained: the run of the same prompt with nothing changed.
    """
    start = time.perf_counter()
    layer = key.intervention.first_layer(model.config.num_hidden_layers) if trained is not None else 0
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.tensor([key.token_ids], device=model.device)}
    recorder = Recorder()
    if trained is not None and layer > 0:
        recorder = ResumedRecorder(trained.trace, layer)
        inputs["inputs_embeds"] = trained.trace.hidden[:, :, layer].contiguous()
    output = model.model(
        **inputs,
        first_layer=layer,
        intervention=key.intervention,
        mean_injection=mean_injection,
        recorder=recorder,
        use_cache=False,
    )
    trace = recorder.finish(model, inputs["input_ids"], None)
    routing, ratio = (part[0].cpu().numpy() for part in (trace.routing, trace.injection_ratio()))
    stream = output.last_hidden_state[0]
    return LiveRun(key, trace, routing, ratio, stream, 1000 * (time.perf_counter() - start), layer)
