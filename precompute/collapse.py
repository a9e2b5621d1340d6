"""Stage `collapse`: how far apart the hidden states of two words in the same sentence are (figures 2 and 6).

The paper shows L2 distances, which depend on the scale of the hidden states; beside them stand, ours, the L2 distance
of the vectors scaled to length one and the cosine distance. Templates and pairs are ours too (assets/templates).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

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


def collapse_distances(
    model: TideForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    study: Sequence[Category],
    label: str,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Distances between the two words of every pair in every template of its category, by layer.

    Args:
        model: TIDE or Base.
        tokenizer: the model's.
        study: the categories.
        label: name of the model in the table.
        show_progress: draw a progress bar.

    Returns:
        One row a (pair, template, layer): category, pair, template (its number in the category), model, layer (0 the
        embedding, l after decoder layer l-1), l2, normalized_l2, cosine_distance.
    """
    keys = [(c.name, pair, t) for c in study for pair in c.pairs for t in range(len(c.templates))]
    templates = {c.name: c.templates for c in study}
    sentences = [fill(templates[name][t], pair[side], tokenizer) for side in (0, 1) for name, pair, t in keys]
    with tqdm(total=len(sentences), desc=f"collapse, {label}", unit=" sentences", disable=not show_progress) as bar:
        a, b = word_states(model, sentences, bar=bar).chunk(2)  # (pairs * templates, L+1, d) each
    layers = a.shape[1]
    columns = {
        "category": np.repeat([name for name, _, _ in keys], layers),
        "pair": np.repeat([pair_name(pair) for _, pair, _ in keys], layers),
        "template": np.repeat(np.array([t for _, _, t in keys], dtype=np.int32), layers),
        "model": label,
        "layer": np.tile(np.arange(layers, dtype=np.int32), len(keys)),
    }
    return pd.DataFrame({**columns, **{name: values.reshape(-1) for name, values in distances(a, b).items()}})


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


def collapse_tables(
    models: Mapping[str, tuple[TideForCausalLM, PreTrainedTokenizerFast]],
    study: Sequence[Category],
    show_progress: bool = True,
) -> Tables:
    """The whole stage.

    Args:
        models: "tide" and, where there is one, "base": each with its tokenizer.
        study: the categories.
        show_progress: draw progress bars.

    Returns:
        `collapse`: `collapse_distances` of every model. `pairs`: `pair_table`, in the tokens of "tide".
    """
    rows = [collapse_distances(*models[label], study, label, show_progress) for label in models]
    return {"collapse": pd.concat(rows, ignore_index=True), "pairs": pair_table(study, models["tide"][1])}
