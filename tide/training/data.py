"""Training text as token ids: tokenised once into a memory-mapped file, then cut into shuffled windows."""

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.cli import UserError
from tide.training.corpus import read_documents

CACHE_FOLDER = ".tokens"
ENCODE_BATCH = 2048  # documents handed to the tokenizer at a time


def training_files(folder: Path) -> list[Path]:
    """The text files of a data folder: `train_*.txt`, or every `*.txt` that is not named `heldout_*`.

    Raises:
        UserError: when the folder does not exist or holds no such file.
    """
    if not folder.is_dir():
        raise UserError(f"--data {folder} is no folder; `python -m tide.training.corpus --out {folder}` makes one.")
    files = sorted(folder.glob("train_*.txt"))
    files = files or sorted(f for f in folder.glob("*.txt") if not f.name.startswith("heldout_"))
    if not files:
        raise UserError(f"--data {folder} holds no .txt file; put UTF-8 text there, a blank line between documents.")
    return files


def fingerprint(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> str:
    """Names the token file: it depends on the tokenizer and on every byte of the text."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for file in files:
        with file.open("rb") as text:
            digest.update(hashlib.file_digest(text, "sha256").digest())
    return digest.hexdigest()[:16]


def encode_documents(documents: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    """Token ids of each document, the tokenizer's own document mark (BOS) in front; then EOS where that differs."""
    tail = [] if tokenizer.eos_token_id in (None, tokenizer.bos_token_id) else [tokenizer.eos_token_id]
    while batch := list(islice(documents, ENCODE_BATCH)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch):
            yield np.array(encoding.ids + tail, dtype=np.int64)


def tokenize(folder: Path, tokenizer: PreTrainedTokenizerFast, show_progress: bool = True) -> Path:
    """Tokenises the training text of `folder` once.

    Args:
        folder: data folder, see `training_files`.
        tokenizer: a fast tokenizer.
        show_progress: draw a progress bar, where stderr is a terminal.

    Returns:
        The file of token ids, little-endian uint16 where V allows it, else uint32; it lies in a hidden folder
        beside the text and is found again by its fingerprint.

    Raises:
        UserError: when a file is not UTF-8 text, or all of them together hold no text.
    """
    files = training_files(folder)
    target = folder / CACHE_FOLDER / f"{fingerprint(files, tokenizer)}.{token_dtype(len(tokenizer)).name}"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    total, hidden = 0, None if show_progress else True  # None: tqdm looks whether stderr is a terminal
    try:
        with (
            temporary.open("wb") as out,
            tqdm(desc="tokenise", unit=" tokens", unit_scale=True, leave=False, disable=hidden) as bar,
        ):
            for file in files:
                for ids in encode_documents(read_documents(file), tokenizer):
                    out.write(ids.astype(token_dtype(len(tokenizer))).tobytes())
                    total += len(ids)
                    bar.update(len(ids))
        if not total:
            raise UserError(f"--data {folder} holds no text: every file is empty.")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class WindowDataset:
    """Windows of `sequence_length` tokens in a shuffled order that depends on the seed alone.

    Batch number s is a function of (file, seed, s): two models trained with the same seed see the same batches,
    and a resumed run goes on at the exact batch. Every epoch has its own order.
    """

    def __init__(self, token_file: Path, sequence_length: int, batch_size: int, seed: int):
        self.tokens = np.memmap(token_file, dtype=np.dtype(token_file.suffix[1:]), mode="r")
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self.num_windows = len(self.tokens) // sequence_length
        if self.num_windows < batch_size:
            raise UserError(
                f"The text has {len(self.tokens):,} tokens, fewer than one batch of {batch_size} sequences of "
                f"{sequence_length}; give more text to --data or choose a smaller --batch-size."
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> torch.Tensor:
        """Token ids [batch_size, sequence_length] int64 of optimiser step `step`, 0-based."""
        per_epoch = self.num_windows // self.batch_size
        epoch, place = divmod(step, per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_windows))
        windows = self._order[1][place * self.batch_size : (place + 1) * self.batch_size]
        length = self.sequence_length
        rows = np.stack([self.tokens[w * length : (w + 1) * length] for w in windows])
        return torch.from_numpy(rows.astype(np.int64))

    def counts(self, steps: int, vocab_size: int) -> np.ndarray:
        """How often each token id occurs in the first `steps` batches: [V] int64."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for step in range(steps):
            total += np.bincount(self.batch(step).flatten(), minlength=vocab_size)
        return total
