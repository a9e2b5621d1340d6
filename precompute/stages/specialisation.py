"""Stage `specialisation`: what does each bank specialise in? All measures are ours.

For every (layer, bank), null included: the positions of the held-out text where it has the highest routing weight and
where it injects most, and how its mass splits among frequency deciles, domains, kinds of token and places in the
window. For every token id: the positions of its lowest and highest null weight in every layer.

Lists of positions leave out the first few of every window: the model reads them without the text that comes before,
and routes them differently, the more so in the first layers. The split by place in the window shows that.

The size of what a bank injects is |alpha_k M_k(v)| = alpha_k |M_k(v)|, and |M_k(v)| depends on the token id alone. So
the mean size over a token's positions is its mean weight times |M_k(v)|: the stage stores this norm, and no mean by
token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from precompute.kinds import KINDS, token_kinds
from precompute.parts import Parts
from precompute.ranking import NOWHERE, TopPositions, pack, unpack
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.text import Batch, HeldOutText
from tide.frequency import NUM_DECILES
from tide.model import TideForCausalLM

BATCH_TOKENS = 4096  # tokens a forward
TOP_CONTEXTS = 20  # of every list
CONTEXTS_PER_TOKEN = 2  # of one token id in a list, so that one frequent token does not fill it
LEAST_BEFORE = 8  # tokens before a position in its window, for it to be listed
GROUPINGS = ("decile", "domain", "kind", "before")
FILE = "specialisation"


class GroupSums:
    """Sums and sums of squares of C values over the positions of every group, in float64.

    Products with an indicator matrix, because a scattered addition on a GPU has no fixed order.

    Args:
        sizes: number of groups by name of the grouping.
        columns: C.
        device: one that has float64.
    """

    def __init__(self, sizes: Mapping[str, int], columns: int, device: torch.device):
        self.sums = {
            name: torch.zeros(2, size, columns, dtype=torch.float64, device=device) for name, size in sizes.items()
        }
        self.n = {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()}

    def add(self, groups: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
        """Adds positions: the group of each [n] in every grouping, and values [n, C]."""
        both = torch.stack([values.double(), values.double().square()])  # (2, n, C)
        for name, group in groups.items():
            is_in = F.one_hot(group, len(self.n[name])).T  # (G, n)
            self.n[name] += is_in.sum(dim=1)
            self.sums[name] += is_in.double() @ both


class RoutingRecorder:
    """A recorder that keeps of a forward the routing weights and the norms of the memory, not the stream.

    Attributes:
        weights: [B, T, K+1] float32 of every layer.
        norms: [B, T, K] float32, |M_k(v)|.
    """

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def start(self, embedding: torch.Tensor, memory: torch.Tensor) -> None:
        """Notes the norms of the memory [B, T, K, d]."""
        self.norms = torch.linalg.vector_norm(memory, dim=-1, dtype=torch.float32)

    def add_layer(self, hidden: torch.Tensor, routing: torch.Tensor, *parts: torch.Tensor | None) -> None:
        """Notes a layer's weights [B, T, K+1]."""
        self.weights.append(routing.float())


@dataclass(frozen=True)
class Groups:
    """What positions are grouped by.

    Attributes:
        deciles: [V], frequency decile of every token id, -1 for none.
        kinds: [V], as `token_kinds`.
        num_domains: held-out texts.
        window: most tokens of a window.
    """

    deciles: np.ndarray
    kinds: np.ndarray
    num_domains: int
    window: int

    @property
    def sizes(self) -> dict[str, int]:
        """Number of groups of every grouping."""
        counts = (NUM_DECILES + 1, self.num_domains, len(KINDS), (self.window - 1).bit_length() + 1)
        return dict(zip(GROUPINGS, counts, strict=True))

    def of(self, batch: Batch) -> dict[str, np.ndarray]:
        """The group of every position of a batch, [n] int64 by name of the grouping.

        A decile (10 is none), the number of the domain, the kind of token, and of `before` the tokens before the
        position in its window how many binary digits they have: 0, 1, 2-3, 4-7, 8-15, ...
        """
        ids, length = batch.input_ids.ravel(), batch.input_ids.shape[1]
        deciles = self.deciles[ids].astype(np.int64)
        return {
            "decile": np.where(deciles < 0, NUM_DECILES, deciles),
            "domain": np.repeat(batch.domains, length),
            "kind": self.kinds[ids].astype(np.int64),
            "before": np.frexp(before(batch))[1].astype(np.int64),
        }


def before(batch: Batch) -> np.ndarray:
    """[n] int64, tokens before every position of a batch in its window."""
    return np.tile(np.arange(batch.input_ids.shape[1]), len(batch.input_ids))


class Specialists:
    """What is kept of a stretch of text.

    Args:
        num_layers: L.
        num_banks: K, at least 1.
        vocab_size: V.
        groups: number of groups by name of the grouping.
        device: one that has float64.
    """

    def __init__(
        self, num_layers: int, num_banks: int, vocab_size: int, groups: Mapping[str, int], device: torch.device
    ):
        self.device = device
        columns = num_layers * (2 * num_banks + 1)  # weights, null included, then sizes
        self.top = TopPositions(columns, TOP_CONTEXTS, CONTEXTS_PER_TOKEN, device)
        self.sums = GroupSums(groups, columns, device)
        self.null = torch.full((vocab_size, 2, num_layers + 1), NOWHERE, dtype=torch.int64, device=device)
        self.norms = torch.full((vocab_size, num_banks), torch.nan, device=device)
        self.n = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    def add(self, batch: Batch, weights: torch.Tensor, norms: torch.Tensor, groups: Mapping[str, np.ndarray]) -> None:
        """Adds a batch.

        Args:
            batch: n tokens.
            weights: [n, L, K+1] float32, null last.
            norms: [n, K] float32, |M_k(v)|.
            groups: [n] by name.
        """
        weights, norms = weights.to(self.device), norms.to(self.device)
        ids = torch.from_numpy(batch.input_ids.ravel()).to(self.device)
        sizes = weights[..., :-1] * norms.unsqueeze(1)  # (n, L, K)
        values = torch.cat([weights.flatten(1), sizes.flatten(1)], dim=1)  # (n, C)
        self.sums.add({name: torch.from_numpy(group).to(self.device) for name, group in groups.items()}, values)
        self.norms[ids] = norms

        is_listed = before(batch) >= LEAST_BEFORE
        positions = torch.from_numpy(batch.positions.ravel()[is_listed]).unsqueeze(1).to(self.device)
        inside = torch.from_numpy(is_listed).to(self.device)
        null = weights[inside, :, -1]
        null = torch.cat([null, null.double().mean(dim=1, keepdim=True).float()], dim=1)  # (n, L+1)
        ends = torch.stack([pack(null, positions, lowest=True), pack(null, positions)], dim=1)  # (n, 2, L+1)
        ids = ids[inside]
        self.top.add(pack(values[inside], positions), ids)
        self.null.scatter_reduce_(0, ids.reshape(-1, 1, 1).expand_as(ends), ends, "amax")
        self.n += torch.bincount(ids, minlength=len(self.n))

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, of the token ids that occur alone; `combine` makes the stage's files of it."""
        ids = (~self.norms[:, 0].isnan()).nonzero().flatten()
        kept = {"top_keys": self.top.keys, "top_token_ids": self.top.token_ids}
        kept |= {"token_ids": ids, "null": self.null[ids], "norms": self.norms[ids], "n": self.n[ids]}
        kept |= {f"{name}_sums": sums for name, sums in self.sums.sums.items()}
        kept |= {f"{name}_n": n for name, n in self.sums.n.items()}
        return {name: tensor.cpu().numpy() for name, tensor in kept.items()}


@torch.no_grad()
def specialists_of(
    model: TideForCausalLM,
    text: HeldOutText,
    windows: Sequence[int],
    groups: Groups,
    batch_tokens: int = BATCH_TOKENS,
    bar: tqdm | None = None,
) -> dict[str, np.ndarray]:
    """Runs the model over some windows of a text.

    Args:
        model: a TIDE model, K > 0.
        text: every position counts for the sums, that of a document mark too.
        windows: numbers of windows.
        groups: of positions.
        batch_tokens: tokens a forward.
        bar: is moved on by one a token.

    Returns:
        As `Specialists.arrays`.
    """
    config = model.config
    # float64 sums need a device that has float64, which Apple's GPUs do not.
    place = model.device if model.device.type == "cuda" else torch.device("cpu")
    kept = Specialists(config.num_hidden_layers, config.num_memory_blocks, config.vocab_size, groups.sizes, place)
    for batch in text.batches(windows, batch_tokens):
        recorder = RoutingRecorder()
        input_ids = torch.from_numpy(batch.input_ids).to(model.device)
        model.model(input_ids=input_ids, use_cache=False, recorder=recorder)
        weights = torch.stack(recorder.weights, dim=2).flatten(0, 1)  # (n, L, K+1)
        kept.add(batch, weights, recorder.norms.flatten(0, 1), groups.of(batch))
        if bar is not None:
            bar.update(batch.input_ids.size)
    return kept.arrays()


def combine(parts: Iterable[Mapping[str, np.ndarray]], num_layers: int, num_banks: int, kinds: np.ndarray) -> Tables:
    """Makes the stage's files of the pieces of a text.

    Args:
        parts: `specialists_of` for each, in order.
        num_layers: L.
        num_banks: K.
        kinds: [V], as `token_kinds`.

    Returns:
        `contexts`: of "weight" [L, K+1, 20] and "size" [L, K, 20] each NAME_position int64 and NAME_token_id int32
        (-1 where there are fewer), NAME_weight and NAME_size float32 (NaN there). `tokens`: n int64 [V], positions
        with `LEAST_BEFORE` tokens before them; of these null_lowest and null_highest float32 [V, L+1], over all
        layers last, each with _position int64 (NaN and -1 where n is 0); norm float32 [V, K], |M_k(v)| (NaN where
        the text lacks the token); kind int8 [V]. `groups`: of every one of `GROUPINGS` NAME_n int64 [G],
        NAME_weight_sum and NAME_weight_squares float64 [G, L, K+1], NAME_size_sum and NAME_size_squares [G, L, K].
    """
    vocab_size = len(kinds)
    split = num_layers * (num_banks + 1)  # the columns of weights, then those of sizes
    top = TopPositions(split + num_layers * num_banks, TOP_CONTEXTS, CONTEXTS_PER_TOKEN)
    null = np.full((vocab_size, 2, num_layers + 1), NOWHERE, dtype=np.int64)
    norm = np.full((vocab_size, num_banks), np.nan, dtype=np.float32)
    n = np.zeros(vocab_size, dtype=np.int64)
    totals: dict[str, np.ndarray] = {}
    for part in parts:
        ids = part["token_ids"]
        top.merge(torch.from_numpy(part["top_keys"]), torch.from_numpy(part["top_token_ids"]))
        null[ids] = np.maximum(null[ids], part["null"])
        norm[ids] = part["norms"]
        n[ids] += part["n"]
        for name in part:
            if name.endswith(("_sums", "_n")):
                totals[name] = totals[name] + part[name] if name in totals else part[name]

    tokens = {"n": n, "kind": kinds, "norm": norm}
    for side, end in enumerate(("lowest", "highest")):
        tokens[f"null_{end}"], tokens[f"null_{end}_position"] = unpack(null[:, side], lowest=end == "lowest")
    contexts: dict[str, np.ndarray] = {}
    groups = {name: values for name, values in totals.items() if name.endswith("_n")}
    shapes = {"weight": (slice(None, split), num_banks + 1), "size": (slice(split, None), num_banks)}
    for name, (columns, banks) in shapes.items():
        shape = (num_layers, banks, TOP_CONTEXTS)
        keys, ids = (array.numpy()[:, columns].T.reshape(shape) for array in (top.keys, top.token_ids))
        contexts |= listed(name, keys, ids, norm)
        for grouping in GROUPINGS:
            sums = totals[f"{grouping}_sums"][:, :, columns].reshape(2, -1, num_layers, banks)
            groups[f"{grouping}_{name}_sum"], groups[f"{grouping}_{name}_squares"] = sums
    return {"contexts": contexts, "tokens": tokens, "groups": groups}


def listed(name: str, keys: np.ndarray, token_ids: np.ndarray, norm: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of one kind of list.

    Args:
        name: "weight" or "size", what the keys hold.
        keys: [L, banks, 20] int64.
        token_ids: [L, banks, 20] int64.
        norm: [V, K] float32, |M_k(v)|.

    Returns:
        NAME_position, NAME_token_id, NAME_weight, NAME_size, each [L, banks, 20]. One of weight and size is what the
        model had, the other follows from it to rounding; the null bank's sizes are 0.
    """
    values, positions = unpack(keys)
    with_null = np.pad(norm, ((0, 0), (0, 1)))  # the null bank is the zero vector
    norms = with_null[token_ids, np.arange(keys.shape[1])[:, None]]
    if name == "weight":
        weight, size = values, values * norms
    else:
        with np.errstate(invalid="ignore"):  # a row of norm 0 has size 0 at any weight: NaN
            weight, size = values / norms, values
    size = np.where(token_ids == NOWHERE, np.float32(np.nan), size)
    arrays = {"position": positions, "token_id": token_ids.astype(np.int32), "weight": weight, "size": size}
    return {f"{name}_{column}": array for column, array in arrays.items()}


class Specialisation(Stage):
    """The banks over the held-out text."""

    name = "specialisation"
    needs = ("text", "frequency")

    def unavailable(self, context: Context) -> str | None:
        """A Base model has nothing that could specialise."""
        if context.config.num_memory_blocks:
            return None
        return "The model has no memory banks that could specialise; give a TIDE checkpoint, trained with K > 0."

    def inputs(self, context: Context) -> dict[str, Any]:
        """What is listed, and the kinds of token."""
        return {
            "top_contexts": TOP_CONTEXTS,
            "contexts_per_token": CONTEXTS_PER_TOKEN,
            "least_before": LEAST_BEFORE,
            "kinds": list(KINDS),
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """Runs of windows."""
        return context.text.pieces()

    def measure(self, context: Context, piece: str) -> Tables:
        """`specialists_of` a piece's windows."""
        text = context.text
        windows = text.windows_of(piece)
        tokens = int(text.window_lengths[windows.start : windows.stop].sum())
        with context.bar(tokens, self.name, "tokens") as bar:
            groups = Groups(context.deciles, self._kinds(context), len(text.domains), text.length)
            return {FILE: specialists_of(context.model, text, windows, groups, bar=bar)}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`combine`."""
        pieces = (parts.tensors(piece, FILE) for piece in parts.pieces)
        config = context.config
        return combine(pieces, config.num_hidden_layers, config.num_memory_blocks, self._kinds(context))

    def _kinds(self, context: Context) -> np.ndarray:
        return token_kinds(context.vocabulary.texts, context.vocabulary.special_ids)
