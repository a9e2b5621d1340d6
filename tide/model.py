"""TIDE on transformers' LLaMA.

How it departs from LLaMA:

- K tables hold a vector for every token id. They are looked up once per forward, M [B, T, K, d], and every
  layer reads the same M (equations 3.3 and 3.4; `tide.memory`).
- In every layer a router sees the post-attention state n~ and weighs the K vectors and a null bank
  (equation 3.5); the weighted sum is added beside the feed-forward output (equation 3.6).
- The loss adds a z-loss to the cross entropy (Table 7).

Everything else is inherited: attention, feed-forward, norms, rotary embedding, cache, `generate()`. With
K = 0 the code path is LLaMA's, and so are the logits, bit for bit.

What one forward does differently is a value, `Intervention`, and what it did is read from a `Recorder`; both
travel as keyword arguments. No hooks, no state on modules: two sessions can share one model.
"""

import re
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from tide.config import TideConfig
from tide.effect import Effect
from tide.intervention import Intervention
from tide.memory import MemoryBanks, Router
from tide.quantization import QUANTIZATIONS, QuantizedTable
from tide.table_file import EMBEDDING_WEIGHT, MEMORY_WEIGHT, FileEmbedding, RowTable, TableFile
from tide.trace import Recorder, Trace

STORAGES = ("resident", *QUANTIZATIONS, "disk")


class TideDecoderLayer(LlamaDecoderLayer):
    """One decoder layer: LLaMA's, plus the injection m (equation 3.6)."""

    def __init__(self, config: TideConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.router = Router(config) if config.num_memory_blocks else None

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None = None,
        effect: Effect | None = None,
        recorder: Recorder | None = None,
        first_layer: int = 0,
        **kwargs,
    ) -> torch.Tensor:
        """h' = h~ + FFN(n~) + m.

        Args:
            hidden_states: [B, T, d], the residual stream.
            memory: [B, T, K, d], M of equation 3.4; None for the Base model.
            effect: what this forward does differently.
            recorder: where to write what this layer did.
            first_layer: layers below it let the stream pass: the forward starts there.
            **kwargs: what LLaMA's attention takes: masks, rotary embedding, cache.

        Returns:
            [B, T, d].
        """
        if self.layer_idx < first_layer:
            return hidden_states
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended  # h~ (B, T, d)
        normed = self.post_attention_layernorm(hidden_states)  # n~ (B, T, d)
        fed_forward = self.mlp(normed)
        hidden_states = hidden_states + fed_forward

        routing, replaced = None, None
        if self.router is not None and memory is not None:
            routing = self.router(normed)  # alpha (B, T, K+1), null last
            if effect is not None:
                routing, replaced = effect.route(self.layer_idx, routing, memory)
            injected = mix(routing, memory)  # m (B, T, d)
            hidden_states = hidden_states + (injected if replaced is None else injected + replaced)
        if recorder is not None:
            recorder.add_layer(hidden_states, routing, attended, fed_forward, replaced)
        return hidden_states


def mix(routing: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The injection m = sum_k alpha_k M_k(v); the null bank is the zero vector and drops out (equation 3.6).

    Args:
        routing: [..., K+1] float32.
        memory: [..., K, d].

    Returns:
        [..., d] in the dtype of `memory`.
    """
    weights = routing[..., :-1].to(memory.dtype)
    return torch.matmul(weights.unsqueeze(-2), memory).squeeze(-2)


class TidePreTrainedModel(LlamaPreTrainedModel):
    """What transformers needs to know to initialise, load and shard a TIDE model."""

    config: TideConfig
    config_class = TideConfig
    _no_split_modules = ["TideDecoderLayer"]
    _can_record_outputs = {
        **LlamaPreTrainedModel._can_record_outputs,
        "hidden_states": TideDecoderLayer,
    }

    @classmethod
    def from_pretrained(cls, path, *args, memory: str = "resident", **kwargs):  # type: ignore[override]
        """Loads a checkpoint as transformers does.

        Args:
            path: a folder or a name on the hub.
            *args: as transformers.
            memory: how the K tables are stored. "resident" keeps them in the model's dtype on its device. All others
                are for models that are only run: every forward makes numbers of the rows of its tokens. "int8" and
                "int4" hold them on the device in so many bits (table 5; `tide.quantization`); "disk" leaves them in the
                checkpoint's safetensors file, the same numbers. An input embedding that is not tied to the unembedding
                is then left there too.
            **kwargs: as transformers: dtype, device_map, output_loading_info, ...

        Raises:
            OSError: where the checkpoint cannot be found.
            ValueError: for a storage that there is not, or weights without a table that is to be left there.
        """
        if memory not in STORAGES:
            raise ValueError(f"There is no memory storage {memory!r}; choose one of {', '.join(STORAGES)}.")
        if memory != "resident":
            config = kwargs.get("config")
            if not isinstance(config, TideConfig):
                config = TideConfig.from_pretrained(config or path, **kwargs)
            if config.num_memory_blocks:
                file = TableFile.of_checkpoint(path, MEMORY_WEIGHT, **kwargs)
                way = QUANTIZATIONS.get(memory)
                kwargs["memory_table"] = file if way is None else QuantizedTable.from_file(file, way)
            if memory == "disk" and not config.tie_word_embeddings:
                kwargs["embedding_table"] = TableFile.of_checkpoint(path, EMBEDDING_WEIGHT, **kwargs)
        return super().from_pretrained(path, *args, **kwargs)

    def save_pretrained(self, *args, **kwargs) -> None:  # type: ignore[override]
        """Saves as transformers does.

        Raises:
            ValueError: when tables are no weights of the model: they would make a checkpoint without them.
        """
        if any(getattr(module, "table", None) is not None for module in self.modules()):
            raise ValueError("This model's tables are not its weights; load it with memory='resident' to save it.")
        super().save_pretrained(*args, **kwargs)

    def _leave_out(self, memory_table: RowTable | None, embedding_table: RowTable | None) -> None:
        """Tells transformers which tables in the checkpoint are not for it to load."""
        tables = {MEMORY_WEIGHT: memory_table, EMBEDDING_WEIGHT: embedding_table}
        if left := [rf"{re.escape(name)}$" for name, table in tables.items() if table is not None]:
            self._keys_to_ignore_on_load_unexpected = left

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # BankRMSNorm is initialised there: ones, like every RMSNorm
        if isinstance(module, MemoryBanks) and module.weight is not None:
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)  # ours: as the input embedding
        elif isinstance(module, Router) and module.null_bias is not None:
            init.zeros_(module.null_bias)


class TideModel(TidePreTrainedModel, LlamaModel):
    """The decoder: LLaMA's, with the memory looked up once and handed to every layer."""

    def __init__(
        self, config: TideConfig, memory_table: RowTable | None = None, embedding_table: RowTable | None = None
    ):
        super().__init__(config)
        if embedding_table is not None:
            self.embed_tokens = FileEmbedding(embedding_table)  # type: ignore[assignment]
        self.layers = nn.ModuleList([TideDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.memory = MemoryBanks(config, memory_table) if config.num_memory_blocks else None
        self._leave_out(memory_table, embedding_table)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        intervention: Intervention | Sequence[Intervention] | None = None,
        mean_injection: torch.Tensor | None = None,
        recorder: Recorder | None = None,
        first_layer: int = 0,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """LLaMA's forward on a residual stream that the memory feeds in every layer.

        Args:
            input_ids: [B, T]. Needed whenever K > 0: the memory is addressed by token id.
            inputs_embeds: [B, T, d], where the residual stream starts instead of at the embedding of `input_ids`;
                the memory is still addressed by them.
            intervention: what this forward does differently; or one for each row of the batch.
            mean_injection: [L, K, d], what a replacement by the mean injects.
            recorder: where to write what every layer did.
            first_layer: start there, `inputs_embeds` being the stream that enters this layer.
            **kwargs: as `LlamaModel.forward`.

        Raises:
            ValueError: when K > 0 and only `inputs_embeds` is given; when the intervention names what the model does
                not have, or needs a `mean_injection` that is not given.
        """
        if self.memory is not None and input_ids is None:
            raise ValueError("A TIDE model looks its memory up by token id: pass input_ids, not inputs_embeds.")
        effect = None
        if intervention:
            tokens = input_ids if input_ids is not None else inputs_embeds
            assert tokens is not None
            positions = position_ids_of(tokens, kwargs)
            effect = Effect.of(intervention, self.config, positions, len(tokens), mean_injection)
        memory = None
        if self.memory is not None and input_ids is not None:
            memory = self.memory(input_ids if effect is None else effect.lookup_ids(input_ids))  # M (B, T, K, d)
            memory = as_autocast_reads(memory)
        if recorder is not None:
            recorder.start(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds, memory)
        start = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        return super().forward(
            **start, memory=memory, effect=effect, recorder=recorder, first_layer=first_layer, **kwargs
        )


def as_autocast_reads(memory: torch.Tensor) -> torch.Tensor:
    """M in the dtype in which autocast multiplies it: cast once, instead of in every layer's `mix` (ours).

    Its gradient, the sum over the layers, is then summed in this dtype too. Without autocast M is what it was.
    """
    device = memory.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return memory.to(torch.get_autocast_dtype(device))
    return memory


def position_ids_of(tokens: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """Where a forward's tokens stand in their text, as transformers numbers them: [1 or B, T].

    Args:
        tokens: [B, T, ...].
        kwargs: of the forward: position ids where they were given, else a cache that says how much text came before.
    """
    if kwargs.get("position_ids") is not None:
        return kwargs["position_ids"]
    caches = [value for value in kwargs.values() if isinstance(value, Cache)]  # its name changed between releases
    before = caches[0].get_seq_length() if caches else 0
    return torch.arange(before, before + tokens.shape[1], device=tokens.device).unsqueeze(0)


class TideForCausalLM(TidePreTrainedModel, LlamaForCausalLM):
    """A TIDE language model. `generate()`, cache and saving are transformers' own."""

    def __init__(
        self, config: TideConfig, memory_table: RowTable | None = None, embedding_table: RowTable | None = None
    ):
        super().__init__(config)
        self.model = TideModel(config, memory_table, embedding_table)
        self._leave_out(memory_table, embedding_table)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        intervention: Intervention | Sequence[Intervention] | None = None,
        mean_injection: torch.Tensor | None = None,
        recorder: Recorder | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss where `labels` are given.

        LLaMA's arguments that are named here are those that `generate()` and Trainer look for in this signature:
        without `logits_to_keep`, for one, `generate()` would unembed every position of a prompt.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 0 where a row is padded.
            position_ids: [B, T].
            labels: [B, T] token ids, -100 where no loss is wanted.
            logits_to_keep: how many of the last positions to unembed; 0 is all.
            intervention: what this forward does differently; or one for each row of the batch.
            mean_injection: [L, K, d], what a replacement by the mean injects.
            recorder: where to write what every layer did; `trace` is the easier way.
            **kwargs: as `LlamaForCausalLM.forward`: cache, inputs_embeds, num_items_in_batch, ...

        Returns:
            As transformers: `.logits` [B, T, V]; `.loss` in nats, the z-loss included (`causal_lm_loss`).
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            logits_to_keep=logits_to_keep,
            intervention=intervention,
            mean_injection=mean_injection,
            recorder=recorder,
            **kwargs,
        )

    @property  # type: ignore[misc]
    def loss_function(self):  # type: ignore[override]
        """The training loss of Table 7, in the form that transformers' forward and Trainer call."""
        return causal_lm_loss_with(self.config.z_loss_coefficient)

    @torch.no_grad()
    def trace(
        self,
        input_ids: torch.Tensor,
        intervention: Intervention | Sequence[Intervention] | None = None,
        attention_mask: torch.Tensor | None = None,
        with_logits: bool = True,
        with_parts: bool = True,
        mean_injection: torch.Tensor | None = None,
    ) -> Trace:
        """Runs one forward and returns all that it did.

        Args:
            input_ids: [B, T] token ids.
            intervention: what this forward does differently; or one for each row of the batch.
            attention_mask: [B, T], 0 where a row is padded; padded positions of a trace mean nothing.
            with_logits: False leaves `Trace.logits` empty and saves the unembedding, the dearest part of a
                forward with a large vocabulary.
            with_parts: False leaves the attention and feed-forward outputs out, twice the memory of the stream.
            mean_injection: [L, K, d], what a replacement by the mean injects.

        Returns:
            `tide.trace.Trace`, tensors on the model's device.
        """
        recorder = Recorder(with_parts)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        output = self.model(**inputs, intervention=intervention, mean_injection=mean_injection, recorder=recorder)
        logits = self.lm_head(output.last_hidden_state) if with_logits else None
        return recorder.finish(self, input_ids, logits)


def causal_lm_loss_with(z_loss_coefficient: float):
    """Binds the z-loss coefficient, since transformers calls a loss function without the configuration."""

    def loss_function(logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, **_):
        return causal_lm_loss(logits, labels, z_loss_coefficient, num_items_in_batch, ignore_index)

    return loss_function


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss_coefficient: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Cross entropy of the next token plus z_loss_coefficient * mean(logsumexp(logits)^2) (Table 7), in float32.

    Args:
        logits: [B, T, V].
        labels: [B, T] token ids; position t is predicted from position t-1. `ignore_index` is left out.
        z_loss_coefficient: 1e-6 in the paper.
        num_items_in_batch: divide the sum by this instead of the number of targets, for accumulated gradients.
        ignore_index: label of positions that are not counted.

    Returns:
        Scalar, nats per target.
    """
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].to(logits.device)  # (B, T)
    counted = targets != ignore_index
    index = targets.clamp(min=0).unsqueeze(-1)
    logits = logits.float()
    log_prob = logits.log_softmax(dim=-1).gather(-1, index).squeeze(-1)  # (B, T)
    logsumexp = logits.gather(-1, index).squeeze(-1) - log_prob  # from what log_softmax already summed
    per_target = z_loss_coefficient * logsumexp.square() - log_prob
    count = num_items_in_batch if num_items_in_batch is not None else counted.sum()
    return (per_target * counted).sum() / count


AutoConfig.register("tide", TideConfig)
AutoModel.register(TideConfig, TideModel)
AutoModelForCausalLM.register(TideConfig, TideForCausalLM)
