"""Stage `neighbors`: the nearest tokens of every token, in the input embedding and each bank (table 6, figure 13)."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from tqdm import tqdm

from precompute.artifacts import OVERLAP_K
from precompute.store import Tables
from tide.cli import UserError
from tide.memory import MemoryBanks
from tide.model import TideForCausalLM

STORED_K = 50
QUERY_BATCH = 1024  # tokens a search: the unit of progress
LOOKUP_BATCH = 4096  # tokens whose K bank vectors are made at a time


def load_faiss():
    """FAISS, which is installed with one of two extras.

    Raises:
        UserError: when it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "The stage neighbors needs FAISS, which is not installed; run `pip install 'tide-explorer[cpu]'`."
        ) from error
    return faiss


@torch.no_grad()
def tables(model: TideForCausalLM) -> Iterator[np.ndarray]:
    """The input embedding's rows, then the vectors M_k(v) of bank 0..K-1 (after RMSNorm and gain), one at a time.

    Yields:
        [V, d] float32, K + 1 times.
    """
    yield cast(torch.nn.Embedding, model.get_input_embeddings()).weight.float().cpu().numpy()
    vocab_size, memory = model.config.vocab_size, cast(MemoryBanks, model.model.memory)
    for bank in range(model.config.num_memory_blocks):
        out = np.empty((vocab_size, model.config.hidden_size), dtype=np.float32)
        for start in range(0, vocab_size, LOOKUP_BATCH):
            ids = torch.arange(start, min(start + LOOKUP_BATCH, vocab_size), device=model.device)
            out[start : start + len(ids)] = memory(ids)[:, bank].float().cpu().numpy()
        yield out


def nearest(
    vectors: np.ndarray, k: int, bar: tqdm | None = None, use_gpu: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest other rows of every row by cosine, exact (FAISS, inner product of normalised vectors).

    Args:
        vectors: [V, d] float32. A row of zeros has cosine 0 with every row.
        k: at most V - 1.
        bar: is moved on by one a row.
        use_gpu: search on the GPU where FAISS was built for it.

    Returns:
        ids [V, k] int32 and cosines [V, k] float32, the nearest first, equal cosines by id; the row itself left out.
    """
    faiss = load_faiss()
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
    index = faiss.IndexFlatIP(unit.shape[1])
    if use_gpu and getattr(faiss, "get_num_gpus", int)():
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
    index.add(unit)

    ids = np.empty((len(unit), k), dtype=np.int32)
    cosines = np.empty((len(unit), k), dtype=np.float32)
    for start in range(0, len(unit), QUERY_BATCH):
        rows = slice(start, start + QUERY_BATCH)
        found_cosines, found_ids = index.search(unit[rows], k + 1)
        ids[rows], cosines[rows] = drop_self(found_ids, found_cosines, np.arange(len(unit))[rows])
        if bar is not None:
            bar.update(len(found_ids))
    return ids, cosines


def drop_self(ids: np.ndarray, cosines: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Takes the row itself out of its search result.

    A row with exact duplicates need not come first in its own result, nor be in it at all: then the last one goes.

    Args:
        ids: [B, k+1].
        cosines: [B, k+1].
        own: [B], the id of each row.

    Returns:
        ids [B, k] and cosines [B, k], ordered by cosine, equal ones by id.
    """
    is_self = ids == own[:, None]
    is_self[~is_self.any(axis=1), -1] = True
    ids, cosines = (x[~is_self].reshape(len(x), -1) for x in (ids, cosines))
    order = np.lexsort((ids, -cosines), axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(cosines, order, axis=1)


def jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Jaccard overlap of two sets a row.

    Args:
        a: [V, k] ids, distinct in a row.
        b: [V, k] likewise.

    Returns:
        [V] float32: size of the intersection over size of the union.
    """
    common = sum((a[:, [i]] == b).any(axis=1).astype(np.int64) for i in range(a.shape[1]))
    return (common / (a.shape[1] + b.shape[1] - common)).astype(np.float32)


def neighbor_tables(model: TideForCausalLM, k: int = STORED_K, show_progress: bool = True) -> Tables:
    """Neighbours of every token id in every table, and their overlap with those in the input embedding.

    Args:
        model: a TIDE model; one of K = 0 has the input embedding only.
        k: neighbours to store, fewer where V is smaller.
        show_progress: draw a progress bar.

    Returns:
        `neighbors`: ids [K+1, V, k] int32 and cosines [K+1, V, k] float32, the input embedding first, then bank
        0..K-1; overlap [V, K] float32, Jaccard overlap of the 10 nearest in each bank with the 10 nearest in the
        input embedding (figure 13).

    Raises:
        UserError: when FAISS is not installed.
    """
    vocab_size, num_banks = model.config.vocab_size, model.config.num_memory_blocks
    k = min(k, vocab_size - 1)
    ids = np.empty((num_banks + 1, vocab_size, k), dtype=np.int32)
    cosines = np.empty((num_banks + 1, vocab_size, k), dtype=np.float32)
    overlap = np.empty((vocab_size, num_banks), dtype=np.float32)
    on_gpu = model.device.type == "cuda"
    total = (num_banks + 1) * vocab_size
    with tqdm(total=total, desc="neighbors", unit=" rows", unit_scale=True, disable=not show_progress) as bar:
        for row, vectors in enumerate(tables(model)):
            ids[row], cosines[row] = nearest(vectors, k, bar, on_gpu)
            if row:
                overlap[:, row - 1] = jaccard(ids[0, :, :OVERLAP_K], ids[row, :, :OVERLAP_K])
    return {"neighbors": {"ids": ids, "cosines": cosines, "overlap": overlap}}
