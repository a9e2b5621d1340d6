"""What a checkpoint folder says about itself, read without loading a weight."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tide.cli import UserError
from tide.config import ParameterBudget, TideConfig
from tide.training.recipe import Recipe

PARTS = ("backbone", "embeddings", "memory", "router")


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint's configuration and sizes.

    Attributes:
        config: of the model.
        parts: columns part, parameters, bytes (as stored on disk); the gains of the memory's norms count as memory.
        dtypes: of the stored tensors, for example "F32".
        trained_tokens: tokens that the training run saw, or None where the checkpoint does not say.
    """

    config: TideConfig
    parts: pd.DataFrame
    dtypes: tuple[str, ...]
    trained_tokens: int | None

    @classmethod
    def read(cls, folder: Path) -> "CheckpointFacts":
        """Reads config.json, the headers of the safetensors files, and recipe.json where there is one.

        Raises:
            UserError: when the folder or one of the first two is missing or broken.
        """
        try:
            config = TideConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
            stored, dtypes = _stored_bytes(folder)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"The checkpoint {folder} cannot be read: {error}") from error
        budget = ParameterBudget.of(config)
        memory = budget.memory + budget.memory_norms
        parameters = (budget.backbone, budget.embeddings, memory, budget.router)
        rows = {"part": PARTS, "parameters": parameters, "bytes": [stored[part] for part in PARTS]}
        return cls(config, pd.DataFrame(rows), dtypes, _trained_tokens(folder / "recipe.json"))


def _stored_bytes(folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Bytes of each part on disk and the dtypes, from the headers alone."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"The checkpoint {folder} has no model.safetensors.")
    stored, dtypes = dict.fromkeys(PARTS, 0), set()
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                stored[_part(name)] += end - start
                dtypes.add(entry["dtype"])
    return stored, tuple(sorted(dtypes))


def _part(tensor: str) -> str:
    if ".router." in tensor:
        return "router"
    if ".memory." in tensor:
        return "memory"
    return "embeddings" if "embed_tokens" in tensor or "lm_head" in tensor else "backbone"


def _trained_tokens(recipe_file: Path) -> int | None:
    try:
        saved = json.loads(recipe_file.read_text(encoding="utf-8"))
        recipe = Recipe(**saved["recipe"])
        return saved.get("steps_done", recipe.steps) * recipe.tokens_per_step
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None  # a checkpoint of other origin
