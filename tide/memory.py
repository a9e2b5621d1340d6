"""The memory banks: K tables that hold a vector for every token id (section 3.2 of the paper)."""

import torch
from torch import nn
from torch.nn import functional as F

from tide.config import TideConfig
from tide.table_file import RowTable


class BankRMSNorm(nn.Module):
    """RMSNorm_k of equation 3.3: one gain vector a bank, statistics in float32 as in LLaMA's own norm."""

    def __init__(self, num_banks: int, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_banks, hidden_size))
        self.eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalises `rows` [..., K, d] over d."""
        x = rows.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(rows.dtype)


class MemoryBanks(nn.Module):
    """The K memory tables, stored as one table [V, K, d].

    The K rows of a token lie side by side, so that looking a token up is one contiguous read of K*d numbers
    instead of K reads. Bank width is d: the paper adds the mix to the residual stream without a projection.

    Args:
        config: of the model.
        table: where the rows are read from when asked for; by default the table is a parameter, on the model's device.

    Attributes:
        weight: [V, K, d], or None where the table is none of the model's parameters.
        table: where the rows are read from then, else None.
    """

    def __init__(self, config: TideConfig, table: RowTable | None = None):
        super().__init__()
        shape = (config.vocab_size, config.num_memory_blocks, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape)) if table is None else None
        self.table = table
        self.norm = BankRMSNorm(config.num_memory_blocks, config.hidden_size, config.rms_norm_eps)

    @property
    def num_banks(self) -> int:
        """K."""
        return self.norm.weight.shape[0]

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The raw rows E_k[v]: [..., K, d] for token ids [...]."""
        return self._look_up(token_ids, normed=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the model reads, M_k(v) = RMSNorm_k(E_k[v]) (equations 3.3 and 3.4).

        Args:
            token_ids: [...] integer, each in 0..V-1.

        Returns:
            [..., K, d] in the table's dtype; of a table that is no parameter, in the model's.

        Raises:
            IndexError: for another token id.
            OSError: when the table is a file that can no longer be read.
        """
        return self._look_up(token_ids, normed=True)

    def _look_up(self, token_ids: torch.Tensor, normed: bool) -> torch.Tensor:
        if self.table is None:
            assert self.weight is not None
            found = side_by_side(self.weight, token_ids)
            return self.norm(found) if normed else found
        distinct, places = token_ids.unique(return_inverse=True)
        rows = self.table.read(distinct).to(self.norm.weight)
        return side_by_side(self.norm(rows) if normed else rows, places)


def side_by_side(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows [...] of a table [N, K, d], the K vectors of each in one read: [..., K, d]."""
    return F.embedding(rows, table.flatten(1)).unflatten(-1, table.shape[1:])


class Router(nn.Module):
    """The router of one layer (equation 3.5): routing weights over K banks and, last, the null bank."""

    def __init__(self, config: TideConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.num_memory_blocks + 1, bias=False)  # W_r [K+1, d]
        self.null_bias = nn.Parameter(torch.zeros(())) if config.router_null_bias else None

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """alpha = softmax(W_r n~), in float32.

        Args:
            normed: [B, T, d], the post-attention state after the layer's second RMSNorm, n~.

        Returns:
            [B, T, K+1] float32; every row sums to one; the null bank is the last column.
        """
        logits = self.proj(normed).float()
        if self.null_bias is not None:
            logits = torch.cat([logits[..., :-1], logits[..., -1:] + self.null_bias.float()], dim=-1)
        return logits.softmax(dim=-1)
