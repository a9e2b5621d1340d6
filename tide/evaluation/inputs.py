"""Which checkpoints and texts an evaluation is about, checked before anything long runs."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tide.checkpoint import check_checkpoint, first_line
from tide.cli import UserError
from tide.config import TideConfig
from tide.evaluation.compare import ALL_TEXTS


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder under the name that the tables call it by."""

    name: str
    path: Path
    config: TideConfig

    @property
    def label(self) -> str:
        """Name and number of banks, for people."""
        return f"{self.name} (K={self.config.num_memory_blocks})"


def find_checkpoints(paths: Sequence[Path], base: Path | None) -> list[Checkpoint]:
    """Checks that the checkpoints can be compared. A folder that is given twice is taken once.

    Args:
        paths: folders of the models.
        base: folder of the model to compare them with.

    Returns:
        The base first, where there is one, then the models as given.

    Raises:
        UserError: when a folder is no checkpoint, or two of them have different tokenizers or vocabularies.
    """
    given = ([] if base is None else [base]) + list(paths)
    unique = list({os.path.realpath(path): path for path in reversed(given)}.values())[::-1]
    found = [Checkpoint(name, path, _config(path)) for name, path in zip(unique_names(unique), unique, strict=True)]
    first = found[0]
    for other in found[1:]:
        if other.config.vocab_size != first.config.vocab_size or _tokenizer(other.path) != _tokenizer(first.path):
            raise UserError(
                f"{first.path} and {other.path} have different tokenizers or vocabularies, so their losses do not "
                "compare; give models that were trained with one tokenizer."
            )
    return found


def _config(path: Path) -> TideConfig:
    check_checkpoint(path)
    try:
        return TideConfig.from_pretrained(path)
    except Exception as error:  # whatever transformers' validation raises
        raise UserError(
            f"{path / 'config.json'} cannot be used ({first_line(error)}); copy or train it anew."
        ) from error


def _tokenizer(path: Path) -> str:
    """All that determines which ids a text becomes."""
    try:
        return Tokenizer.from_file(str(path / "tokenizer.json")).to_str()
    except Exception as error:  # the tokenizers library raises bare `Exception` for a damaged file
        raise UserError(f"{path / 'tokenizer.json'} is damaged ({first_line(error)}); copy it anew.") from error


def window_length(checkpoints: Sequence[Checkpoint], wanted: int | None) -> int:
    """Tokens a window: as asked for, else what the shortest of the models takes.

    Raises:
        UserError: when a model takes fewer than asked for.
    """
    shortest = min(checkpoints, key=lambda c: c.config.max_position_embeddings)
    longest = shortest.config.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise UserError(f"--length {wanted} is more than the {longest} tokens that {shortest.path} takes.")
    return wanted or longest


def find_texts(paths: Sequence[Path]) -> dict[str, Path]:
    """The files to read, by name. A folder stands for its heldout_*.txt, or for all its *.txt if none is so named.

    Raises:
        UserError: when a file does not exist or a folder holds no text.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("heldout_*.txt")) or sorted(path.glob("*.txt"))
            if not inside:
                raise UserError(
                    f"--text {path} holds no .txt file; put UTF-8 text there, a blank line between documents."
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"--text {path}: there is no such file or folder; give UTF-8 text.")
    files = list({os.path.realpath(file): file for file in files}.values())
    return dict(zip(unique_names(files), files, strict=True))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """What to call each path: its last part, or all of it where that would not tell it from the others."""
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    clear = [names.count(name) == 1 and name != ALL_TEXTS for name in names]
    return [name if is_clear else str(path) for name, path, is_clear in zip(names, paths, clear, strict=True)]


def prepare_folder(folder: Path) -> None:
    """Makes the folder of the results and writes a file there to see that it can be done.

    Raises:
        UserError: when it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror}); choose another folder.") from error
