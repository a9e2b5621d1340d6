"""Tiny models, texts and tokenizers that the tests share; nothing here is trained or downloaded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from tide import TideConfig, TideForCausalLM
from tide.training.tokenizer import train_tokenizer

torch.set_num_threads(1)
settings.register_profile("tide", deadline=None)
settings.load_profile("tide")

VOCAB_SIZE = 61


def tiny_config(**overrides) -> TideConfig:
    """A model of a few thousand parameters."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_memory_blocks": 3,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
    }
    return TideConfig(**{**fields, **overrides})


def tiny_model(seed: int = 0, **overrides) -> TideForCausalLM:
    """A model whose every parameter is random and of a size that matters, norm gains and null biases included."""
    model = TideForCausalLM(tiny_config(**overrides)).eval()
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter anew; transformers' initialisation is too small to show a wrong sum."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_gain = "norm" in name
            parameter.copy_(1 + 0.3 * noise if is_gain else noise * (0.25 if parameter.ndim > 1 else 0.7))


@pytest.fixture(scope="session")
def make_model() -> Callable[..., TideForCausalLM]:
    """`tiny_model(seed=0, **config_fields)`."""
    return tiny_model


@pytest.fixture(scope="session")
def make_config() -> Callable[..., TideConfig]:
    """`tiny_config(**config_fields)`."""
    return tiny_config


@pytest.fixture
def input_ids() -> torch.Tensor:
    """[2, 9] token ids; the last of each row occurs earlier in it. Special ids 0 and 1 do not occur."""
    return torch.tensor([[5, 9, 17, 9, 33, 60, 5, 21, 9], [40, 41, 42, 40, 8, 8, 12, 55, 41]])


def toy_documents(num_documents: int, seed: int = 0) -> list[str]:
    """Sentences from a grammar that a tiny model learns: who does what where."""
    rng = np.random.default_rng(seed)
    who, does, where = (
        ["The red fox", "A small child", "The old captain", "My neighbour"],
        ["watches three boats", "counts the stars", "paints a door", "sings about rain"],
        ["in the harbour", "behind the mill", "at night", "near the river"],
    )
    lines = rng.integers(4, size=(num_documents, 5, 3))
    return ["\n".join(f"{who[a]} {does[b]} {where[c]}." for a, b, c in document) for document in lines]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 320 ids, trained on the toy text."""
    return train_tokenizer(iter(toy_documents(40)), vocab_size=320)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder as `tide-train --data` takes it: two training files, a held-out one, a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(["train_a.txt", "train_b.txt", "heldout_c.txt"]):
        (folder / name).write_text("\n\n".join(toy_documents(60, seed=number)) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder
