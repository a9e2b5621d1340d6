"""Forwards that start where an intervention begins, from what a trace has kept of the unchanged forward.

Below the first layer that an intervention touches, a forward is the unchanged one, bit for bit in float32 on the CPU.
`ResumedForwards` runs many interventions that change the injection of one layer alone; `ResumedRecorder` records one
forward whole, the layers that it did not compute included.
"""

from collections.abc import Sequence

import torch

from tide.effect import Effect
from tide.intervention import Intervention, Swap
from tide.model import TideForCausalLM, mix
from tide.trace import Recorder, Trace


class ResumedForwards:
    """Forwards that differ from a traced one in the injection of a single layer, many as one batch.

    They start just before that layer's injection, so that its attention and feed-forward part are not computed again
    either; the injection is made anew, and the layers above run.

    Args:
        model: in evaluation mode, K > 0.
        trace: of the unchanged model, B texts of T tokens from their beginning, with its parts. What is not needed of
            it is let go.
        mean_injection: [L, K, d], for replacements by the mean.

    Raises:
        ValueError: where the trace was asked to leave its parts out.
    """

    def __init__(self, model: TideForCausalLM, trace: Trace, mean_injection: torch.Tensor | None = None):
        self._model = model
        self._mean_injection = mean_injection
        self._before = trace.before_injection()  # (B, T, L, d)
        self._input_ids, self._memory, self._routing = trace.input_ids, trace.memory, trace.routing

    def run(self, layer: int, interventions: Sequence[Intervention]) -> torch.Tensor:
        """The last residual streams, after the final norm.

        Args:
            layer: 0-based, the one whose injection is changed.
            interventions: R of them, each of which touches this layer alone, or nothing.

        Returns:
            [R, B, T, d] in the model's dtype.

        Raises:
            ValueError: when an intervention touches another layer or swaps rows, and as `Effect.of`.
        """
        for intervention in interventions:
            if any(isinstance(edit, Swap) or edit.layer != layer for edit in intervention.edits):
                raise ValueError(f"The intervention {intervention} does not change layer {layer} alone.")
        count, batch = len(interventions), len(self._input_ids)
        input_ids, memory, routing, before = (
            part.unsqueeze(0).expand(count, *part.shape).flatten(0, 1)  # (R * B, ...), a view where B is 1
            for part in (self._input_ids, self._memory, self._routing[:, :, layer], self._before[:, :, layer])
        )
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        by_row = [intervention for intervention in interventions for _ in range(batch)]
        effect = Effect.of(by_row, self._model.config, position_ids, len(by_row), self._mean_injection)
        replaced = None
        if effect is not None:
            routing, replaced = effect.route(layer, routing, memory)
        injected = mix(routing, memory)  # (R * B, T, d)
        stream = before + (injected if replaced is None else injected + replaced)
        output = self._model.model(input_ids=input_ids, inputs_embeds=stream, first_layer=layer + 1, use_cache=False)
        return output.last_hidden_state.unflatten(0, (count, batch))


class ResumedRecorder(Recorder):
    """Records a forward that starts at a layer, after what another trace did below it.

    Args:
        trace: of the same tokens, with its parts.
        first_layer: where the forward starts; the layers below it are the trace's.
    """

    def __init__(self, trace: Trace, first_layer: int):
        super().__init__()
        self._trace = trace
        self._first_layer = first_layer

    def start(self, embedding: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Takes embedding, memory and the layers below from the trace; the arguments are the forward's own."""
        del embedding, memory  # the stream at `first_layer`, and the same memory anew
        trace, (attention, feed_forward) = self._trace, self._trace.parts()
        super().start(trace.hidden[:, :, 0], trace.memory)
        for layer in range(self._first_layer):
            super().add_layer(
                trace.hidden[:, :, layer + 1],
                trace.routing[:, :, layer],
                attention[:, :, layer],
                feed_forward[:, :, layer],
                None,
            )
