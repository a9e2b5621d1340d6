"""Shapes of well-known models that benchmarks take, with random weights."""

from typing import Any

SMOLLM2: dict[str, Any] = {  # SmolLM2-135M
    "vocab_size": 49_152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
