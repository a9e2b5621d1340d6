"""Loading a checkpoint folder, and telling one checkpoint from another.

A wrong folder ends in one sentence, never in a traceback. Only `load_checkpoint` loads torch: the reader of the
precomputed artifacts, which compares fingerprints, starts without it.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tide.cli import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from tide.model import TideForCausalLM

COUNTS_FILE = "token_counts.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NOT_WEIGHTS = frozenset({COUNTS_FILE, "optimizer.safetensors"})

FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format: a larger number is damage


def load_checkpoint(
    path: str | Path, device: str = "cpu", dtype: "torch.dtype | None" = None, memory: str = "resident"
) -> "tuple[TideForCausalLM, PreTrainedTokenizerFast]":
    """Loads a TIDE or Base checkpoint (`model_type` tide, any K) and its tokenizer, in evaluation mode.

    Args:
        path: a folder that `tide-train` or `save_pretrained` wrote.
        device: cpu, cuda or mps.
        dtype: of the weights; by default float32 on the CPU and bfloat16 on a GPU.
        memory: how the memory is stored, as `TideForCausalLM.from_pretrained` takes it.

    Raises:
        UserError: one sentence, when the folder or a file of it is missing, is no TIDE checkpoint, is truncated
            or damaged, or lacks weights, or when this computer has no such device.
    """
    path = Path(path)
    check_checkpoint(path)

    import torch
    from transformers import AutoTokenizer

    from tide.model import TideForCausalLM

    place = _device(device)
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
            loaded: Any = TideForCausalLM.from_pretrained(path, dtype=dtype, memory=memory, output_loading_info=True)
    except Exception as error:  # the tokenizers library raises bare `Exception` for a damaged file
        raise UserError(f"{path} cannot be loaded ({first_line(error)}); copy or train the checkpoint anew.") from error
    model, info = loaded
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has, against its config.json,")):
        if names := sorted(info[key]):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"The checkpoint {path} {what} the weights {names[0]}{more}; copy or train it anew.")
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"The tokenizer in {path} has {len(tokenizer):,} ids, the model only {model.config.vocab_size:,}; "
            "put the tokenizer there that the model was trained with."
        )
    return model.to(place).eval(), tokenizer


def check_checkpoint(path: Path) -> None:
    """Checks a checkpoint folder in all that can be said without loading the weights.

    Raises:
        UserError: as `load_checkpoint`.
    """
    if not path.is_dir():
        raise UserError(f"There is no checkpoint folder {path}; give a folder that tide-train saved.")
    if not (path / "config.json").is_file():
        kept = sorted(path.glob("step-*/config.json"))
        hint = "it is no checkpoint"
        if (path / "recipe.json").is_file():
            hint = "it is an unfinished run" + (f", which kept {kept[-1].parent}" if kept else "")
        raise UserError(f"{path} holds no config.json: {hint}; give a folder that tide-train saved.")
    model_type = read_config(path).get("model_type")
    if model_type != "tide":
        raise UserError(f"{path} is a checkpoint of model type {model_type!r}, not of a TIDE model; give one of those.")
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"{path} holds no tokenizer.json; copy the tokenizer that the model was trained with there.")
    for file in _listed_weight_files(path):
        if not file.is_file():
            raise UserError(f"{path} lacks its weights {file.name}; copy or train the checkpoint anew.")
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is truncated or damaged ({first_line(error)}); copy or train the checkpoint anew."
            ) from error


def _listed_weight_files(path: Path) -> list[Path]:
    """The files that `from_pretrained` will read: those of the shard index, or the one file."""
    index = path / INDEX_FILE
    if not index.is_file():
        return [path / "model.safetensors"]
    try:
        return sorted({path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is damaged; copy or train the checkpoint anew.") from error


def read_config(path: Path) -> dict:
    """The content of a checkpoint's config.json.

    Raises:
        UserError: when it is missing or no JSON object.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read; give a checkpoint folder that tide-train saved.") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: it is not JSON; copy or train the checkpoint anew.") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is damaged: it is no JSON object; copy or train the checkpoint anew.")
    return config


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"There is no device {name!r}; choose cpu, cuda or mps.") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False):
        raise UserError(f"This computer has no device {name!r} that torch can use; choose another --device.")
    return device


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar and no warnings while loading: what matters of them becomes a `UserError`."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160].rstrip(" .:")


def fingerprint(path: str | Path) -> str:
    """Names a checkpoint's weights and configuration without reading them whole.

    Of config.json its content (not the version of transformers that wrote it); of every weight file its size, its
    header and 64 evenly spaced blocks of 4 KiB: training changes weights everywhere, so any training changes it.
    The optimiser's moments and the token counts, which may lie beside the weights, are left out.

    Args:
        path: a checkpoint folder.

    Returns:
        32 hexadecimal digits.

    Raises:
        UserError: when the folder holds no readable config.json or no weights.
    """
    path = Path(path)
    config = {key: value for key, value in read_config(path).items() if key != "transformers_version"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files = sorted(f for f in path.glob("*.safetensors") if f.name not in _NOT_WEIGHTS)
    if not files:
        raise UserError(f"{path} holds no weights (*.safetensors); give a checkpoint folder that tide-train saved.")
    for file in files:
        digest.update(f"{file.name}:".encode())
        digest.update(file_fingerprint(file).encode())
    return digest.hexdigest()[:32]


def file_fingerprint(file: Path) -> str:
    """Names a file by its size, its first blocks (a safetensors header lies there) and 64 blocks of 4 KiB.

    A file of up to 256 KiB is read whole.

    Returns:
        32 hexadecimal digits.

    Raises:
        OSError: when the file cannot be read.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}:".encode())
    with file.open("rb") as stream:
        if file.suffix == ".safetensors":
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, MAX_HEADER_BYTES)))
        last = max(size - FINGERPRINT_BLOCK_BYTES, 0)
        for block in range(FINGERPRINT_BLOCKS):
            stream.seek(last * block // (FINGERPRINT_BLOCKS - 1))
            digest.update(stream.read(FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def token_counts(path: str | Path) -> tuple[np.ndarray, str] | None:
    """How often the model saw each token id in training, where the checkpoint says so.

    Returns:
        Counts [V] int64 and the name of the corpus that was counted; None where the folder holds no counts.

    Raises:
        UserError: when the file of counts is damaged.
    """
    file = Path(path) / COUNTS_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="np") as stored:
            return stored.get_tensor("counts").astype(np.int64), (stored.metadata() or {}).get(
                "corpus", "unnamed corpus"
            )
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({first_line(error)}); remove or replace it.") from error
