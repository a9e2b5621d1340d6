"""The configuration, its presets and the parameter budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_config
from tide import ParameterBudget, TideConfig, TideForCausalLM
from tide.config import PRESETS


def count_parameters(config: TideConfig) -> dict[str, int]:
    """Parameters of a real model without memory for them, each part apart, told by their names."""
    with torch.device("meta"):
        model = TideForCausalLM(config)
    parts = dict.fromkeys(["backbone", "embeddings", "memory", "memory_norms", "router"], 0)
    for name, parameter in model.named_parameters():  # a tied unembedding is listed once
        if "memory.norm" in name:
            part = "memory_norms"
        elif "memory" in name:
            part = "memory"
        elif "router" in name:
            part = "router"
        elif "embed_tokens" in name or "lm_head" in name:
            part = "embeddings"
        else:
            part = "backbone"
        parts[part] += parameter.numel()
    return parts


@pytest.mark.parametrize("num_banks", [0, 1, 8, 24])
@pytest.mark.parametrize("preset", PRESETS)
def test_budget_of_every_preset_is_the_count_of_its_parameters(preset, num_banks):
    config = TideConfig.from_preset(preset, num_memory_blocks=num_banks)
    budget, counted = ParameterBudget.of(config), count_parameters(config)
    assert vars(budget) == counted
    assert budget.total == sum(counted.values())


@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    head_dim=st.sampled_from([None, 4, 10]),
    width=st.integers(1, 5),
    layers=st.integers(1, 3),
    num_banks=st.integers(0, 4),
    tied=st.booleans(),
    null_bias=st.booleans(),
    biases=st.booleans(),
)
@settings(max_examples=30)
def test_budget_of_any_config_is_the_count_of_its_parameters(
    heads, head_dim, width, layers, num_banks, tied, null_bias, biases
):
    config = tiny_config(
        hidden_size=2 * heads[0] * width,
        head_dim=head_dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        num_hidden_layers=layers,
        num_memory_blocks=num_banks,
        tie_word_embeddings=tied,
        router_null_bias=null_bias,
        attention_bias=biases,
        mlp_bias=biases,
    )
    assert vars(ParameterBudget.of(config)) == count_parameters(config)


def test_the_papers_parameter_counts():
    def budget(num_banks):
        return ParameterBudget.of(TideConfig.from_preset("1b", num_memory_blocks=num_banks))

    assert budget(1).memory == 262_668_288  # V 128,256 * d 2,048
    assert f"{budget(8).memory / 1e9:.3f}" == "2.101"
    assert f"{budget(24).memory / 1e9:.3f}" == "6.304"
    assert budget(24).backbone == 1_027_688_448  # the published 1.028 GB at 8 bit
    assert budget(0).memory == budget(0).router == budget(0).memory_norms == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_full_multi_head_attention_and_keep_overrides(preset):
    config = TideConfig.from_preset(preset, num_memory_blocks=2, vocab_size=77)
    assert config.vocab_size == 77
    assert config.num_key_value_heads == config.num_attention_heads


def test_an_unknown_preset_is_refused_with_the_list():
    with pytest.raises(ValueError, match="no preset '7b'; the presets are demo, 750m, 1b, 3b"):
        TideConfig.from_preset("7b", num_memory_blocks=8)


@pytest.mark.parametrize("wrong", [{"num_memory_blocks": -1}, {"z_loss_coefficient": -1e-6}])
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tiny_config(**wrong)


def test_the_papers_defaults():
    config = TideConfig()
    assert config.z_loss_coefficient == 1e-6  # Table 7
    assert config.router_null_bias is False  # equation 3.5 has no bias
