"""The module that is trained, its initial weights and its optimiser."""

import contextlib
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tide.checkpoint import first_line
from tide.cli import UserError
from tide.config import TideConfig
from tide.model import TideForCausalLM
from tide.training.recipe import Recipe


class LayerRecorder(Protocol):
    """What a forward writes to, layer by layer; see `tide.trace.Recorder`."""

    def start(self, embedding: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Called with the stream before layer 0 and the memory."""

    def add_layer(self, hidden: torch.Tensor, routing: torch.Tensor | None, *parts: torch.Tensor | None) -> None:
        """Called with every layer's output and routing weights."""


class MemoryRows(NamedTuple):
    """The rows of the memory table that a micro batch [B, T] reads, as a small table of their own.

    Attributes:
        ids: [N] int64, the token id of every row, N = min(B * T, V) whatever the text, so that shapes stay the same:
            first the distinct ids in the batch, then id 0 in rows that nothing reads.
        table: [N, K, d], a leaf, which receives the gradient.
        positions: [B, T] int64, the row of every token.
    """

    ids: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor


class RowGradients:
    """Gathers the memory table's gradient over micro batches, row by row, in one tensor that stays between steps.

    Autograd makes a dense gradient of a looked-up table, V rows of which a batch has touched a few thousand, and a new
    one for every micro batch: to allocate, clear and add them is the most that the memory costs a training step. What
    is gathered here is the same, bit for bit (ours).

    Args:
        table: [V, K, d], the memory of a model that no other process shares: DDP and FSDP want autograd's gradient.
    """

    def __init__(self, table: nn.Parameter):
        self.table = table
        self._gradient: torch.Tensor | None = None
        self._touched: list[torch.Tensor] = []

    def start(self) -> None:
        """Begins a step: the table's gradient is zero."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.table)
        for ids in self._touched:
            self._gradient.index_fill_(0, ids, 0)
        self._touched.clear()
        self.table.grad = self._gradient

    def read(self, input_ids: torch.Tensor) -> MemoryRows:
        """The rows that a micro batch [B, T] of token ids reads."""
        distinct, positions = input_ids.unique(return_inverse=True)
        ids = F.pad(distinct, (0, min(input_ids.numel(), len(self.table)) - len(distinct)))
        return MemoryRows(ids, self.table.detach().index_select(0, ids).requires_grad_(), positions)

    def add(self, rows: MemoryRows) -> None:
        """Adds the gradient of these rows, after their micro batch's backward pass, to the table's."""
        assert self._gradient is not None
        assert rows.table.grad is not None
        # Every id comes once, but for rows of zeros: a GPU, which adds in any order, gets the same sum every time.
        self._gradient.index_add_(0, rows.ids, rows.table.grad)
        self._touched.append(rows.ids)


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
        memory_rows: MemoryRows | None = None,
        recorder: LayerRecorder | None = None,
    ) -> torch.Tensor:
        """The loss of a batch.

        Args:
            input_ids: [B, T] token ids.
            embedding_offset: [B, T, d], added to the looked-up embedding. Zeros that require a gradient receive the
                gradient of the lookup alone, which a tied embedding's own gradient mixes with the unembedding's.
            memory_rows: the rows that `input_ids` read of the memory, to be read instead of the memory's own table,
                which then receives no gradient.
            recorder: where to write what the layers did; makes the output the loss of each position.

        Returns:
            Scalar, nats per target, the z-loss included; with a recorder [B, T-1] float32, the cross entropy of
            every predicted token.
        """
        start: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if embedding_offset is not None or memory_rows is not None:
            embedded = self.get_input_embeddings()(input_ids)
            start["inputs_embeds"] = embedded if embedding_offset is None else embedded + embedding_offset
        start |= {"labels": input_ids} if recorder is None else {"recorder": recorder}
        if memory_rows is None:
            output = self.model(**start)
        else:
            start["input_ids"] = memory_rows.positions  # beside `inputs_embeds` they address the memory alone
            output = functional_call(self.model, {"model.memory.weight": memory_rows.table}, kwargs=start)
        if recorder is None:
            return output.loss
        logits = output.logits[:, :-1]
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


def set_attention(model: TideForCausalLM, implementation: str) -> None:
    """Chooses one of transformers' implementations of attention.

    Raises:
        UserError: when transformers knows no such name, or what it needs is not installed.
    """
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"Attention {implementation!r} cannot be had here ({first_line(error)}); give --attention sdpa."
        ) from error


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
