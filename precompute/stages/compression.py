"""Stage `compression`: the loss with the memory tables compressed (table 5, figure 12).

Table 5 stores the memory E_k in 8 and 4 bits (`tide.quantization`); figure 12 replaces every bank by its rank-r SVD.
What is compressed are the raw rows, as they are stored; RMSNorm_k follows as usual.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

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
from tide.quantization import QUANTIZATIONS, SCALE_BYTES
from tide.table_file import RowTable

UNCHANGED = "none"
ROW_BYTES = 32  # a number of a tile while it is worked on: as stored, in float32 and float64, and changed
PERCENTS = tuple(range(0, 100, 10))  # of the ranks that figure 12 takes away
SVD, VECTORS = "svd", "vectors"
TILE_ROWS = 4096  # of a table at once: 32 MiB in float32 at d 2048

Change = Callable[[int, torch.Tensor], torch.Tensor]
"""What becomes of rows [n, d] float32 of a bank."""

Advance = Callable[[int], Any]
"""Told that so many steps are done."""


def unchanged(bank: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows as they are."""
    return rows


def quantization(form: str) -> Change:
    """What becomes of the rows in a form of `QUANTIZATIONS` (table 5)."""
    return lambda bank, rows: QUANTIZATIONS[form].rounded(rows)


# --- Low rank (figure 12) ----------------------------------------------------------------------------------------


def rank(percent: int, width: int) -> int:
    """r = ceil((1 - p) d) of figure 12, p in percent."""
    return -(-(100 - percent) * width // 100)


class SingularVectors(NamedTuple):
    """The right singular vectors of one table E_k.

    Attributes:
        vectors: [d, d] float32, in columns, that of the largest singular value first.
        energies: [d] float64, the squared singular values.
    """

    vectors: torch.Tensor
    energies: torch.Tensor


def right_singular_vectors(
    tables: CheckpointTables, bank: int, tile_rows: int, device: torch.device
) -> SingularVectors:
    """Right singular vectors of E_k, by the eigenvectors of E_k^T E_k in float64: the table is not held whole.

    Args:
        tables: of the checkpoint.
        bank: k.
        tile_rows: rows of the table at once.
        device: where to compute.
    """
    place = device if device.type == "cuda" else torch.device("cpu")  # Apple's GPUs have no float64
    gram = torch.zeros(tables.hidden_size, tables.hidden_size, dtype=torch.float64, device=place)
    for tile in tables.tiles(bank, tile_rows, raw=True):
        rows = torch.from_numpy(tile).to(place, torch.float64)
        gram += rows.T @ rows
    energies, vectors = torch.linalg.eigh(gram)  # ascending
    return SingularVectors(vectors.flip(1).float(), energies.flip(0).clamp(min=0))


def projection(vectors: Sequence[torch.Tensor]) -> Change:
    """The best approximation of each table by r ranks, E V_r V_r^T (Eckart-Young).

    Args:
        vectors: of each bank [d, r], its first right singular vectors.
    """
    return lambda bank, rows: rows @ vectors[bank] @ vectors[bank].T


def truncation_error(energies: np.ndarray, kept: int) -> float:
    """Relative error |E' - E| / |E| over all banks of the best approximation by so many ranks of each.

    Args:
        energies: [K, d], squared singular values, the largest first.
        kept: r.
    """
    return math.sqrt(energies[:, kept:].sum() / energies.sum()) if energies.any() else 0.0


def low_rank_bytes(vocab_size: int, num_banks: int, width: int, kept: int, number_bytes: int) -> int:
    """Bytes of K tables as two factors each, [V, r] and [r, d]; of few ranks less than the tables themselves."""
    return num_banks * kept * (vocab_size + width) * number_bytes


# --- The memory in another form ----------------------------------------------------------------------------------


class ChangedTable:
    """The memory in another form: the rows that a forward reads, changed as they are read.

    Args:
        table: the memory as it is.
        change: what becomes of its rows.
        device: where they are changed.
    """

    def __init__(self, table: RowTable, change: Change, device: torch.device):
        self._table, self._change, self._device = table, change, device

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As `RowTable.read`, but [N, K, d] float32 on the device."""
        rows = self._table.read(token_ids).to(self._device, torch.float32)
        return torch.stack([self._change(bank, rows[:, bank]) for bank in range(rows.shape[1])], dim=1)


@contextlib.contextmanager
def changed_memory(model: TideForCausalLM, change: Change) -> Iterator[None]:
    """The model with its memory in another form, until the block ends.

    Args:
        model: with its memory on disk.
        change: what becomes of the rows of each bank.
    """
    memory = model.model.memory
    assert memory is not None
    assert memory.table is not None
    table = memory.table
    memory.table = ChangedTable(table, change, model.device)
    try:
        yield
    finally:
        memory.table = table


def squared_length(rows: torch.Tensor) -> float:
    """Sum of squares, rows summed in float32 and one another in float64."""
    return float(rows.square().sum(dim=1).cpu().double().sum())


def relative_error(
    tables: CheckpointTables, tile_rows: int, change: Change, device: torch.device, advance: Advance
) -> float:
    """|E' - E| / |E| over all banks (Frobenius norms), a tile at a time.

    Args:
        tables: of the checkpoint.
        tile_rows: rows of a table at once.
        change: what becomes of the rows.
        device: where they are changed.
        advance: called after every bank.
    """
    error = size = 0.0
    for bank in range(tables.num_banks):
        for tile in tables.tiles(bank, tile_rows, raw=True):
            rows = torch.from_numpy(tile).to(device)
            error += squared_length(change(bank, rows) - rows)
            size += squared_length(rows)
        advance(1)
    return math.sqrt(error / size) if size else 0.0


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
    for form, way in QUANTIZATIONS.items():
        rows.append((form, way.bits, -1, -1, way.bytes(numbers, width)))
    for percent in PERCENTS:
        kept = rank(percent, width)
        size = low_rank_bytes(vocab_size, num_banks, width, kept, number_bytes)
        rows.append((f"{SVD}-{percent}", 8 * number_bytes, percent, kept, size))
    return pd.DataFrame(rows, columns=["form", "bits", "percent", "rank", "bytes"])


def probe_losses(model: TideForCausalLM, text: HeldOutText, windows: Sequence[int], advance: Advance) -> np.ndarray:
    """Losses of all predicted positions of some windows, one window after the other: [N] float32, nats."""
    parts = []
    for batch in text.batches(windows, BATCH_TOKENS):
        parts.append(token_losses(model, batch.input_ids, len(batch.windows)).ravel())
        advance(1)
    return np.concatenate(parts)


class Compression(Stage):
    """A piece each form of the memory; before the ranks, one each bank's singular vectors, which all ranks share."""

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
                form: {"bits": way.bits, "group": way.group, "scale_bytes": SCALE_BYTES}
                for form, way in QUANTIZATIONS.items()
            },
            "percents": list(PERCENTS),
            "replicates": REPLICATES,
            "seed": SEED,
        }

    def rounds(self, context: Context) -> Sequence[Sequence[str]]:
        """The unchanged memory, each way of quantising and every bank's singular vectors; then every rank."""
        banks = range(context.config.num_memory_blocks)
        return (UNCHANGED, *QUANTIZATIONS, *(f"{VECTORS}-{bank}" for bank in banks)), [f"{SVD}-{p}" for p in PERCENTS]

    def measure(self, context: Context, piece: str) -> Tables:
        """Of a form, `losses` [N] float32 and `error` [1] float64; of a bank, its `SingularVectors`."""
        model, tables, text = context.model, context.tables, context.text
        tile_rows = context.rows_within(ROW_BYTES * tables.hidden_size, most=TILE_ROWS)
        kind, _, number = piece.partition("-")
        if kind == VECTORS:
            found = right_singular_vectors(tables, int(number), tile_rows, model.device)
            return {VECTORS: {name: tensor.cpu().numpy() for name, tensor in found._asdict().items()}}

        windows = probe_windows(text, context.job.probe_tokens).tolist()
        steps = sum(1 for _ in text.batches(windows, BATCH_TOKENS)) + (tables.num_banks if kind in QUANTIZATIONS else 0)
        change: Change = unchanged
        error = 0.0
        with context.bar(steps, f"compression, {piece}", "steps") as bar:
            if kind in QUANTIZATIONS:
                change = quantization(kind)
                error = relative_error(tables, tile_rows, change, model.device, bar.update)
            elif kind == SVD:
                kept = rank(int(number), tables.hidden_size)
                assert context.parts is not None
                stored = [context.parts.tensors(f"{VECTORS}-{bank}", VECTORS) for bank in range(tables.num_banks)]
                change = projection([torch.from_numpy(of["vectors"][:, :kept]).to(model.device) for of in stored])
                error = truncation_error(np.stack([of["energies"] for of in stored]), kept)
            with changed_memory(model, change):
                losses = probe_losses(model, text, windows, bar.update)
        return {"losses": {"losses": losses, "error": np.array([error])}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """Every form with its size and error, and the columns of `difference_table` without model."""
        text, config = context.text, context.config
        windows = probe_windows(text, context.job.probe_tokens)
        forms = compressed_forms(config)
        stored = [parts.tensors(form, "losses") for form in forms["form"]]
        losses = np.stack([of["losses"] for of in stored])
        sums, done = [], 0
        for batch in text.batches(windows.tolist(), BATCH_TOKENS):
            shape = (len(losses), len(batch.windows), batch.input_ids.shape[1] - 1)
            positions = shape[1] * shape[2]
            of_batch = losses[:, done : done + positions].reshape(shape)
            sums.append(CellSums.of(of_batch, batch.input_ids, context.deciles))
            done += positions
        forms = forms.assign(error=np.concatenate([of["error"] for of in stored]))
        table = difference_table(CellSums.join(sums), text.window_domains[windows], text.domains)
        return {"compression": forms.join(table.set_index("model")).reset_index(drop=True)}
