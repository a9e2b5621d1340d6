"""Which tables an export has.

A new stage brings its tables by entries in `TABLES`, by functions in `precompute.export.frames` where a table is not
stored as it is, and by words in `COLUMNS` for columns that have no meaning yet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from precompute.artifacts import Artifacts
from precompute.export import frames
from precompute.export.columns import COLUMNS


@dataclass(frozen=True)
class ExportTable:
    """One table.

    Attributes:
        stage: that measured it.
        about: what a row is, in one clause.
        frames: makes it of the artifacts; parts have the same columns and types, and there is at least one.
        columns: meanings that are not those of `COLUMNS`.
    """

    stage: str
    about: str
    frames: Callable[[Artifacts], frames.Frames]
    columns: Mapping[str, str] = field(default_factory=dict)

    def meaning(self, column: str) -> str:
        """What a column means.

        Raises:
            KeyError: where nobody has said.
        """
        return self.columns.get(column) or COLUMNS[column]


_SUMMED = {
    "mean": "mean routing weight, 0 to 1",
    "n": "positions of the held-out text",
}
_GROUPS = {
    "by": "`all` (all positions), `decile` (of the token), `domain` (the text) or `word` (the place in the word)",
    "n": "positions of the held-out text",
}
_DIFFERENCES = {
    "n": "positions",
    "loss": "mean cross entropy, nats",
    "difference": "from the unchanged model on the same positions, mean, nats",
    "sd": "sample standard deviation of the difference over positions",
    "low": "lower end of the 95 % interval of the difference, by a bootstrap over windows",
    "perplexity_change_percent": "100 (exp(difference) - 1)",
}
_LOSSES = {"mean": "mean cross entropy, nats", "n": "positions"}

TABLES: dict[str, ExportTable] = {
    "text": ExportTable("text", "a token of the held-out text, in order", frames.text, {"domain": "the held-out text"}),
    "tokens": ExportTable(
        "frequency",
        "a token id",
        frames.stored("frequency", "tokens"),
        {
            "text": "decoded text; bytes that are no whole character are U+FFFD",
            "shown": "the text with white space and control characters made visible",
            "special": "whether it is a special token",
        },
    ),
    "routing_by_token": ExportTable(
        "routing",
        "a (token id, layer, bank) of the tokens that the held-out text holds",
        frames.routing_by_token,
        _SUMMED,
    ),
    "routing_measures_by_token": ExportTable(
        "routing",
        "a (measure, token id, layer) of the tokens that the held-out text holds",
        frames.routing_measures_by_token,
        {
            "measure": "`entropy` of the routing weights, nats; `injection_ratio`, |m| / |h|",
            "n": "positions of the held-out text",
        },
    ),
    "routing_by_group": ExportTable(
        "routing",
        "a (group of positions, layer, bank)",
        frames.by_group(Artifacts.routing_groups),
        {**_GROUPS, "mean": "mean routing weight, 0 to 1"},
    ),
    "routing_measures_by_group": ExportTable(
        "routing",
        "a (group of positions, layer, measure)",
        frames.by_group(Artifacts.routing_measures),
        {**_GROUPS, "measure": "`entropy` of the routing weights, nats; `injection_ratio`, |m| / |h|"},
    ),
    "mean_injection": ExportTable(
        "routing",
        "a (layer, bank, dimension)",
        frames.mean_injection,
        {"dimension": "of the residual stream, 0-based", "mean": "of alpha_k M_k(v) over all positions"},
    ),
    "top_contexts": ExportTable(
        "specialisation",
        "one of the positions where a (layer, bank) is strongest",
        frames.top_contexts,
        {
            "by": "what the list is ordered by: `weight` or `size`",
            "rank": "place in the list, 1 the strongest",
            "before": "tokens before it in its window",
        },
    ),
    "null_contexts": ExportTable(
        "specialisation",
        "the position where a token's null weight in a layer is lowest, or highest",
        frames.null_contexts,
        {
            "end": "`lowest` or `highest`",
            "layer": "decoder layer, 0-based; -1 the mean over all layers",
            "null_weight": "routing weight of the null bank there",
            "n": "positions of the token that were compared",
        },
    ),
    "mass_split": ExportTable(
        "specialisation",
        "a (layer, bank, group of positions)",
        frames.mass_split,
        {
            "of": "what is split: routing `weight`, or `size` of the injection",
            "by": "`decile` of the token, `domain`, `kind` of token, or tokens `before` it in the window",
            "share": "of the bank's total in this layer",
            "share_of_positions": "of all positions",
            "lift": "share / share_of_positions",
            "n": "positions of the group",
        },
    ),
    "token_kinds": ExportTable("specialisation", "a token id", frames.token_kinds),
    "neighbors": ExportTable(
        "neighbors",
        "a (table, token id, rank): the nearest tokens by cosine, the token itself left out",
        frames.neighbors,
        {
            "rank": "1 the nearest",
            "neighbor_id": "token id of the neighbour",
            "cosine": "cosine similarity, -1 to 1; of a bank between the vectors M_k(v)",
        },
    ),
    "index_recall": ExportTable(
        "neighbors",
        "a (table, k): how exact the stored lists are",
        frames.stored("neighbors", "recall"),
        {
            "k": "the nearest that are compared",
            "recall": "share of the exact neighbours that the lists hold",
            "n": "tokens that were checked",
        },
    ),
    "overlap": ExportTable(
        "overlap",
        "a (token id, table): its neighbours there and in the input embedding",
        frames.overlap,
        {
            "jaccard": "Jaccard overlap of the 10 nearest, 0 to 1",
            "rbo": "rank-biased overlap of all neighbours that are stored, 0 to 1",
        },
    ),
    "overlap_between": ExportTable(
        "overlap",
        "every two tables, over the tokens of a decile",
        frames.stored("overlap", "pairs"),
        {
            "measure": "`jaccard` of the 10 nearest, or `rbo`, rank-biased overlap of all that are stored",
            "decile": "frequency decile, -1 tokens without one; null all tokens",
            "mean": "mean overlap, 0 to 1",
            "n": "token ids",
        },
    ),
    "cosine_distance": ExportTable(
        "geometry",
        "every two tables, over the tokens of a group",
        frames.cosine_distance,
        {
            "group": "frequency decile, -1 tokens without one, or `all`",
            "mean": "mean of 1 - cosine of the two rows of a token",
            "n": "token ids",
        },
    ),
    "row_norms": ExportTable(
        "geometry",
        "a (table, decile)",
        frames.stored("geometry", "norms"),
        {
            "mean": "mean L2 norm of the rows, of a bank those that are stored",
            "n": "token ids",
            **{f"q{percent:02d}": f"{percent} % quantile" for percent in (5, 25, 50, 75, 95)},
        },
    ),
    "norms": ExportTable(
        "geometry",
        "a (token id, table)",
        frames.norms,
        {"norm": "L2 norm of the row, of a bank the one that is stored"},
    ),
    "spectrum": ExportTable(
        "geometry",
        "a singular value of a table",
        frames.spectrum,
        {
            "singular_value": "singular value",
            "share": "of the sum of squares, or of the variance",
            "centered": "whether the mean row was taken away before",
        },
    ),
    "effective_rank": ExportTable(
        "geometry",
        "a table, as it is or without its mean row",
        frames.stored("geometry", "ranks"),
        {
            "centered": "whether the mean row was taken away before",
            "effective_rank": "exponential of the entropy of the singular values",
            "participation_ratio": "1 over the sum of squared shares of the variance",
            **{f"top_{m}": f"share of the variance in the first {m} directions" for m in (1, 10, 100)},
        },
    ),
    "principal_cosines": ExportTable(
        "geometry",
        "a principal angle between the leading directions of two tables",
        frames.principal_cosines,
        {"cosine": "of the angle: 1 is a direction in common"},
    ),
    "maps": ExportTable(
        "maps",
        "a (table, token id): its place in the table's map",
        frames.maps,
        {
            "x": "in standard deviations of the input embedding's map",
            "y": "likewise; places in different maps compare",
        },
    ),
    "movement": ExportTable(
        "maps",
        "a (token id, table)",
        frames.movement,
        {"distance": "from its place in the input embedding's map, in standard deviations of that"},
    ),
    "trustworthiness": ExportTable(
        "maps",
        "a table: how far its map's neighbours are neighbours in the table",
        frames.trustworthiness,
        {"mean": "1 where they are the same, 0.5 at random", "n": "tokens of the sample"},
    ),
    "collapse": ExportTable(
        "collapse",
        "a (pair of words, template, model, layer)",
        frames.stored("collapse"),
        {
            "layer": "0 the embedding, l the residual stream after decoder layer l - 1",
            "l2": "L2 distance of the two hidden states",
            "normalized_l2": "the same of the vectors scaled to length one",
            "cosine_distance": "1 - cosine",
            "relative_l2": "L2 distance over that between the states of one word in different templates",
        },
    ),
    "collapse_pairs": ExportTable(
        "collapse",
        "a pair of words",
        frames.stored("collapse", "pairs"),
        {
            "word_a": "first word",
            "word_b": "second word",
            "tokens_a": "tokens of the first word",
            "tokens_b": "tokens of the second word",
        },
    ),
    "collapse_probe": ExportTable(
        "collapse",
        "a (pair of words, model, layer): a linear probe of which word a hidden state stands at",
        frames.stored("collapse", "probe"),
        {
            "layer": "0 the embedding, l the residual stream after decoder layer l - 1",
            "pair_accuracy": "share of the sentences in which the probe tells the two words apart; chance is 0.5",
            "d_prime": "distance between the scores of the two words in units of their spread over sentences",
            "identity_accuracy": "share of the sentences in which it finds the word among all words of the category",
            "words": "words of the category; chance of identity_accuracy is 1 over them",
            "sentences": "sentences that were tested",
        },
    ),
    "ablation": ExportTable(
        "ablation",
        "a (part of the memory that is off, replacement, text, bin)",
        frames.stored("ablation"),
        {
            "kind": "what is off: `layer`, `bank` (in all layers), `pair` (one bank in one layer), `all`, or `none`",
            "layer": "decoder layer, 0-based; -1 for all",
            "bank": "memory bank, 0-based; -1 for all",
            "replacement": "what stands in: `zero`, `mean` (over the text), `random` (as long, in a random direction)",
            **_DIFFERENCES,
        },
    ),
    "compression": ExportTable(
        "compression",
        "a (form of the memory, text, bin)",
        frames.stored("compression"),
        {
            "form": "`none`, `int8`, `int4`, or `svd-p`, p percent of the ranks taken away",
            "bits": "of a number, scales not counted",
            "percent": "of the ranks taken away; -1 where there is no SVD",
            "rank": "ranks that stay; -1 where there is no SVD",
            "bytes": "of the whole memory, scales counted",
            "error": "|E' - E| / |E| over all banks, Frobenius norms",
            **_DIFFERENCES,
        },
    ),
    "rare_token_losses": ExportTable(
        "rare_tokens", "a (model, text, bin)", frames.stored("rare_tokens", "losses"), _LOSSES
    ),
    "rare_token_differences": ExportTable(
        "rare_tokens",
        "a (text, bin): Base minus TIDE on the same positions",
        frames.stored("rare_tokens", "differences"),
        {"mean": "mean difference of the cross entropy, nats; above 0 where TIDE predicts better", "n": "positions"},
    ),
    "history_routing": ExportTable(
        "history", "a (step, layer, decile, bank)", frames.stored("history", "routing"), {**_SUMMED, "n": "positions"}
    ),
    "history_norms": ExportTable(
        "history",
        "a (step, table, decile)",
        frames.stored("history", "norms"),
        {"mean": "mean L2 norm of the rows, of a bank those that are stored", "n": "token types"},
    ),
    "history_losses": ExportTable("history", "a (step, decile)", frames.stored("history", "losses"), _LOSSES),
    "history_gradients": ExportTable(
        "history",
        "a (step, table, decile)",
        frames.stored("history", "gradients"),
        {
            "table": "`embedding` (through its lookup), `embedding_parameter` (with what a tied unembedding adds), "
            "`bank_k`, or `total`, all lookups together",
            "mean": "mean squared gradient norm of a row, summed over the steps so far",
            "n": "token types",
        },
    ),
}
"""By name of the file. A table whose stage was not run is left out of an export."""
