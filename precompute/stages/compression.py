"""Stage `compression`: the loss with the memory tables compressed (table 5, figure 12).

Table 5 stores the memory E_k in 8 and 4 bits; figure 12 replaces every bank by its rank-r SVD. What is compressed are
the raw rows, as they are stored; RMSNorm_k follows as usual. How numbers are quantised is ours, the paper does not say:
symmetrically around zero, each group of a row by its largest absolute value. The norm that follows takes the length of
a row away, so that the one scale of an 8-bit row has no part in the result.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from precompute.blocks import REPLICATES, SEED
from precompute.parts import Parts
from precompute.probe import BATCH_TOKENS, CellSums, check_names, difference_table, probe_windows
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.tables import CheckpointTables
from precompute.text import HeldOutText
from tide.config import TideConfig
from tide.evaluation.losses import token_losses
from tide.model import TideForCausalLM

UNCHANGED = "none"
BITS = {"int8": 8, "int4": 4}
GROUP = {"int8": None, "int4": 32}  # neighbours in a row that share a scale; None is the whole row
SCALE_BYTES = 2  # a bfloat16: no row is too small or too large for it
ROW_BYTES = 32  # a number of a tile while it is worked on: as stored, in float32 and float64, and changed
PERCENTS = tuple(range(0, 100, 10))  # of the ranks that figure 12 takes away
SVD = "svd"
TILE_ROWS = 4096  # of a table at once: 32 MiB in float32 at d 2048

Change = Callable[[int, torch.Tensor], torch.Tensor]
"""What becomes of rows [n, d] float32 of a bank."""

Advance = Callable[[int], Any]
"""Told that so many steps are done."""


def unchanged(bank: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows as they are: puts a changed memory back."""
    return rows


# --- Quantisation (table 5) --------------------------------------------------------------------------------------


def quantized(rows: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """Rows as they are read back from whole numbers of a few bits, each group of neighbours with a scale of its own.

    A number x becomes the nearest of -q..q times the scale, q = 2^(bits-1) - 1, the scale being the group's largest
    absolute value over q, in bfloat16.

    Args:
        rows: [n, d] float32.
        bits: of each number.
        group: numbers that share a scale, the last group of a row being shorter where they do not fill it; None is
            the whole row.

    Returns:
        [n, d] float32.
    """
    width = rows.shape[1]
    size = group or width
    groups = F.pad(rows, (0, -width % size)).unflatten(1, (-1, size))  # (n, groups, size)
    most = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(dim=-1, keepdim=True) / most).bfloat16().float()
    codes = (groups / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-most, most)
    return (codes * scale).flatten(1)[:, :width]


def quantized_bytes(numbers: int, width: int, bits: int, group: int | None) -> int:
    """Bytes of so many numbers in rows of a width, scales included."""
    scales = numbers // width * math.ceil(width / (group or width))
    return math.ceil(numbers * bits / 8) + scales * SCALE_BYTES


# --- Low rank (figure 12) ----------------------------------------------------------------------------------------


def rank(percent: int, width: int) -> int:
    """r = ceil((1 - p) d) of figure 12, p in percent."""
    return -(-(100 - percent) * width // 100)


def right_singular_vectors(
    tables: CheckpointTables, tile_rows: int, device: torch.device, advance: Advance = lambda steps: None
) -> torch.Tensor:
    """Right singular vectors of every E_k, by the eigenvectors of E_k^T E_k: no table is held whole.

    Args:
        tables: of the checkpoint.
        tile_rows: rows of a table at once.
        device: where to compute.
        advance: called after every bank.

    Returns:
        [K, d, d] float32 on the device; the columns of a bank are its vectors, that of the largest singular value
        first. Computed in float64.
    """
    place = device if device.type == "cuda" else torch.device("cpu")  # Apple's GPUs have no float64
    width = tables.hidden_size
    vectors = torch.empty(tables.num_banks, width, width, device=device)
    for bank in range(tables.num_banks):
        gram = torch.zeros(width, width, dtype=torch.float64, device=place)
        for tile in tables.tiles(bank, tile_rows, raw=True):
            rows = torch.from_numpy(tile).to(place, torch.float64)
            gram += rows.T @ rows
        vectors[bank] = torch.linalg.eigh(gram)[1].flip(1)  # ascending before
        advance(1)
    return vectors


def projection(vectors: torch.Tensor, kept: int) -> Change:
    """The best approximation of each table by so many ranks, E V_r V_r^T (Eckart-Young).

    Args:
        vectors: [K, d, d], as `right_singular_vectors`.
        kept: r.
    """
    return lambda bank, rows: rows @ vectors[bank, :, :kept] @ vectors[bank, :, :kept].T


def low_rank_bytes(vocab_size: int, num_banks: int, width: int, kept: int, number_bytes: int) -> int:
    """Bytes of K tables as two factors each, [V, r] and [r, d]; of few ranks less than the tables themselves."""
    return num_banks * kept * (vocab_size + width) * number_bytes


# --- The memory in another form ----------------------------------------------------------------------------------


def squared_length(rows: torch.Tensor) -> float:
    """Sum of squares, rows summed in float32 and one another in float64."""
    return float(rows.square().sum(dim=1).cpu().double().sum())


@torch.no_grad()
def change_memory(
    model: TideForCausalLM,
    tables: CheckpointTables,
    tile_rows: int,
    change: Change,
    advance: Advance = lambda steps: None,
) -> float:
    """Writes the checkpoint's memory into the model, changed.

    Args:
        model: of the same checkpoint; its memory is overwritten in place.
        tables: of the checkpoint.
        tile_rows: rows of a table at once.
        change: what becomes of the rows.
        advance: called after every bank.

    Returns:
        Relative error |E' - E| / |E| over all banks (Frobenius norms), before E' is rounded to the model's dtype.
    """
    assert model.model.memory is not None
    weight = model.model.memory.weight  # (V, K, d)
    error = size = 0.0
    for bank in range(tables.num_banks):
        start = 0
        for tile in tables.tiles(bank, tile_rows, raw=True):
            rows = torch.from_numpy(tile).to(weight.device)
            changed = change(bank, rows)
            weight[start : start + len(rows), bank] = changed.to(weight.dtype)
            error += squared_length(changed - rows)
            size += squared_length(rows)
            start += len(rows)
        advance(1)
    return math.sqrt(error / size) if size else 0.0


def changes_of(
    piece: str, tables: CheckpointTables, tile_rows: int, device: torch.device, advance: Advance
) -> list[Change]:
    """What becomes of the memory in each form of a piece of the stage."""
    if piece in BITS:
        return [lambda _, rows: quantized(rows, BITS[piece], GROUP[piece])]
    if piece == SVD:
        vectors = right_singular_vectors(tables, tile_rows, device, advance)
        return [projection(vectors, rank(percent, tables.hidden_size)) for percent in PERCENTS]
    return [unchanged]


def compressed_forms(config: TideConfig) -> pd.DataFrame:
    """All forms of the memory and what each takes, in the order in which their losses are stored.

    Args:
        config: of the checkpoint, with the dtype in which it is stored.

    Returns:
        Columns form ("none", "int8", "int4", "svd-0".."svd-90"), bits (of a number, scales not counted), percent and
        rank (of an SVD; -1 for others), bytes (of the whole memory, scales counted; of an SVD its two factors in the
        checkpoint's dtype).
    """
    vocab_size, num_banks, width = config.vocab_size, config.num_memory_blocks, config.hidden_size
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32  # torch's, where none is said
    numbers, number_bytes = vocab_size * num_banks * width, dtype.itemsize
    rows: list[tuple[str, int, int, int, int]] = [(UNCHANGED, 8 * number_bytes, -1, -1, numbers * number_bytes)]
    for form, bits in BITS.items():
        rows.append((form, bits, -1, -1, quantized_bytes(numbers, width, bits, GROUP[form])))
    for percent in PERCENTS:
        kept = rank(percent, width)
        size = low_rank_bytes(vocab_size, num_banks, width, kept, number_bytes)
        rows.append((f"{SVD}-{percent}", 8 * number_bytes, percent, kept, size))
    return pd.DataFrame(rows, columns=["form", "bits", "percent", "rank", "bytes"])


@contextlib.contextmanager
def restored(model: TideForCausalLM, tables: CheckpointTables, tile_rows: int) -> Iterator[None]:
    """Puts the memory back from the checkpoint's files when the block ends, however it ends."""
    try:
        yield
    finally:
        change_memory(model, tables, tile_rows, unchanged)


def probe_losses(model: TideForCausalLM, text: HeldOutText, windows: Sequence[int], advance: Advance) -> np.ndarray:
    """Losses of all predicted positions of some windows, one window after the other: [N] float32, nats."""
    parts = []
    for batch in text.batches(windows, BATCH_TOKENS):
        parts.append(token_losses(model, batch.input_ids, len(batch.windows)).ravel())
        advance(1)
    return np.concatenate(parts)


class Compression(Stage):
    """One piece the unchanged memory, one each way of quantising, and one all ranks.

    All ranks are one piece because they share the singular vectors, which take longer to find than one rank to measure
    where the tables are large. A run that is killed in it measures all ranks again.
    """

    name = "compression"
    needs = ("text", "frequency")

    def unavailable(self, context: Context) -> str | None:
        """A Base model has no memory."""
        if context.config.num_memory_blocks:
            return None
        return f"{context.job.checkpoint} is a Base model (K = 0) without memory to compress; give a TIDE checkpoint."

    def check(self, context: Context) -> None:
        """`check_names`."""
        check_names(context.job.text)

    def inputs(self, context: Context) -> dict[str, Any]:
        """How much is measured how."""
        return {
            "probe_tokens": context.job.probe_tokens,
            "quantized": {
                form: {"bits": BITS[form], "group": GROUP[form], "scale_bytes": SCALE_BYTES} for form in BITS
            },
            "percents": list(PERCENTS),
            "replicates": REPLICATES,
            "seed": SEED,
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """The unchanged memory, each way of quantising, and all ranks."""
        return (UNCHANGED, *BITS, SVD)

    def measure(self, context: Context, piece: str) -> Tables:
        """Of the forms of a piece, losses [forms, N] float32 and relative errors [forms] float64."""
        model, tables, text = context.model, context.tables, context.text
        windows = probe_windows(text, context.job.probe_tokens)
        tile_rows = context.rows_within(ROW_BYTES * tables.hidden_size, most=TILE_ROWS)
        batches = sum(1 for _ in text.batches(windows.tolist(), BATCH_TOKENS))
        steps = (len(PERCENTS) if piece == SVD else 1) * (tables.num_banks + batches)
        steps += tables.num_banks if piece == SVD else 0  # the singular vectors
        losses, errors = [], []
        with context.bar(steps, f"compression, {piece}", "steps") as bar, restored(model, tables, tile_rows):
            for change in changes_of(piece, tables, tile_rows, model.device, bar.update):
                errors.append(change_memory(model, tables, tile_rows, change, bar.update))
                losses.append(probe_losses(model, text, windows.tolist(), bar.update))
        return {"losses": {"losses": np.stack(losses), "errors": np.array(errors)}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """Every form with its size and error, and the columns of `difference_table` without model."""
        text, config = context.text, context.config
        windows = probe_windows(text, context.job.probe_tokens)
        stored = [parts.tensors(piece, "losses") for piece in parts.pieces]
        losses, errors = (np.concatenate([of[name] for of in stored]) for name in ("losses", "errors"))
        sums, done = [], 0
        for batch in text.batches(windows.tolist(), BATCH_TOKENS):
            shape = (len(losses), len(batch.windows), batch.input_ids.shape[1] - 1)
            positions = shape[1] * shape[2]
            of_batch = losses[:, done : done + positions].reshape(shape)
            sums.append(CellSums.of(of_batch, batch.input_ids, context.deciles))
            done += positions
        forms = compressed_forms(config).assign(error=errors)
        table = difference_table(CellSums.join(sums), text.window_domains[windows], text.domains)
        return {"compression": forms.join(table.set_index("model")).reset_index(drop=True)}
