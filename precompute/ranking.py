"""Which positions of a text have the highest values: kept a batch at a time, the same however the text is cut."""

import numpy as np
import torch

NOWHERE = -1  # a position, token id or key that there is not

_POSITION_BITS = 32  # a text of 4 G tokens
_POSITIONS = 2**_POSITION_BITS - 1
_LARGEST = 2**31 - 1  # the bits of a float32 that is not negative, read as an integer, are no more


def pack(values: torch.Tensor, positions: torch.Tensor, lowest: bool = False) -> torch.Tensor:
    """Keys that sort as values do, and where values are equal, by position: the largest key comes first.

    No two positions have the same key, so that whichever keys are compared first, the largest is the same.

    Args:
        values: float32, not negative, whose bits sort as they do.
        positions: int64, 0 to 2^32 - 1, broadcasts to `values`.
        lowest: the lowest value has the largest key.

    Returns:
        int64, 0 or more, in the shape of `values`.
    """
    bits = values.contiguous().view(torch.int32).long()
    if lowest:
        bits = _LARGEST - bits
    return (bits << _POSITION_BITS) | (_POSITIONS - positions)


def unpack(keys: np.ndarray, lowest: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack`: values float32 and positions int64; NaN and `NOWHERE` for the key `NOWHERE`."""
    is_there = keys != NOWHERE
    bits = keys >> _POSITION_BITS
    if lowest:
        bits = _LARGEST - bits
    values = np.where(is_there, bits, 0).astype(np.int32).view(np.float32)
    positions = _POSITIONS - (keys & _POSITIONS)
    return np.where(is_there, values, np.float32(np.nan)), np.where(is_there, positions, NOWHERE)


class TopPositions:
    """The positions of largest key in each of C columns, not too many of one token id.

    All positions in falling order, those of a token behind its first `per_token` left out, the first `size` of the
    rest. The lists of parts of a text hold all that the list of the whole needs, so that they can be merged.

    Args:
        columns: C.
        size: most positions of a list.
        per_token: most positions of one token id in a list.
        device: where it works.

    Attributes:
        keys: [size, C] int64 of `pack`, falling; `NOWHERE` where there are fewer.
        token_ids: [size, C] int64.
    """

    def __init__(self, columns: int, size: int, per_token: int, device: torch.device | None = None):
        self.per_token = per_token
        self.keys = torch.full((size, columns), NOWHERE, dtype=torch.int64, device=device)
        self.token_ids = self.keys.clone()

    def add(self, keys: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds positions: keys [n, C] and token ids [n]."""
        unique, slots = token_ids.unique(return_inverse=True)
        index, best = slots.unsqueeze(1).expand_as(keys), []
        for _ in range(self.per_token):  # the largest of every token, then the largest of the others
            largest = keys.new_full((len(unique), keys.shape[1]), NOWHERE).scatter_reduce_(0, index, keys, "amax")
            keys = keys.masked_fill(keys == largest[slots], NOWHERE)
            best.append(largest)
        candidates = torch.cat(best)
        found, rows = candidates.topk(min(len(self.keys), len(candidates)), dim=0)
        self.merge(found, unique[rows % max(len(unique), 1)])

    def merge(self, keys: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Merges another list: keys and token ids, [m, C] each."""
        keys, order = torch.cat([self.keys, keys]).sort(dim=0, descending=True)
        token_ids = torch.cat([self.token_ids, token_ids]).gather(0, order)
        before = torch.ones(len(keys), len(keys), dtype=torch.bool, device=keys.device).tril(-1)
        same = (token_ids.unsqueeze(1) == token_ids.unsqueeze(0)) & before.unsqueeze(2)  # (m, m, C)
        keys = keys.masked_fill(same.sum(dim=1) >= self.per_token, NOWHERE)
        self.keys, order = keys.topk(len(self.keys), dim=0)
        self.token_ids = token_ids.gather(0, order).masked_fill(self.keys == NOWHERE, NOWHERE)
