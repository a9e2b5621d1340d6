"""Tables in 8 or 4 bits a number (table 5; the paper does not say how numbers are quantised: this way is ours).

Symmetrically around zero, each group of neighbours in a row by its largest absolute value. RMSNorm_k, which follows,
takes the length of a row away, so that the one scale of an 8-bit row has no part in the result.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tide.table_file import TableFile

SCALE_BYTES = 2  # a bfloat16: no row is too small or too large for it
TILE_NUMBERS = 2**21  # of a table that are quantised at once: 8 MiB in float32


@dataclass(frozen=True)
class Quantization:
    """How the numbers of a row become whole numbers, codes.

    A number x becomes the nearest of -q..q times the scale, q = 2^(bits-1) - 1, the scale being the largest absolute
    value of its group over q, in bfloat16.

    Attributes:
        bits: of each number.
        group: numbers that share a scale, the last group of a row being shorter where they do not fill it; None is the
            whole row.
    """

    bits: int
    group: int | None

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales.

        Args:
            rows: [..., d] float32.

        Returns:
            [..., d] int8 in -q..q and [..., ceil(d / group)] bfloat16.
        """
        width = rows.shape[-1]
        size = self.group or width
        groups = F.pad(rows, (0, -width % size)).unflatten(-1, (-1, size))  # (..., groups, size)
        most = 2 ** (self.bits - 1) - 1
        scales = (groups.abs().amax(dim=-1) / most).bfloat16()
        units = scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        codes = (groups / units).round().clamp(-most, most).to(torch.int8)
        return codes.flatten(-2)[..., :width], scales

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The rows that codes and scales stand for: [..., d] float32."""
        size = self.group or codes.shape[-1]
        return codes.float() * scales.float().repeat_interleave(size, dim=-1)[..., : codes.shape[-1]]

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., d] float32 as they are read back from their codes."""
        return self.dequantize(*self.quantize(rows))

    def bytes(self, numbers: int, width: int) -> int:
        """Bytes of so many numbers in rows of a width, scales included."""
        scales = numbers // width * math.ceil(width / (self.group or width))
        return math.ceil(numbers * self.bits / 8) + scales * SCALE_BYTES


QUANTIZATIONS = {"int8": Quantization(8, None), "int4": Quantization(4, 32)}


class QuantizedTable:
    """A memory table held in few bits, of which the rows that a forward reads are made numbers again.

    It lies on the CPU until rows are asked for with token ids on a GPU, and there from then on.

    Args:
        quantization: of its numbers.
        codes: [V, K, d] int8 of 8 bits; of 4 bits [V, K, ceil(d/2)] uint8, two codes a byte, as `packed` makes them.
        scales: [V, K, groups] bfloat16.
        width: d.
    """

    def __init__(self, quantization: Quantization, codes: torch.Tensor, scales: torch.Tensor, width: int):
        self.quantization, self.codes, self.scales, self.width = quantization, codes, scales, width

    @classmethod
    def from_file(cls, table: TableFile, quantization: Quantization) -> "QuantizedTable":
        """Quantises a table of a checkpoint, a part at a time: it is never held as it is stored.

        Args:
            table: the memory [V, K, d].
            quantization: what to make of it.

        Raises:
            OSError: when the file is shorter than its header says.
        """
        vocab_size, num_banks, width = table.shape
        tile_rows = max(1, TILE_NUMBERS // (num_banks * width))
        codes = scales = None
        for start in range(0, vocab_size, tile_rows):
            ids = torch.arange(start, min(start + tile_rows, vocab_size))
            tile_codes, tile_scales = quantization.quantize(table.read(ids).float())
            if quantization.bits == 4:
                tile_codes = packed(tile_codes)
            if codes is None or scales is None:
                codes = tile_codes.new_empty(vocab_size, *tile_codes.shape[1:])
                scales = tile_scales.new_empty(vocab_size, *tile_scales.shape[1:])
            codes[ids], scales[ids] = tile_codes, tile_scales
        assert codes is not None
        assert scales is not None
        return cls(quantization, codes, scales, width)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.codes.nbytes + self.scales.nbytes

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As `RowTable.read`, but [N, K, d] float32 on the device of the token ids.

        Raises:
            IndexError: for an id that is not in 0..V-1.
        """
        if self.codes.device != token_ids.device:
            self.codes, self.scales = self.codes.to(token_ids.device), self.scales.to(token_ids.device)
        codes, scales = self.codes.index_select(0, token_ids), self.scales.index_select(0, token_ids)
        if self.quantization.bits == 4:
            codes = unpacked(codes, self.width)
        return self.quantization.dequantize(codes, scales)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., d] int8 in -8..7, two a byte, the first in the lower half: [..., ceil(d/2)] uint8."""
    halves = F.pad(codes + 8, (0, codes.shape[-1] % 2)).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def unpacked(codes: torch.Tensor, width: int) -> torch.Tensor:
    """What `packed` was made of: [..., width] int8."""
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return halves[..., :width].to(torch.int8) - 8
