"""Starting from a LLaMA checkpoint: a trained model gets memory, and not a logit of it changes.

The paper trains every model from scratch; upcycling, and all of this file, is ours. `docs/upcycling.md` says why
memory starts silent in this way and not in another.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from tide.checkpoint import fingerprint, first_line, quiet_transformers
from tide.cli import UserError
from tide.config import TideConfig
from tide.memory import MemoryBanks, Router
from tide.model import TideForCausalLM

MODEL_TYPES = ("llama", TideConfig.model_type)
NOT_KEPT = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")  # of config.json


def upcycle(source: str | Path, num_memory_blocks: int, seed: int = 0, **config_overrides: Any) -> TideForCausalLM:
    """Loads a LLaMA checkpoint as a TIDE model whose memory is silent: its logits are the checkpoint's, bit for bit.

    Memory is silent because the gain of every bank's RMSNorm (equation 3.3) starts at zero: M_k(v) = 0, so the
    injection of equation 3.6 is m = 0, and h + 0 = h exactly. The rows E_k[v] are drawn from a normal distribution
    (`initializer_range`), the routers as transformers draws a linear layer. The configuration is the checkpoint's.

    Args:
        source: a folder or a name on the hub, of a LLaMA checkpoint in any dtype, or of a TIDE checkpoint. A TIDE
            checkpoint with K = 0 gets its memory here; one with the same K is loaded as it is, memory and all.
        num_memory_blocks: K; 0 makes the Base model.
        seed: of rows and routers.
        **config_overrides: fields of `TideConfig` that LLaMA does not have, such as `z_loss_coefficient`.

    Returns:
        The model in float32 on the CPU, in evaluation mode.

    Raises:
        UserError: one sentence, when there is no such checkpoint, when it is of another architecture, quantised,
            damaged or incomplete, or when it is a TIDE checkpoint whose K is neither 0 nor `num_memory_blocks`.
    """
    settings = read_settings(source)
    is_new = settings.get("num_memory_blocks", 0) != num_memory_blocks
    config = make_config(source, settings, num_memory_blocks, config_overrides)
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            loaded: Any = TideForCausalLM.from_pretrained(
                source, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:  # a damaged file raises whatever the library that reads it raises
        raise UserError(f"{source} cannot be loaded ({first_line(error)}); copy the checkpoint anew.") from error
    model, info = loaded
    check_complete(source, info, added={name for name, _ in memory_parameters(model)} if is_new else set())
    model.config.name_or_path = ""  # a path of this computer is no setting of a run
    if is_new:
        torch.nn.init.zeros_(model.model.memory.norm.weight)
    return model


def source_config(source: str | Path, num_memory_blocks: int, **overrides: Any) -> TideConfig:
    """The configuration of the model that `upcycle` makes, without reading a weight.

    Args:
        source: as `upcycle`.
        num_memory_blocks: K.
        **overrides: fields of `TideConfig`.

    Raises:
        UserError: as `upcycle`, in all that does not depend on the weights.
    """
    return make_config(source, read_settings(source), num_memory_blocks, overrides)


def source_name(source: str | Path) -> str:
    """Names a source's weights where a run records what it started from: same name, same weights.

    Args:
        source: as `upcycle`.

    Returns:
        The fingerprint of a folder, wherever it lies (`tide.checkpoint.fingerprint`); a name on the hub as it is.

    Raises:
        UserError: when the folder holds no weights as safetensors.
    """
    return fingerprint(source) if Path(source).is_dir() else str(source)


def read_settings(source: str | Path) -> dict[str, Any]:
    """The fields of a source's config.json that are to be kept.

    Raises:
        UserError: when there is no config.json, or it is not that of an unquantised LLaMA or TIDE checkpoint.
    """
    file = Path(source) / "config.json"
    if not file.is_file() and (file.parent.is_dir() or not is_hub_name(source)):
        what = "holds no config.json" if file.parent.is_dir() else "does not exist"
        raise UserError(f"The checkpoint folder {source} {what}; give a LLaMA or TIDE checkpoint.")
    try:
        with quiet_transformers():
            settings, _ = PreTrainedConfig.get_config_dict(source)
        model_type = settings.get("model_type")
    except Exception as error:  # a damaged file, the hub's refusal, no network
        raise UserError(
            f"The config.json of {source} cannot be read ({first_line(error)}); give a LLaMA or TIDE checkpoint."
        ) from error
    if model_type not in MODEL_TYPES:
        raise UserError(f"{source} is a checkpoint of model type {model_type!r}; only LLaMA and TIDE can be upcycled.")
    if "quantization_config" in settings:
        raise UserError(f"{source} holds quantised weights; give the checkpoint that they were made from.")
    return {name: value for name, value in settings.items() if name not in NOT_KEPT}


def make_config(
    source: str | Path, settings: dict[str, Any], num_memory_blocks: int, overrides: dict[str, Any]
) -> TideConfig:
    """The configuration out of a source's settings; arguments and errors as `source_config`."""
    banks = settings.get("num_memory_blocks", 0)
    if banks not in (0, num_memory_blocks):
        raise UserError(
            f"{source} has {banks} memory banks already, not {num_memory_blocks}; ask for {banks}, or start from a "
            "checkpoint without memory."
        )
    try:
        with quiet_transformers():
            return TideConfig(**{**settings, "num_memory_blocks": num_memory_blocks, **overrides})
    except Exception as error:  # of the configuration's validation, which has types of its own
        raise UserError(f"The config.json of {source} is not valid ({first_line(error)}); copy it anew.") from error


def is_hub_name(source: str | Path) -> bool:
    """Whether a source that is no folder could be a name on the hub, rather than a path."""
    try:
        validate_repo_id(str(source))
    except HFValidationError:
        return False
    return isinstance(source, str)


def check_complete(source: str | Path, info: dict[str, Any], added: set[str]) -> None:
    """Checks that the files held every weight of the configuration, and none besides.

    Args:
        source: named in the error.
        info: what `from_pretrained` says of the loading.
        added: names of the parameters that the checkpoint is not expected to hold.

    Raises:
        UserError: when they did not.
    """
    for names, what in (
        (set(info["missing_keys"]) - added, "lacks"),
        (set(info["unexpected_keys"]), "has, against its config.json,"),
        ({name for name, *_ in info["mismatched_keys"]}, "has in another shape than its config.json says"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"The checkpoint {source} {what} the weights {min(names)}{more}; copy it anew.")


def memory_parameters(model: TideForCausalLM) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters of what TIDE adds to LLaMA: tables, their norms' gains, routers and null biases."""
    return [
        (f"{prefix}.{name}", parameter)
        for prefix, module in model.named_modules()
        if isinstance(module, (MemoryBanks, Router))
        for name, parameter in module.named_parameters()
    ]


def freeze_backbone(model: TideForCausalLM) -> None:
    """Leaves only memory tables, bank norm gains, routers and null biases to train.

    Raises:
        UserError: for a model without memory, of which nothing would be left.
    """
    trained = memory_parameters(model)
    if not trained:
        raise UserError("A frozen backbone without memory leaves nothing to train; ask for at least one memory bank.")
    model.requires_grad_(False)
    for _, parameter in trained:
        parameter.requires_grad_(True)


def source_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer that lies with a checkpoint.

    Args:
        source: as `upcycle`.

    Raises:
        UserError: when there is none that transformers can read.
    """
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the tokenizers library raises bare `Exception` for a damaged file
        raise UserError(
            f"{source} holds no tokenizer that transformers can read; put the model's there, or give --tokenizer."
        ) from error
    return tokenizer
