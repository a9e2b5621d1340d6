"""Stage `routing`: what the routers do over a text.

Mean and spread of every routing weight, by token id and by frequency decile (figure 10); the mean of what every
(layer, bank) injects; and the contexts of some tokens that occur once, by which a reader can check the rest.
"""

import numpy as np
import torch
from tqdm import tqdm

from precompute.store import Tables
from precompute.text import windows
from tide.frequency import NUM_DECILES
from tide.model import TideForCausalLM

BATCH_TOKENS = 4096  # tokens a forward: keeps two cores busy and a trace of the demo below 100 MB
FORMAT = 2  # of what the stage stores; a new one makes older artifacts anew. 2: mean_injection, once_contexts
ONCE_TOKENS = 32  # tokens that occur once, whose contexts are kept
ONCE_CONTEXT = 16  # most tokens of such a context: all of them together are one small forward


class Sums:
    """Sum and sum of squares of the routing weights of each token id, accumulated in float64.

    Weights lie between 0 and 1, so that float64 keeps the variance to about 1e-16 even where it is a difference.
    """

    def __init__(self, vocab_size: int, num_layers: int, slots: int, device: torch.device):
        shape = (vocab_size, num_layers * slots)
        self.shape = (vocab_size, num_layers, slots)
        self.total = torch.zeros(shape, dtype=torch.float64, device=device)
        self.squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self.n = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    def add(self, token_ids: torch.Tensor, routing: torch.Tensor) -> None:
        """Adds token ids [B, T] and their routing weights [B, T, L, K+1]."""
        ids = token_ids.flatten().to(self.total.device)
        weights = routing.to(self.total.device, torch.float64).reshape(len(ids), -1)
        self.total.index_add_(0, ids, weights)
        self.squares.index_add_(0, ids, weights.square_())
        self.n += torch.bincount(ids, minlength=len(self.n))

    def grouped(self, groups: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean and deviation over the positions of each group of token ids.

        Args:
            groups: [V], the group of each token id; negative for none.
            num_groups: G.

        Returns:
            As `moments`, with G in the place of V.
        """
        inside = torch.from_numpy(np.flatnonzero(groups >= 0)).to(self.n.device)
        index = torch.from_numpy(groups[groups >= 0].astype(np.int64)).to(self.n.device)
        total, squares = (
            sums.new_zeros(num_groups, sums.shape[1]).index_add_(0, index, sums[inside])
            for sums in (self.total, self.squares)
        )
        n = self.n.new_zeros(num_groups).index_add_(0, index, self.n[inside])
        return moments(total, squares, n, (num_groups, *self.shape[1:]))

    def by_token(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean and deviation over the positions of each token id, as `moments`."""
        return moments(self.total, self.squares, self.n, self.shape)


class InjectionSum:
    """Sum over positions of alpha_k M_k(v), what every (layer, bank) injects (equation 3.6), accumulated in float64."""

    def __init__(self, num_layers: int, num_banks: int, hidden_size: int, device: torch.device):
        self.total = torch.zeros(num_layers, num_banks, hidden_size, dtype=torch.float64, device=device)
        self.n = 0

    def add(self, routing: torch.Tensor, memory: torch.Tensor) -> None:
        """Adds routing weights [B, T, L, K+1] and the memory [B, T, K, d] of the same positions."""
        weights = routing.flatten(0, 1).to(self.total)  # (N, L, K+1)
        rows = memory.flatten(0, 1)  # (N, K, d)
        for bank in range(rows.shape[1]):  # one at a time: all rows in float64 are 1.6 GB at d 2048, K 24
            self.total[:, bank] += weights[:, :, bank].T @ rows[:, bank].to(self.total)
        self.n += len(weights)

    def mean(self) -> np.ndarray:
        """[L, K, d] float32."""
        return (self.total / self.n).float().cpu().numpy()


def contexts_of_once(tokens: np.ndarray, n: np.ndarray, window: int, seed: int = 0) -> np.ndarray:
    """Contexts of some random tokens that occur once: there, a token's mean routing is that of a single position.

    Taken from the beginning of windows, so that the context is short and the forward that repeats it cheap.

    Args:
        tokens: [N], the token stream.
        n: [V], occurrences of each token id in it.
        window: tokens that the model saw at once.
        seed: of the choice.

    Returns:
        [P, ONCE_CONTEXT] int32, P up to ONCE_TOKENS: the window's tokens up to and with the one that occurs once, the
        rest -1; in the order of the text.
    """
    offsets = np.arange(len(tokens)) % window
    places = np.flatnonzero((n[tokens] == 1) & (offsets < ONCE_CONTEXT))
    chosen = np.random.default_rng(seed).choice(places, min(ONCE_TOKENS, len(places)), replace=False)
    contexts = np.full((len(chosen), ONCE_CONTEXT), -1, dtype=np.int32)
    for context, place in zip(contexts, np.sort(chosen), strict=True):
        context[: offsets[place] + 1] = tokens[place - offsets[place] : place + 1]
    return contexts


def moments(
    total: torch.Tensor, squares: torch.Tensor, n: torch.Tensor, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and sample standard deviation from sums.

    Args:
        total: [G, L*(K+1)] float64.
        squares: [G, L*(K+1)] float64.
        n: [G] int64.
        shape: (G, L, K+1).

    Returns:
        mean [G, L, K+1] float32 (NaN where n = 0), sd [G, L, K+1] float32 (NaN where n < 2), n [G] int64.
    """
    count = n.to(total.dtype).unsqueeze(-1)
    mean = total / count  # 0 / 0 is NaN
    variance = (squares - count * mean.square()).clamp_(min=0) / (count - 1)
    variance[n < 2] = torch.nan
    arrays = (x.float().reshape(shape).cpu().numpy() for x in (mean, variance.sqrt()))
    return *arrays, n.cpu().numpy()  # type: ignore[return-value]


@torch.no_grad()
def routing_statistics(
    model: TideForCausalLM,
    tokens: np.ndarray,
    deciles: np.ndarray,
    window: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    show_progress: bool = True,
) -> Tables:
    """Runs the model over a text and averages the routing weights and what they inject.

    Args:
        model: a TIDE model; of a Base model all weight is on the null bank.
        tokens: [N], the token stream of the text. Every position counts, that of a document mark too.
        deciles: [V], frequency decile of every token id, -1 for none.
        window: tokens that the model sees at once; by default as many as it was made for.
        batch_tokens: tokens a forward.
        show_progress: draw a progress bar.

    Returns:
        `routing`: mean, sd [V, L, K+1] and n [V] by token id; decile_mean, decile_sd [10, L, K+1] and decile_n [10]
        over the positions of each decile; overall_mean, overall_sd [L, K+1] and overall_n [1] over all positions;
        mean_injection [L, K, d], the mean over all positions of alpha_k M_k(v); once_contexts, as `contexts_of_once`.
        float32 and int64; sd is the sample standard deviation. Null is last.
    """
    config = model.config
    length = window or config.max_position_embeddings
    # float64 sums need a device that has float64, which Apple's GPUs do not.
    place = model.device if model.device.type == "cuda" else torch.device("cpu")
    num_layers, num_banks = config.num_hidden_layers, config.num_memory_blocks
    sums = Sums(config.vocab_size, num_layers, num_banks + 1, place)
    injected = InjectionSum(num_layers, num_banks, config.hidden_size, place)
    with tqdm(total=len(tokens), desc="routing", unit=" tokens", unit_scale=True, disable=not show_progress) as bar:
        for batch in windows(tokens, length, max(1, batch_tokens // length)):
            input_ids = torch.from_numpy(batch).to(model.device)
            trace = model.trace(input_ids, with_logits=False, with_parts=False)
            sums.add(input_ids, trace.routing)
            injected.add(trace.routing, trace.memory)
            bar.update(batch.size)

    arrays: dict[str, np.ndarray] = {}
    arrays["mean"], arrays["sd"], arrays["n"] = sums.by_token()
    arrays["decile_mean"], arrays["decile_sd"], arrays["decile_n"] = sums.grouped(deciles, NUM_DECILES)
    mean, sd, arrays["overall_n"] = sums.grouped(np.zeros(config.vocab_size, dtype=np.int64), 1)
    arrays["overall_mean"], arrays["overall_sd"] = mean[0], sd[0]
    arrays["mean_injection"] = injected.mean()
    arrays["once_contexts"] = contexts_of_once(tokens, arrays["n"], length)
    return {"routing": arrays}
