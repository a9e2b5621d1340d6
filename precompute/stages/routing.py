"""Stage `routing`: what the routers do over a text (figure 10, and what its readers asked for).

Two measures stand beside the K+1 routing weights of every position and layer, ours both: their entropy, and the size of
the injection beside the stream, |m|/|h|. All of them together are the K+3 columns of a layer, and every grouping of
positions treats them alike: by token id, frequency decile, held-out text and position in the word, and all together.
The mean of what every (layer, bank) injects is here too, and the contexts of some tokens that occur once, by which a
reader can check the rest.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from precompute.blocks import MAX_BLOCKS, REPLICATES, SEED, Blocks, block_intervals
from precompute.moments import Moments, moments, sample_deviation
from precompute.parts import Parts
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.text import HeldOutText
from precompute.words import WORD_POSITIONS, TokenEdges, word_positions
from tide.config import TideConfig
from tide.frequency import NUM_DECILES
from tide.model import TideForCausalLM
from tide.trace import Trace

BATCH_TOKENS = 4096  # most tokens a forward: keeps two cores busy and a trace of the demo below 100 MB
TRACE_BYTES = 2**30  # and as many as keep a trace of a large model in this, where a window alone does not exceed it
RATIO_POSITIONS = 64  # of each window at once: what is injected into all layers is as large as the stream of all layers
ONCE_TOKENS = 32  # tokens that occur once, whose contexts are kept
ONCE_CONTEXT = 16  # most tokens of such a context: all of them together are one small forward
TILE_BYTES = 80  # what a column of one token id costs while pieces are merged: ten numbers in float64

DECILES = slice(0, NUM_DECILES)  # the groups of positions, side by side
WORDS = slice(NUM_DECILES, NUM_DECILES + len(WORD_POSITIONS))
ALL = slice(WORDS.stop, WORDS.stop + 1)
NUM_GROUPS = ALL.stop

Arrays = dict[str, np.ndarray]


def forward_tokens(config: TideConfig) -> int:
    """Tokens a forward. The model's sizes alone decide it: other batches round otherwise."""
    streams = 2 * (config.num_hidden_layers + 1) + config.num_memory_blocks  # a trace, while its streams are stacked
    return max(1, min(BATCH_TOKENS, TRACE_BYTES // (4 * config.hidden_size * streams)))


# --- One piece: sums over some windows ---------------------------------------------------------------------------


def columns(trace: Trace) -> torch.Tensor:
    """What is averaged, of every position and layer.

    Returns:
        [B, T, L, K+3] float32: the routing weights, null last; their entropy in nats; |m|/|h|. Where the stream is
        zero, as in layer 0 at a token whose embedding is, there is nothing to compare with, and the ratio counts as 0.
    """
    length = trace.input_ids.shape[1]
    stretches = [slice(start, start + RATIO_POSITIONS) for start in range(0, length, RATIO_POSITIONS)]
    ratio = torch.cat([trace.at(stretch).injection_ratio() for stretch in stretches], dim=1)
    ratio = torch.nan_to_num(ratio, nan=0.0, posinf=0.0)
    entropy = torch.special.entr(trace.routing).sum(dim=-1)
    return torch.cat([trace.routing, entropy.unsqueeze(-1), ratio.unsqueeze(-1)], dim=-1)


def group_members(input_ids: np.ndarray, deciles: np.ndarray, edges: TokenEdges) -> np.ndarray:
    """Which groups each position is in: [B, T, 10 deciles + 5 word positions + 1] bool, the last one all true."""
    decile, word = deciles[input_ids], word_positions(input_ids, edges)
    return np.concatenate(
        [
            decile[..., None] == np.arange(NUM_DECILES),
            word[..., None] == np.arange(len(WORD_POSITIONS)),
            np.ones((*input_ids.shape, 1), dtype=bool),
        ],
        axis=-1,
    )


def add_rows(sums: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """sums[rows[i]] += values[i], in an order that is always the same; `index_add_` has one on the CPU alone."""
    if sums.is_cuda:
        sums.index_put_((rows,), values, accumulate=True)
    else:
        sums.index_add_(0, rows, values)


def injection_sum(routing: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Sum over positions of alpha_k M_k(v), what every (layer, bank) injects (equation 3.6).

    Args:
        routing: [N, L, K+1] float64.
        memory: [N, K, d], on the same device.

    Returns:
        [L, K, d] float64.
    """
    _, num_banks, hidden_size = memory.shape
    total = routing.new_zeros(routing.shape[1], num_banks, hidden_size)
    for bank in range(num_banks):  # one at a time: all rows in float64 are as large as two traces
        total[:, bank] = routing[:, :, bank].T @ memory[:, bank].double()
    return total


@torch.no_grad()
def window_sums(
    model: TideForCausalLM,
    text: HeldOutText,
    windows: range,
    deciles: np.ndarray,
    edges: TokenEdges,
    blocks: Blocks,
    batch_tokens: int = BATCH_TOKENS,
    bar: tqdm | None = None,
) -> Tables:
    """Runs the model over some windows and adds up what it does.

    Args:
        model: a TIDE model; of a Base model all weight is on the null bank.
        text: every position counts, that of a document mark too.
        windows: neighbours.
        deciles: [V], frequency decile of every token id, -1 for none.
        edges: of every token id.
        blocks: of all windows of the text.
        batch_tokens: tokens a forward.
        bar: is moved on by the tokens.

    Returns:
        `tokens`: token_ids int64 [U] that occur, ascending; n int64 [U]; mean and deviations (sums of squared
        deviations from it) float32 [U, L, K+3], half of what sums in float64 would take.
        `groups`: blocks [b] and domains [f] int64 that the windows are of; of the 16 groups of positions total float64
        [b, 16, L, K+3], n int64 [b, 16] and squares float64 [f, 16, L, K+3]; injection float64 [L, K, d].
    """
    config = model.config
    # float64 sums need a device that has float64, which Apple's GPUs do not.
    place = model.device if model.device.type == "cuda" else torch.device("cpu")
    shape = (config.num_hidden_layers, config.num_memory_blocks + 3)
    first, last = windows[0], windows[-1]
    stretch = text.read(text.window_starts[first], text.window_starts[last] + text.window_lengths[last])
    token_ids, n = np.unique(stretch, return_counts=True)
    of_block, block_of = np.unique(blocks.of_window[windows], return_inverse=True)
    of_domain, domain_of = np.unique(text.window_domains[windows], return_inverse=True)

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.float64, device=place)

    width = shape[0] * shape[1]
    token_total, token_squares = zeros(len(token_ids), width), zeros(len(token_ids), width)
    group_total, group_squares = zeros(len(of_block), NUM_GROUPS, width), zeros(len(of_domain), NUM_GROUPS, width)
    group_n = np.zeros((len(of_block), NUM_GROUPS), dtype=np.int64)
    injection = zeros(shape[0], config.num_memory_blocks, config.hidden_size)
    for batch in text.batches(windows, batch_tokens):
        trace = model.trace(torch.from_numpy(batch.input_ids).to(model.device), with_logits=False, with_parts=False)
        values = columns(trace).to(place).double()  # (B, T, L, K+3)
        injection += injection_sum(values.flatten(0, 1)[..., :-2], trace.memory.flatten(0, 1).to(place))
        values = values.flatten(2)
        members = group_members(batch.input_ids, deciles, edges)
        at = batch.windows - first
        np.add.at(group_n, block_of[at], members.sum(axis=1))
        inside = torch.from_numpy(members).to(place).double().mT  # (B, 16, T)
        rows, into_block, into_domain = (
            torch.from_numpy(index).to(place)
            for index in (np.searchsorted(token_ids, batch.input_ids.reshape(-1)), block_of[at], domain_of[at])
        )
        add_rows(token_total, rows, values.flatten(0, 1))
        add_rows(group_total, into_block, inside @ values)
        values.square_()
        add_rows(token_squares, rows, values.flatten(0, 1))
        add_rows(group_squares, into_domain, inside @ values)
        if bar is not None:
            bar.update(batch.input_ids.size)

    total, squares = (sums.unflatten(1, shape).cpu().numpy() for sums in (token_total, token_squares))
    mean, deviations = (moment.astype(np.float32) for moment in moments(total, squares, n))
    groups = {
        "blocks": of_block,
        "domains": of_domain,
        "total": group_total.unflatten(2, shape).cpu().numpy(),
        "n": group_n,
        "squares": group_squares.unflatten(2, shape).cpu().numpy(),
        "injection": injection.cpu().numpy(),
    }
    return {"tokens": {"token_ids": token_ids, "n": n, "mean": mean, "deviations": deviations}, "groups": groups}


# --- All pieces --------------------------------------------------------------------------------------------------


def split(prefix: str, what: str, values: np.ndarray) -> Arrays:
    """Columns [..., L, K+3] as the three float32 arrays that are stored: weights [..., L, K+1], the others [..., L]."""
    parts = {"": values[..., :-2], "entropy_": values[..., -2], "injection_ratio_": values[..., -1]}
    return {f"{prefix}{measure}{what}": part.astype(np.float32) for measure, part in parts.items()}


def token_statistics(pieces: Sequence[Path], vocab_size: int, shape: tuple[int, int], tile: int) -> Arrays:
    """Mean and deviation by token id.

    Args:
        pieces: files `tokens` of `window_sums`, in the order of the text.
        vocab_size: V.
        shape: (L, K+3).
        tile: token ids at once; another number gives the same.

    Returns:
        n int64 [V]; mean, sd float32 [V, L, K+1]; entropy_mean, entropy_sd, injection_ratio_mean, injection_ratio_sd
        [V, L]. A mean of no position and a deviation of fewer than two are NaN.
    """
    arrays: Arrays = {"n": np.zeros(vocab_size, dtype=np.int64)}
    for start in range(0, vocab_size, tile):
        stop = min(start + tile, vocab_size)
        merged = Moments(stop - start, shape)
        for file in pieces:
            with safe_open(file, framework="np") as stored:
                token_ids = stored.get_tensor("token_ids")
                a, b = np.searchsorted(token_ids, [start, stop])
                if a < b:  # safetensors does not slice nothing
                    n, mean, deviations = (stored.get_slice(name)[a:b] for name in ("n", "mean", "deviations"))
                    merged.merge(token_ids[a:b] - start, n, mean, deviations)
        arrays["n"][start:stop] = merged.n
        merged.mean[merged.n == 0] = np.nan
        sd = sample_deviation(merged.deviations, merged.n)
        for name, part in {**split("", "mean", merged.mean), **split("", "sd", sd)}.items():
            if name not in arrays:
                arrays[name] = np.empty((vocab_size, *part.shape[1:]), dtype=np.float32)
            arrays[name][start:stop] = part
    return arrays


def group_statistics(
    pieces: Iterable[Arrays],
    blocks: Blocks,
    num_domains: int,
    sizes: tuple[int, int, int],
    replicates: int = REPLICATES,
) -> Arrays:
    """Mean, deviation and interval of every group of positions, and the mean injection.

    Args:
        pieces: arrays `groups` of `window_sums`, in the order of the text.
        blocks: of its windows.
        num_domains: D, held-out texts.
        sizes: (L, K, d).
        replicates: of the bootstrap.

    Returns:
        With NAME decile (G = 10), word (G = 5, `WORD_POSITIONS`), domain (G = D) and overall (no G): NAME_mean, _sd,
        _low, _high float32 [G, L, K+1], NAME_entropy_mean, NAME_injection_ratio_mean and so on [G, L], NAME_n int64
        [G], of overall [1]. mean_injection float32 [L, K, d].
    """
    num_layers, num_banks, hidden_size = sizes
    shape = (num_layers, num_banks + 3)
    total, squares = np.zeros((len(blocks), NUM_GROUPS, *shape)), np.zeros((num_domains, NUM_GROUPS, *shape))
    n, injection = np.zeros((len(blocks), NUM_GROUPS), dtype=np.int64), np.zeros((num_layers, num_banks, hidden_size))
    for piece in pieces:
        total[piece["blocks"]] += piece["total"]
        n[piece["blocks"]] += piece["n"]
        squares[piece["domains"]] += piece["squares"]
        injection += piece["injection"]

    def described(groups: slice, domains: slice = slice(0, num_domains)) -> Arrays:
        """Some groups, over the positions of some held-out texts."""
        inside = (blocks.domains >= domains.start) & (blocks.domains < domains.stop)
        sums, positions = total[inside, groups], n[inside, groups]
        count = positions.sum(axis=0)
        mean, deviations = moments(sums.sum(axis=0), squares[domains, groups].sum(axis=0), count)
        low, high = block_intervals(sums, positions, blocks.domains[inside], replicates)
        return {"n": count, "mean": mean, "sd": sample_deviation(deviations, count), "low": low, "high": high}

    by_domain = [described(ALL, slice(domain, domain + 1)) for domain in range(num_domains)]
    found = {
        "decile": described(DECILES),
        "word": described(WORDS),
        "domain": {what: np.concatenate([each[what] for each in by_domain]) for what in by_domain[0]},
    }
    overall = described(ALL)
    arrays = {"overall_n": overall.pop("n"), "mean_injection": (injection / n[:, ALL].sum()).astype(np.float32)}
    for what, values in overall.items():
        arrays |= split("overall_", what, values[0])
    for name, statistics in found.items():
        arrays[f"{name}_n"] = statistics.pop("n")
        for what, values in statistics.items():
            arrays |= split(f"{name}_", what, values)
    return arrays


def contexts_of_once(text: HeldOutText, n: np.ndarray, seed: int = SEED) -> np.ndarray:
    """Contexts of some random tokens that occur once: there, a token's mean routing is that of a single position.

    Taken from the beginning of windows, so that the context is short and the forward that repeats it cheap. The text
    is read a piece at a time.

    Args:
        text: what the model read.
        n: [V], occurrences of each token id in it.
        seed: of the choice.

    Returns:
        [P, ONCE_CONTEXT] int32, P up to ONCE_TOKENS: the window's tokens up to and with the one that occurs once, the
        rest -1; in the order of the text.
    """
    found = []  # (start of the window, place of the token), at most V of them
    for piece in text.pieces():
        windows = text.windows_of(piece)
        starts, lengths = text.window_starts[windows], text.window_lengths[windows]
        begins = np.repeat(starts, lengths)
        places = np.arange(starts[0], starts[0] + len(begins))
        once = (n[text.read(places[0], places[-1] + 1)] == 1) & (places - begins < ONCE_CONTEXT)
        found.append(np.stack([begins[once], places[once]], axis=1))
    candidates = np.concatenate(found)
    chosen = np.random.default_rng(seed).choice(len(candidates), min(ONCE_TOKENS, len(candidates)), replace=False)
    contexts = np.full((len(chosen), ONCE_CONTEXT), -1, dtype=np.int32)
    for context, (start, place) in zip(contexts, candidates[np.sort(chosen)].tolist(), strict=True):
        context[: place - start + 1] = text.read(start, place + 1)
    return contexts


class Routing(Stage):
    """The routers over the held-out text; a piece is a run of windows."""

    name = "routing"
    needs = ("text", "frequency")

    def inputs(self, context: Context) -> dict[str, Any]:
        """How positions are batched, grouped and drawn."""
        return {
            "batch_tokens": forward_tokens(context.config),
            "most_blocks": MAX_BLOCKS,
            "replicates": REPLICATES,
            "seed": SEED,
            "once": [ONCE_TOKENS, ONCE_CONTEXT],
            "word_positions": list(WORD_POSITIONS),
        }

    def pieces(self, context: Context) -> Sequence[str]:
        """Runs of windows."""
        return context.text.pieces()

    def measure(self, context: Context, piece: str) -> Tables:
        """`window_sums`."""
        text, vocabulary = context.text, context.vocabulary
        windows, blocks = text.windows_of(piece), Blocks.of(text.window_domains)
        edges = TokenEdges.of(vocabulary.texts, vocabulary.special_ids)
        with context.bar(int(text.window_lengths[windows].sum()), "routing", "tokens") as bar:
            return window_sums(
                context.model, text, windows, context.deciles, edges, blocks, forward_tokens(context.config), bar
            )

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`routing`: `token_statistics`, `group_statistics`, and `contexts_of_once` as once_contexts."""
        config, text = context.config, context.text
        num_layers, num_banks = config.num_hidden_layers, config.num_memory_blocks
        tile = context.rows_within(TILE_BYTES * num_layers * (num_banks + 3), most=config.vocab_size)
        files = [parts.file(piece, "tokens.safetensors") for piece in parts.pieces]
        arrays = token_statistics(files, config.vocab_size, (num_layers, num_banks + 3), tile)
        arrays |= group_statistics(
            (parts.tensors(piece, "groups") for piece in parts.pieces),
            Blocks.of(text.window_domains),
            len(text.domains),
            (num_layers, num_banks, config.hidden_size),
        )
        return {"routing": {**arrays, "once_contexts": contexts_of_once(text, arrays["n"])}}
