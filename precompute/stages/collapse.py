"""Stage `collapse`: how far apart the hidden states of two words in the same sentence are (figures 2 and 6).

The paper shows L2 distances, which depend on the scale of the hidden states; beside them stand, ours, the L2 distance
of the vectors scaled to length one, the cosine distance, the L2 distance in units of the spread that the sentence
brings, and a linear probe of identity (`precompute.identity_probe`). Templates and pairs are ours too
(assets/templates).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from precompute.identity_probe import REPEATS, SEED, half_splits, probe_words
from precompute.parts import Parts
from precompute.stage import Context, Stage
from precompute.store import Tables
from tide.cli import UserError
from tide.model import TideForCausalLM

BATCH_SENTENCES = 64
SLOT = "{}"


@dataclass(frozen=True)
class Category:
    """One category of the study.

    Attributes:
        name: shown to the reader.
        pairs: the two words of each pair.
        templates: sentences with one `{}`.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    templates: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """W words, every word of the pairs once."""
        return tuple(dict.fromkeys(word for pair in self.pairs for word in pair))

    @property
    def pair_numbers(self) -> np.ndarray:
        """[P, 2] int64, where the words of each pair stand among `words`."""
        place = {word: number for number, word in enumerate(self.words)}
        return np.array([[place[word] for word in pair] for pair in self.pairs])


def read_study(file: Path) -> list[Category]:
    """Reads the templates of the study; assets/templates/README.md says their form.

    Raises:
        UserError: one sentence, when the file is missing or has another form.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["categories"]
        study = [
            Category(entry["name"], tuple((a, b) for a, b in entry["pairs"]), tuple(entry["templates"]))
            for entry in entries
        ]
    except OSError as error:
        raise UserError(f"The templates {file} cannot be read ({error.strerror}); give --templates FILE.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} has not the form of assets/templates/README.md; give another --templates FILE."
        ) from error
    for category in study:
        if bad := next((t for t in category.templates if t.count(SLOT) != 1), None):
            raise UserError(f"{file} has a template without exactly one {SLOT}: {bad!r}; correct it.")
        if not category.pairs or not category.templates:
            raise UserError(f"{file} has a category without pairs or templates, {category.name!r}; add some.")
    return study


@dataclass(frozen=True)
class Sentence:
    """A template with a word in it.

    Attributes:
        ids: token ids, the document mark in front.
        position: index in `ids` of the word's last token.
        word_tokens: number of tokens that hold characters of the word.
    """

    ids: list[int]
    position: int
    word_tokens: int


def fill(template: str, word: str, tokenizer: PreTrainedTokenizerFast) -> Sentence:
    """Puts a word into a template and finds its last token.

    Raises:
        UserError: when the tokenizer makes no token of the word.
    """
    start = template.index(SLOT)
    encoded = tokenizer(template.replace(SLOT, word), return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(spans) if a < b and a < start + len(word) and b > start]
    if not inside:
        raise UserError(f"The tokenizer makes no token of {word!r} in {template!r}; change the templates.")
    return Sentence(encoded["input_ids"], inside[-1], len(inside))


@torch.no_grad()
def word_states(
    model: TideForCausalLM, sentences: Sequence[Sentence], batch_size: int = BATCH_SENTENCES, bar: tqdm | None = None
) -> torch.Tensor:
    """The residual stream at the word of each sentence.

    Args:
        model: any K.
        sentences: N of them.
        batch_size: sentences a forward. They are padded on the right, where causal attention does not look.
        bar: is moved on by one a sentence.

    Returns:
        [N, L+1, d] float32 on the CPU: the embedding, then the stream after each layer.
    """
    out = []
    for start in range(0, len(sentences), batch_size):
        batch = sentences[start : start + batch_size]
        longest = max(len(s.ids) for s in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, sentence in enumerate(batch):
            input_ids[row, : len(sentence.ids)] = torch.tensor(sentence.ids)
            mask[row, : len(sentence.ids)] = 1
        trace = model.trace(
            input_ids.to(model.device), attention_mask=mask.to(model.device), with_logits=False, with_parts=False
        )
        positions = torch.tensor([s.position for s in batch], device=model.device)
        out.append(trace.hidden[torch.arange(len(batch), device=model.device), positions].float().cpu())
        if bar is not None:
            bar.update(len(batch))
    return torch.cat(out)


def category_states(
    model: TideForCausalLM, tokenizer: PreTrainedTokenizerFast, category: Category, bar: tqdm | None = None
) -> torch.Tensor:
    """The residual stream at every word of a category in every template.

    Args:
        model: TIDE or Base.
        tokenizer: the model's.
        category: of the study.
        bar: is moved on by one a sentence.

    Returns:
        [W, T, L+1, d] float32 on the CPU, in the order of `category.words`.
    """
    sentences = [fill(template, word, tokenizer) for word in category.words for template in category.templates]
    states = word_states(model, sentences, bar=bar)
    return states.view(len(category.words), len(category.templates), *states.shape[1:])


def distances(a: torch.Tensor, b: torch.Tensor) -> dict[str, np.ndarray]:
    """Three distances between vectors [..., d]: each [...] float64.

    l2 is the length of the difference, normalized_l2 the same of the vectors scaled to length one, cosine_distance is
    1 - cosine.
    """
    a, b = a.double(), b.double()
    unit_a, unit_b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return {
        "l2": (a - b).norm(dim=-1).numpy(),
        "normalized_l2": (unit_a - unit_b).norm(dim=-1).numpy(),
        "cosine_distance": (1 - (unit_a * unit_b).sum(dim=-1)).numpy(),
    }


def context_spread(states: torch.Tensor) -> np.ndarray:
    """Mean L2 distance between the states of one word in two different templates.

    Args:
        states: [W, T, L+1, d].

    Returns:
        [W, L+1] float64; NaN for a single template.
    """
    count = states.shape[1]
    if count < 2:
        return np.full((states.shape[0], states.shape[2]), np.nan)
    layers = [states[:, :, layer].double() for layer in range(states.shape[2])]
    exact = "donot_use_mm_for_euclid_dist"  # equal states are at distance 0
    sums = [torch.cdist(x, x, compute_mode=exact).sum(dim=(1, 2)).numpy() for x in layers]
    return np.stack(sums, axis=1) / (count * (count - 1))


def distance_table(states: torch.Tensor, category: Category, label: str) -> pd.DataFrame:
    """Distances between the two words of every pair of a category in every template, by layer.

    Args:
        states: [W, T, L+1, d] from `category_states`.
        category: of the study.
        label: name of the model in the table.

    Returns:
        One row a (pair, template, layer): category, pair, template (its number in the category), model, layer (0 the
        embedding, l after decoder layer l-1), l2, normalized_l2, cosine_distance, and relative_l2, l2 over the mean
        `context_spread` of both words: 1 where another word moves the state as far as another sentence does; NaN
        where the states do not vary over templates, as in the embedding.
    """
    _, templates, layers, _ = states.shape
    pairs = category.pair_numbers
    found = distances(*(states[pairs[:, side]] for side in (0, 1)))  # (P, T, L+1) each
    spread = context_spread(states)[pairs].mean(axis=1)[:, None]  # (P, 1, L+1)
    found["relative_l2"] = np.divide(found["l2"], spread, out=np.full_like(found["l2"], np.nan), where=spread > 0)
    columns = {
        "category": category.name,
        "pair": np.repeat([pair_name(pair) for pair in category.pairs], templates * layers),
        "template": np.tile(np.repeat(np.arange(templates, dtype=np.int32), layers), len(pairs)),
        "model": label,
        "layer": np.tile(np.arange(layers, dtype=np.int32), len(pairs) * templates),
    }
    return pd.DataFrame({**columns, **{name: values.reshape(-1) for name, values in found.items()}})


def probe_table(states: torch.Tensor, category: Category, label: str, bar: tqdm | None = None) -> pd.DataFrame:
    """How well a linear probe tells the words of a category apart in templates that it has not seen, by layer.

    Args:
        states: [W, T, L+1, d] from `category_states`.
        category: of the study.
        label: name of the model in the table.
        bar: is moved on by one a layer.

    Returns:
        One row a (layer, pair): category, pair, model, layer, pair_accuracy, d_prime, identity_accuracy
        (`probe_words`), words (W, all of the category), sentences (of the pair, on which it was tested).
    """
    rows = []
    tested = 2 * states.shape[1] if half_splits(states.shape[1]) else 0
    for layer in range(states.shape[2]):
        measured = probe_words(states[:, :, layer].numpy(), category.pair_numbers)
        columns = {"category": category.name, "pair": [pair_name(pair) for pair in category.pairs], "model": label}
        counts = {"words": len(category.words), "sentences": tested}
        rows.append(pd.DataFrame({**columns, "layer": np.int32(layer), **measured, **counts}))
        if bar is not None:
            bar.update(1)
    return pd.concat(rows, ignore_index=True)


def pair_name(pair: tuple[str, str]) -> str:
    """How a pair is named: "their / there"."""
    return f"{pair[0]} / {pair[1]}"


def pair_table(study: Sequence[Category], tokenizer: PreTrainedTokenizerFast) -> pd.DataFrame:
    """The pairs, and the number of tokens of each word in its category's first template.

    Returns:
        Columns category, pair, word_a, word_b, tokens_a, tokens_b.
    """
    rows = [
        (c.name, pair_name((a, b)), a, b, *(fill(c.templates[0], word, tokenizer).word_tokens for word in (a, b)))
        for c in study
        for a, b in c.pairs
    ]
    return pd.DataFrame(rows, columns=["category", "pair", "word_a", "word_b", "tokens_a", "tokens_b"])


class Collapse(Stage):
    """One piece a model: TIDE, and Base where there is one."""

    name = "collapse"
    format = 2  # 1 had no relative_l2 and no probe

    def check(self, context: Context) -> None:
        """Reads the templates.

        Raises:
            UserError: as `read_study`.
        """
        read_study(context.job.templates)

    def inputs(self, context: Context) -> dict[str, Any]:
        """The templates, the Base checkpoint, and how the probe is tested."""
        base = context.base_entry()
        return {**self.parameters(context), "base": base["fingerprint"] if base else None}

    def parameters(self, context: Context) -> dict[str, Any]:
        """The templates by name, and how the probe is tested."""
        file = context.job.templates
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:32]
        return {
            "templates": {"name": file.name, "fingerprint": content},
            "probe": {"repeats": REPEATS, "seed": SEED},
        }

    def top(self, context: Context) -> dict[str, Any]:
        """The Base checkpoint."""
        return {"base": context.base_entry()}

    def pieces(self, context: Context) -> Sequence[str]:
        """The models."""
        return ("tide",) if context.job.base is None else ("tide", "base")

    def measure(self, context: Context, piece: str) -> Tables:
        """`collapse`, every category's `distance_table`, and `probe`, its `probe_table`, of one model."""
        model, tokenizer = (context.model, context.tokenizer) if piece == "tide" else context.base
        collapse, probe = [], []
        for category in read_study(context.job.templates):
            what = f"collapse, {piece}, {category.name}"
            with context.bar(len(category.words) * len(category.templates), what, "sentences") as bar:
                states = category_states(model, tokenizer, category, bar)
            collapse.append(distance_table(states, category, piece))
            with context.bar(states.shape[2], f"{what}, probe", "layers") as bar:
                probe.append(probe_table(states, category, piece, bar))
        return {"collapse": pd.concat(collapse, ignore_index=True), "probe": pd.concat(probe, ignore_index=True)}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`collapse` and `probe` of all models, and `pairs`: `pair_table`, in the tokens of TIDE."""
        study = read_study(context.job.templates)
        return {
            name: pd.concat([parts.frame(piece, name) for piece in parts.pieces], ignore_index=True)
            for name in ("collapse", "probe")
        } | {"pairs": pair_table(study, context.tokenizer)}
