"""Training text as token ids: tokenised once into memory-mapped shards, then cut into shuffled windows.

A cache folder holds `shard-00000.uint16` (or `.uint32`; little-endian token ids, nothing else) and so on,
`counts.safetensors`, and `index.json`, which is written last. Until then `progress.safetensors` says how far the
whole shards reach, so that a tokenisation that was killed goes on there and ends with the same bytes. Files appear
under their names only when they are whole, and two processes that tokenise the same text write the same bytes.
"""

import errno
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.cli import UserError
from tide.files import replacing
from tide.training.sources import CACHE_FOLDER, DataSource

__all__ = ["CACHE_FOLDER", "TokenShards", "WindowDataset", "encode_documents", "token_dtype", "tokenize"]

INDEX_FILE, COUNTS_FILE, PROGRESS_FILE = "index.json", "counts.safetensors", "progress.safetensors"
FORMAT_VERSION = 1
ENCODE_BATCH = 2048  # documents handed to the tokenizer at a time
SHARD_TOKENS = 2**26  # 128 MiB of uint16, 256 MiB of uint32; also held in memory while a shard is filled
COUNT_BLOCK = 2**20  # tokens counted at a time: numpy widens them to int64
MAX_OPEN_SHARDS = 256  # a memory map holds a file descriptor, of which processes often have 1024


def encode_documents(documents: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    """Token ids of each document, the tokenizer's own document mark (BOS) in front; then EOS where that differs."""
    tail = [] if tokenizer.eos_token_id in (None, tokenizer.bos_token_id) else [tokenizer.eos_token_id]
    while batch := list(islice(documents, ENCODE_BATCH)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch):
            yield np.array(encoding.ids + tail, dtype=np.int64)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of little-endian uint16 and uint32 that holds every token id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def tokenize(
    source: DataSource,
    tokenizer: PreTrainedTokenizerFast,
    cache: Path | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    show_progress: bool = True,
) -> "TokenShards":
    """Tokenises the documents of a source once: found again when nothing has changed, and gone on with when killed.

    Args:
        source: the documents.
        tokenizer: a fast tokenizer.
        cache: folder that holds a folder for each text and tokenizer; by default beside the text, or in HF_HOME.
        max_tokens: cut the stream there; None takes all of it.
        shard_tokens: tokens a file.
        show_progress: draw a progress bar, where stderr is a terminal.

    Returns:
        The token stream: documents one after another, each as `encode_documents` gives it.

    Raises:
        UserError: when the source cannot be read or holds no text, the tokenizer is not a fast one, the cache
            cannot be written, or the disk is full; whole shards stay in the last two cases.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"The tokenizer ({type(tokenizer).__name__}) has no tokenizer.json; convert it to a fast one.")
    folder = (cache or source.default_cache()) / cache_key(source, tokenizer, max_tokens, shard_tokens)
    if (folder / INDEX_FILE).exists():
        try:
            return TokenShards.open(folder)
        except UserError:  # damaged; the text is there to make it anew
            with writing_in(folder):
                (folder / INDEX_FILE).unlink(missing_ok=True)
    hidden = None if show_progress else True  # None: tqdm looks whether stderr is a terminal
    try:
        writer = ShardWriter(folder, source.title, 1 + max(tokenizer.get_vocab().values()), shard_tokens)
        with tqdm(
            desc="tokenise",
            unit=" tokens",
            unit_scale=True,
            leave=False,
            disable=hidden,
            initial=writer.num_tokens,
            total=max_tokens,
        ) as bar:
            for ids in encode_documents(source.documents(skip=writer.documents), tokenizer):
                before = writer.num_tokens
                writer.add(ids if max_tokens is None else ids[: writer.offset + max_tokens - before])
                bar.update(writer.num_tokens - before)
                if writer.num_tokens == max_tokens:
                    break
        if not writer.num_tokens:
            raise UserError(f"--data {source.data} holds no text: all that could be read is empty.")
        writer.finish()
    finally:
        with suppress(OSError):  # goes only where it is empty
            folder.rmdir()
    return TokenShards.open(folder)


def cache_key(source: DataSource, tokenizer: PreTrainedTokenizerFast, max_tokens: int | None, shard_tokens: int) -> str:
    """Names the cache folder by all that its bytes depend on."""
    parts = [FORMAT_VERSION, source.identity(), tokenizer.backend_tokenizer.to_str()]
    parts += [tokenizer.bos_token_id, tokenizer.eos_token_id, max_tokens, shard_tokens]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class ShardWriter:
    """Cuts documents into shards of equal length and keeps, with every whole shard, the place to go on from.

    Attributes:
        documents: how many are written to their end.
        offset: tokens of the next one that are written already, in the shard that it began in.
    """

    def __init__(self, folder: Path, title: str, vocab_size: int, shard_tokens: int):
        self.folder, self.title, self.vocab_size = folder, title, vocab_size
        self.buffer, self.filled = np.empty(shard_tokens, dtype=token_dtype(vocab_size)), 0
        self.documents, self.offset = 0, 0
        self.shards: list[dict] = []
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        with writing_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._take_up()

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those included that fill no shard yet."""
        return sum(shard["tokens"] for shard in self.shards) + self.filled

    def add(self, ids: np.ndarray) -> None:
        """Writes a document, or what was not written of it before an interruption."""
        while self.offset < len(ids):
            part = ids[self.offset : self.offset + len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            self.offset += len(part)
            if self.filled == len(self.buffer):
                self._write_shard()
                self._write_progress()
        self.documents, self.offset = self.documents + 1, 0

    def finish(self) -> None:
        """Writes the last shard, which may be shorter, the counts and the index."""
        if self.filled:
            self._write_shard()
        write_file(self.folder / COUNTS_FILE, save({"counts": self.counts}))
        index = {
            "version": FORMAT_VERSION,
            "source": self.title,
            "dtype": self.buffer.dtype.name,
            "vocab_size": self.vocab_size,
            "shards": self.shards,
        }
        write_file(self.folder / INDEX_FILE, (json.dumps(index, indent=1) + "\n").encode())
        with writing_in(self.folder):
            (self.folder / PROGRESS_FILE).unlink(missing_ok=True)

    def _write_shard(self) -> None:
        tokens = self.buffer[: self.filled]
        for start in range(0, len(tokens), COUNT_BLOCK):
            self.counts += np.bincount(tokens[start : start + COUNT_BLOCK], minlength=self.vocab_size)
        write_file(self.folder / shard_name(len(self.shards), tokens.dtype), tokens.data)
        self.shards.append({"tokens": len(tokens), "sha256": hashlib.sha256(tokens.data).hexdigest()})
        self.filled = 0

    def _write_progress(self) -> None:
        state = {"documents": self.documents, "offset": self.offset, "shards": self.shards}
        write_file(self.folder / PROGRESS_FILE, save({"counts": self.counts}, {"state": json.dumps(state)}))

    def _take_up(self) -> None:
        """Goes on behind the shards that an earlier process finished, if they are all there."""
        try:
            with safe_open(self.folder / PROGRESS_FILE, framework="np") as stored:
                state, counts = json.loads(stored.metadata()["state"]), stored.get_tensor("counts")
            if not missing_shards(self.folder, state["shards"], self.buffer.dtype):
                self.documents, self.offset, self.shards = state["documents"], state["offset"], state["shards"]
                self.counts = counts
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
            return


class TokenShards:
    """A token stream in a cache folder, memory-mapped file by file when first read.

    Attributes:
        folder: the cache folder.
        num_tokens: length of the stream.
        dtype: of the stored ids, little-endian uint16 or uint32.
        vocab_size: V, one more than the tokenizer's largest id.
        counts: [V] int64, how often each id occurs in the stream.
        sha256: names the stream: of the same documents it is the same, wherever they lie and however they were cut
            into files (for the same `shard_tokens`).
    """

    def __init__(self, folder: Path, index: dict[str, Any], counts: np.ndarray):
        self.folder, self.counts = folder, counts
        self.dtype, self.vocab_size = token_dtype(index["vocab_size"]), index["vocab_size"]
        self._starts = [0, *accumulate(shard["tokens"] for shard in index["shards"])]
        self.num_tokens: int = self._starts[-1]
        listing = "".join(f"{shard['tokens']} {shard['sha256']}\n" for shard in index["shards"])
        self.sha256 = hashlib.sha256(listing.encode()).hexdigest()
        self._maps: dict[int, np.memmap] = {}

    @classmethod
    def open(cls, folder: Path) -> "TokenShards":
        """Opens a finished cache folder; reads index and counts, and of the shards only their sizes.

        Raises:
            UserError: when a file is missing or damaged.
        """
        damage = f"The token cache {folder} is damaged"
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            if index["version"] != FORMAT_VERSION:
                raise UserError(f"The token cache {folder} is of another version of this program; delete it.")
            with safe_open(folder / COUNTS_FILE, framework="np") as stored:
                counts = stored.get_tensor("counts")
            shards = cls(folder, index, counts)
            missing = missing_shards(folder, index["shards"], shards.dtype)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{damage} ({type(error).__name__}); delete it to tokenise anew.") from error
        if missing:
            raise UserError(f"{damage}: {missing[0]} is missing or cut short; delete it to tokenise anew.")
        return shards

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copies the ids `start` to `stop` of the stream, across files: [stop - start], of `dtype`.

        Raises:
            IndexError: when the stream does not reach that far.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        out = np.empty(stop - start, dtype=self.dtype)
        place = start
        while place < stop:
            shard = bisect_right(self._starts, place) - 1
            first = self._starts[shard]
            end = min(stop, self._starts[shard + 1])
            out[place - start : end - start] = self._map(shard)[place - first : end - first]
            place = end
        return out

    def _map(self, shard: int) -> np.memmap:
        if shard not in self._maps:
            if len(self._maps) >= MAX_OPEN_SHARDS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[shard] = np.memmap(self.folder / shard_name(shard, self.dtype), dtype=self.dtype, mode="r")
        return self._maps[shard]


class WindowDataset:
    """Windows of `sequence_length` tokens in a shuffled order that depends on the seed alone.

    Batch number s is a function of (tokens, seed, s): two models trained with the same seed see the same batches,
    and a resumed run goes on at the exact batch. Every epoch has its own order,
    `np.random.default_rng([seed, epoch]).permutation(num_windows)`; windows that fill no last batch of an epoch
    are left out of it.

    Raises:
        UserError: when there are fewer tokens than one batch has.
    """

    def __init__(self, tokens: TokenShards, sequence_length: int, batch_size: int, seed: int):
        self.tokens, self.sequence_length, self.batch_size, self.seed = tokens, sequence_length, batch_size, seed
        self.num_windows = tokens.num_tokens // sequence_length
        if self.num_windows < batch_size:
            raise UserError(
                f"The text has {tokens.num_tokens:,} tokens, fewer than one batch of {batch_size} sequences of "
                f"{sequence_length}; give more text to --data or choose a smaller --batch-size."
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """Token ids of optimiser step `step`, or one process's share of them.

        Args:
            step: 0-based.
            rank: of the process, below `world_size`.
            world_size: number of processes; each gets every `world_size`-th row of the batch, from row `rank` on.

        Returns:
            [batch_size / world_size, sequence_length] int64.

        Raises:
            UserError: when the batch does not divide evenly.
        """
        if self.batch_size % world_size:
            raise UserError(
                f"--batch-size {self.batch_size} is no multiple of the {world_size} processes; choose one that is."
            )
        epoch, place = divmod(step, self.num_windows // self.batch_size)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_windows))
        windows = self._order[1][place * self.batch_size : (place + 1) * self.batch_size][rank::world_size]
        length = self.sequence_length
        rows = np.stack([self.tokens.read(w * length, (w + 1) * length) for w in windows])
        return torch.from_numpy(rows.astype(np.int64))


def shard_name(number: int, dtype: np.dtype) -> str:
    """The file name of a shard, numbered from 0."""
    return f"shard-{number:05d}.{dtype.name}"


def missing_shards(folder: Path, shards: list[dict], dtype: np.dtype) -> list[str]:
    """The names of those shards that are not there in their full size."""
    missing = []
    for number, shard in enumerate(shards):
        file = folder / shard_name(number, dtype)
        if not file.is_file() or file.stat().st_size != shard["tokens"] * dtype.itemsize:
            missing.append(file.name)
    return missing


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes a file whole or not at all, under a temporary name that no other process uses.

    Raises:
        UserError: as `writing_in`.
    """
    with writing_in(path.parent), replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a network file system tells only now that it is full


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Tells an error of writing the token cache in one sentence.

    Raises:
        UserError: when the disk is full or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{folder}: the disk is full; free space or give --token-cache another place; "
                "what is tokenised so far is kept."
            ) from error
        raise UserError(
            f"The token cache {folder} cannot be written ({error.strerror}); give --token-cache another place."
        ) from error
