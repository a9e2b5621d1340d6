"""The held-out text as token ids, in windows of the length that the model was trained on."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tide.cli import UserError
from tide.training.corpus import read_documents
from tide.training.data import encode_documents


def check_text_files(files: Sequence[Path], option: str) -> None:
    """Checks that every file can be read.

    Raises:
        UserError: one sentence that names the first file that is missing or no file.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"There is no text file {file}; give {option} UTF-8 text files.")


def describe_text(files: Sequence[Path]) -> dict[str, Any]:
    """Names and sizes of text files, and a fingerprint of all that is in them, for the manifest."""
    digest, entries = hashlib.sha256(), []
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        digest.update(content.digest())
        entries.append({"name": file.name, "bytes": file.stat().st_size})
    return {"files": entries, "fingerprint": digest.hexdigest()[:32]}


def encode_files(files: Sequence[Path], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """The token stream of some files, as in training: documents one after the other, each behind its document mark.

    Returns:
        [N] int32.

    Raises:
        UserError: when a file is not UTF-8, or all of them together are empty.
    """
    parts = [ids.astype(np.int32) for file in files for ids in encode_documents(read_documents(file), tokenizer)]
    if not parts:
        raise UserError(f"There is no text in {', '.join(map(str, files))}; give --text files that hold some.")
    return np.concatenate(parts)


def windows(tokens: np.ndarray, length: int, batch_size: int) -> Iterator[np.ndarray]:
    """Cuts a token stream into windows that follow one another; no token is left out.

    Args:
        tokens: [N].
        length: tokens a window; the last window is shorter and a batch of its own.
        batch_size: windows a batch.

    Yields:
        [B, length] int64; last, where N is no multiple of `length`, [1, the rest].
    """
    whole = len(tokens) // length
    rows = tokens[: whole * length].reshape(whole, length)
    for start in range(0, whole, batch_size):
        yield rows[start : start + batch_size].astype(np.int64)
    if len(tokens) > whole * length:
        yield tokens[None, whole * length :].astype(np.int64)
