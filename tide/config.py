"""`TideConfig`: a LLaMA configuration plus what TIDE adds, and the presets by name."""

from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


@strict
class TideConfig(LlamaConfig):
    """Configuration of a TIDE model; every field of `LlamaConfig` keeps its meaning.

    Attributes:
        num_memory_blocks: K, the number of memory banks (section 3.2). 0 is the Base model, plain LLaMA.
        router_null_bias: gives every router a learned bias on the null bank's logit. Ours, not stated in
            the paper, whose router (equation 3.5) has no bias; off by default.
        z_loss_coefficient: weight of mean(logsumexp(logits)^2) in the training loss (Table 7: 1e-6).

    Raises:
        ValueError: when K or the coefficient is negative.
    """

    model_type = "tide"

    num_memory_blocks: int = 8
    router_null_bias: bool = False
    z_loss_coefficient: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        self.validate_memory()  # here too, where it stays the ValueError that it is: `@strict` wraps it
        super().__post_init__(**kwargs)

    def validate_memory(self) -> None:
        """Part of the validation that `@strict` runs when a configuration is made or saved."""
        if self.num_memory_blocks < 0:
            raise ValueError(f"num_memory_blocks is {self.num_memory_blocks}; it must be 0 (Base) or more.")
        if self.z_loss_coefficient < 0:
            raise ValueError(f"z_loss_coefficient is {self.z_loss_coefficient}; it must not be negative.")

    @classmethod
    def from_preset(cls, name: str, num_memory_blocks: int, **overrides: Any) -> "TideConfig":
        """The configuration of a named size.

        Args:
            name: one of `PRESETS`.
            num_memory_blocks: K, 0 for the Base model.
            **overrides: any field of the configuration, for example `vocab_size`.

        Raises:
            ValueError: for a name that is no preset; the message lists the presets.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; the presets are {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], "num_memory_blocks": num_memory_blocks, **overrides})


_LLAMA_3 = {
    "vocab_size": 128_256,  # Table 7: the Llama 3.1 tokenizer
    "max_position_embeddings": 2048,  # Table 7
    "hidden_act": "silu",  # Table 7
    "rms_norm_eps": 1e-5,  # ours: as Llama 3
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},  # ours: as Llama 3
    "tie_word_embeddings": False,  # ours
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}

PRESETS: dict[str, dict[str, Any]] = {
    # The size that two CPU cores train and serve: ours.
    "demo": {
        "vocab_size": 16_384,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 352,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
    # The paper names the sizes of Table 2, not their shapes. d 2048 and 20 layers reproduce the published
    # 1.028 GB of the 8-bit 1B backbone (1,027,688,448 parameters, embeddings excluded): a hypothesis, ours.
    "750m": {
        **_LLAMA_3,
        "hidden_size": 1792,
        "num_hidden_layers": 19,
        "num_attention_heads": 14,
        "intermediate_size": 4928,
    },
    "1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
    },
    "3b": {
        **_LLAMA_3,
        "hidden_size": 3072,
        "num_hidden_layers": 27,
        "num_attention_heads": 24,
        "intermediate_size": 8192,
    },
}


@dataclass(frozen=True)
class ParameterBudget:
    """Number of parameters of a model, each part apart: "1B" never counts the memory.

    Attributes:
        backbone: attention, feed-forward and the backbone's norms; embeddings excluded.
        embeddings: the input embedding, and the unembedding where it is not tied.
        memory: the K tables, V * d each.
        memory_norms: the gains of RMSNorm_k, d a bank (equation 3.3).
        router: the routers of all layers, (K + 1) * d each (equation 3.5), and their null biases.
    """

    backbone: int
    embeddings: int
    memory: int
    memory_norms: int
    router: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.backbone + self.embeddings + self.memory + self.memory_norms + self.router

    @classmethod
    def of(cls, config: TideConfig) -> "ParameterBudget":
        """Counts from the configuration alone, so that a 6.3B-parameter memory costs nothing to count."""
        v, d, layers, k = config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_memory_blocks
        head_dim = config.head_dim or d // config.num_attention_heads
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        attention = 2 * d * head_dim * (config.num_attention_heads + kv_heads)
        attention += config.attention_bias * (head_dim * (config.num_attention_heads + 2 * kv_heads) + d)
        mlp = 3 * d * config.intermediate_size + config.mlp_bias * (2 * config.intermediate_size + d)
        return cls(
            backbone=layers * (attention + mlp + 2 * d) + d,
            embeddings=v * d * (1 if config.tie_word_embeddings else 2),
            memory=k * v * d,
            memory_norms=k * d,
            router=layers * ((k + 1) * d + config.router_null_bias) if k else 0,
        )
