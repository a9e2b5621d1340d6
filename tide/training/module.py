"""The module that is trained, its initial weights and its optimiser."""

import contextlib
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from tide.config import TideConfig
from tide.model import TideForCausalLM
from tide.training.recipe import Recipe


class LayerRecorder(Protocol):
    """What a forward writes to, layer by layer; see `tide.trace.Recorder`."""

    def start(self, embedding: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Called with the stream before layer 0 and the memory."""

    def add_layer(self, hidden: torch.Tensor, routing: torch.Tensor | None, *parts: torch.Tensor | None) -> None:
        """Called with every layer's output and routing weights."""


class TrainingModule(nn.Module):
    """A model whose output is its loss alone: nothing keeps, casts or gathers the logits of a step.

    It is what Accelerate wraps, so every forward of a run goes through it, sharded or not.
    """

    def __init__(self, model: TideForCausalLM):
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # what FSDP wraps as one unit

    def get_input_embeddings(self) -> nn.Module:
        """Where FSDP looks for the embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Where FSDP looks for the unembedding."""
        return self.model.get_output_embeddings()

    def tie_weights(self) -> None:
        """Ties the unembedding again after the parameters were replaced, where the configuration says so."""
        self.model.tie_weights()

    def forward(
        self,
        input_ids: torch.Tensor,
        embedding_offset: torch.Tensor | None = None,
        recorder: LayerRecorder | None = None,
    ) -> torch.Tensor:
        """The loss of a batch.

        Args:
            input_ids: [B, T] token ids.
            embedding_offset: [B, T, d], added to the looked-up embedding. Zeros that require a gradient receive the
                gradient of the lookup alone, which a tied embedding's own gradient mixes with the unembedding's.
            recorder: where to write what the layers did; makes the output the loss of each position.

        Returns:
            Scalar, nats per target, the z-loss included; with a recorder [B, T-1] float32, the cross entropy of
            every predicted token.
        """
        start: dict[str, Any] = {"input_ids": input_ids}
        if embedding_offset is not None:
            start["inputs_embeds"] = self.get_input_embeddings()(input_ids) + embedding_offset
        if recorder is None:
            return self.model(**start, labels=input_ids, use_cache=False).loss
        logits = self.model(**start, recorder=recorder, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none").view(
            input_ids[:, 1:].shape
        )


def build_model(config: TideConfig, seed: int) -> TideForCausalLM:
    """Initial weights. The backbone's are the same for every K, so that models of one seed differ in memory alone.

    Args:
        config: the model's configuration.
        seed: of the random generator.

    Returns:
        A float32 model on the CPU.
    """
    torch.manual_seed(seed)
    base = TideForCausalLM(TideConfig(**{**config.to_dict(), "num_memory_blocks": 0}))
    if not config.num_memory_blocks:
        return base
    model = TideForCausalLM(config)
    model.load_state_dict(base.state_dict(), strict=False)
    return model


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with the recipe's betas; weight decay on matrices and tables, not on norm gains and biases.

    Every row of a table is updated in every step, also where its token did not occur: weight decay and the moments
    keep their usual meaning.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.ndim > 1 and "norm" not in name]
    spared = [p for name, p in trained if p.ndim <= 1 or "norm" in name]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(recipe.beta1, recipe.beta2), fused=True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP may have sharded over processes; all processes must ask for it."""
    from torch.distributed.tensor import DTensor  # importing it takes half a second

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def evaluating(module: nn.Module):
    """Evaluation mode without gradients, then the mode that was."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
