r"""Writes the model card of the demo checkpoints from their own files: `python -m assets.model_card`.

Needs `evaluation.json` beside the checkpoints, the report.json of

    tide-evaluate assets/demo/tide-8e --base assets/demo/base --text corpus --out OUT

and shows `evaluation-10m.json`, the same of models that differ in the number of banks alone, where that exists.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from tide import ParameterBudget, TideConfig
from tide.evaluation.bins import REPEATS
from tide.evaluation.printing import verdicts
from tide.evaluation.report import read_report
from tide.frequency import GROUPS
from tide.training.summaries import read_summaries

FOLDER = Path(__file__).parent / "demo"
CHECKPOINTS = {"base": 0, "tide-8e": 8}
DOMAINS = {
    "heldout_wikitext_like.txt": "whole Wikipedia articles",
    "heldout_wiki_lead.txt": "Wikipedia lead paragraphs",
    "heldout_biomed_like.txt": "definitions of diseases (MONDO)",
    "heldout_books.txt": "*Pride and Prejudice*",
    "heldout_tech.txt": "Linux kernel documentation",
    "heldout_web.txt": "speeches in the House of Commons",
    "all": "all of them",
}

CARD = """# Demo checkpoints

Base (K = 0) and TIDE-8E (K = 8), trained for this project so that the dashboard has something real to show. They are
small language models for looking inside, not for use: they write English-looking text and know few facts.

| | Base | TIDE-8E |
|---|---:|---:|
{parameters}

## Training

Both saw the same {tokens:,} tokens in the same batches and order, from the same initial backbone.

- **Data**: the project's corpus, `python -m tide.training.corpus --out corpus` (sources, licences and checksums:
  [docs/corpus.md](../../docs/corpus.md)); {tokens_in_data:,} tokens, so {passes:.2f} passes over it, each in an order
  of its own. Tokenizer: byte-level BPE of 16,384 ids,
  `python -m tide.training.tokenizer --text corpus --out corpus/tokenizer`.
- **Commands**: `tide-train --preset demo --blocks 0 --data corpus --compile --attention eager --out runs/base` on one
  thread, and `tide-train --preset demo --blocks 8 --data corpus --compile --autocast float32 --out runs/tide-8e` on
  two. What the two precisions change is measured below.
- **Recipe** (`recipe.json` in each folder): {steps:,} steps of {batch} sequences of {length} tokens, AdamW with betas
  {beta1} and {beta2}, weight decay {decay}, z-loss {z_loss}, gradients clipped at norm {clip}; learning rate from
  {start_lr} to {peak_lr} over {warmup} steps, then a cosine down to {floor_lr}; seed {seed}. Betas,
  weight decay and z-loss are the paper's (Table 7); the rest is ours, for a model this small. How the learning rate was
  chosen: [docs/training.md](../../docs/training.md#how-the-demos-learning-rate-was-chosen).
- **Saved** in bfloat16. `train_log.jsonl` holds loss, learning rate, speed and null weight by layer, `summaries.jsonl`
  what the run kept about itself at a few steps.
- **Licence**: Apache-2.0 for the weights. What the training text's licences ask for is listed in docs/corpus.md.

{precision}
## Held-out loss

Cross entropy in nats and perplexity on windows of {window} tokens, on the shipped weights in {dtype}. Base - TIDE is on
the same positions; positive means that TIDE predicts better. In brackets 95 % intervals of a bootstrap that draws whole
windows; "?" where such an interval holds 0. How and why: [docs/evaluation.md](../../docs/evaluation.md). Made by

    tide-evaluate assets/demo/tide-8e --base assets/demo/base --text corpus --out OUT

{verdicts}

| text | what | n | Base, perplexity | TIDE-8E, perplexity | Base - TIDE, nats |
|---|---|---:|---:|---:|---:|
{by_text}

By frequency decile of the predicted token (appendix B of the paper; counted over {counted}), all texts together. Rare
are deciles 0-2, mid 3-6, common 7-9; "none" are punctuation, white space and special tokens. "By position": every
position weighs the same; "by type": every token id does.

| bin | n | token ids | Base, by position | TIDE-8E | Base - TIDE | Base, by type | TIDE-8E | Base - TIDE |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{by_bin}

{repeats}
TIDE-8E has {ratio:.1f} times the parameters of Base: this compares equal backbones on equal data, not equal sizes.

Null weight by layer at the last step, mean over {probe} sequences of the batch: {null}.
"""

PRECISION = """### Two precisions

Base was trained with products in bfloat16 (`--autocast bfloat16`, the recipe's own), TIDE-8E in float32, on a processor
without bfloat16 instructions. TIDE-8E's first steps had been trained in bfloat16 before, on the same batches from the
same initial weights (K = 8 of "By number of banks"). Cross entropy in nats on the runs' held-out probe, {positions:,}
positions (`summaries.jsonl`):

{losses}
"""

REPEATED = """### What the window has shown before

The same positions, divided by whether the window has shown the token to predict already: `new`, it has not; `token`,
it has; `pair`, it has, behind the token just read, so that copying would do. Base - TIDE-8E in nats, every position
weighing the same, with the share of positions. More: [docs/evaluation.md](../../docs/evaluation.md#losses).

{verdicts}

{rows}

So the two models differ in kind. What the window has not shown, TIDE-8E knows better in every text and decile; a pair
that the window has shown, Base predicts far better. Technical text repeats itself most, and in the middle deciles the
loss at pairs outweighs the gain elsewhere.

Copying is learnt on the way, and Base learns it first. Loss at pairs (`--max-tokens 60000`, the beginning of each
text): in the demo before this one (10.5 million tokens, a peak rate of 2e-3) 4.04 nats of Base and 3.67 of TIDE-8E,
which was ahead in every text and decile; TIDE-8E of this run at step 2,560 (`--keep 2560`) 3.76; now 1.72 of Base and
2.46 of TIDE-8E. What we think: with memory the token at hand tells so much that a model of this size has less need to
copy until it has seen more text. Not tested: this is one run a model, and no longer run or larger model. Precision is
not the whole cause: TIDE-8E was behind Base on technical text after 10 million tokens in bfloat16 too (below).
"""

BY_BANKS = """
## By number of banks

Models that were trained alike and differ in K alone: each is the step 2,560 (10,485,760 tokens) of a run of the recipe
`demo`, which goes on to 40 million tokens, so the learning rate is still high; they are not shipped. Made by

    tide-train --preset demo --blocks K --data corpus --compile --attention eager \\
        --keep 2560 --stop-at 2560 --out runs/K

for K = 0, 2, 4 and 8 (K = 0 without `--stop-at`: it went on and became the shipped Base), then `tide-evaluate` on the
kept checkpoints with K = 0 as `--base`. The same texts, windows and intervals as above, all texts together, every
position weighing the same (deciles counted over {counted}); all rows: `{file}`.

{verdicts}

Perplexity by text:

{perplexities}

Cross entropy of rare, mid and common tokens, nats (figure 7 of the paper):

{groups}

Base - TIDE by frequency decile, nats (figure 5 of the paper):

{deciles}
"""

BY_BANKS_SUMMARIES = """
What these runs kept about themselves by then (`by-banks/K/summaries.jsonl`, last line; docs/training.md). Mean weight
of the null bank by layer, on held-out text:

{null}

Squared gradient that a row of a table has received in all steps together, mean over the token ids of a group: the
input embedding E, through the lookup, and E with all banks, the sum that proposition 3.2 is about:

{gradients}
"""


def budget_rows() -> str:
    """Parameters of the two models, part by part."""
    budgets = [ParameterBudget.of(TideConfig.from_pretrained(FOLDER / name)) for name in CHECKPOINTS]
    parts = ("backbone", "embeddings", "memory", "memory_norms", "router", "total")
    return "\n".join(
        f"| {part.replace('_', ' ')} parameters | " + " | ".join(f"{getattr(b, part):,}" for b in budgets) + " |"
        for part in parts
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def difference(row: Mapping) -> str:
    """A paired difference and its interval."""
    mark = "?" if row["better"] == "unclear" else ""
    interval = "" if pd.isna(row["low"]) else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
    return f"{row['mean']:+.3f}{interval}{mark}"


def perplexity(row: Mapping) -> str:
    """A perplexity and its interval."""
    return f"{row['perplexity']:.1f} [{row['perplexity_low']:.1f}, {row['perplexity_high']:.1f}]"


def cell(table: pd.DataFrame, **keys: str) -> Mapping:
    """The one row of a table that has these keys."""
    for column, value in keys.items():
        table = table[table[column] == value]
    (row,) = table.to_dict("records")
    return row


WHOLE = {"bin_kind": "all", "averaging": "position"}


def text_rows(facts: dict, tables: dict[str, pd.DataFrame]) -> str:
    """A row a text, then all of them."""
    base, tide = (model["name"] for model in facts["models"])
    lines = []
    for text in tables["losses"]["text"].unique():
        two = [cell(tables["losses"], model=model, text=text, **WHOLE) for model in (base, tide)]
        apart = difference(cell(tables["differences"], model=tide, text=text, **WHOLE))
        shown = " | ".join(perplexity(row) for row in two)
        lines.append(f"| `{text}` | {DOMAINS.get(text, '')} | {two[0]['n']:,} | {shown} | {apart} |")
    return "\n".join(lines)


def bin_rows(facts: dict, tables: dict[str, pd.DataFrame]) -> str:
    """A row a decile and a group, both averagings side by side."""
    base, tide = (model["name"] for model in facts["models"])
    lines = []
    bins = tables["losses"].query("bin_kind != 'all' and text == 'all'")
    for kind, name in bins[["bin_kind", "bin"]].drop_duplicates().itertuples(index=False):
        cells = []
        for averaging in ("position", "type"):
            keys = {"text": "all", "bin_kind": kind, "bin": name, "averaging": averaging}
            two = [cell(bins, model=model, **keys) for model in (base, tide)]
            cells += [f"{row['mean']:.3f}" for row in two]
            cells.append(difference(cell(tables["differences"], model=tide, **keys)))
        lines.append(f"| {name} | {two[0]['n']:,} | {two[0]['n_types']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section_repeats(facts: dict, tables: dict[str, pd.DataFrame]) -> str:
    """Base - TIDE by what the window has shown before, a row a text and a decile."""
    base, tide = (model["name"] for model in facts["models"])
    label = {base: "Base", tide: "TIDE-8E"}
    apart = tables["repeat_differences"]
    shown = apart[(apart["bin_kind"] == "all") | ((apart["bin_kind"] == "decile") & (apart["text"] == "all"))]
    rows = []
    for (text, kind, name), of_bin in shown.groupby(["text", "bin_kind", "bin"], sort=False):
        cells = [f"{row['n'] / of_bin['n'].sum():.0%}, {difference(row)}" for row in of_bin.to_dict("records")]
        rows.append([f"decile {name}" if kind == "decile" else f"`{text}`", *cells])
    sentences = [
        f"- `{repeat}`: {sentence}"
        for repeat in REPEATS
        for sentence in verdicts(apart[apart["repeat"] == repeat], label)
    ]
    return REPEATED.format(verdicts="\n".join(sentences), rows=markdown(["text or decile", *REPEATS], rows))


def section_precision() -> str:
    """Held-out loss of the same steps in either precision, beside Base's."""
    runs = {
        "Base, bfloat16": FOLDER / "by-banks" / "0",
        "TIDE-8E, bfloat16": FOLDER / "by-banks" / "8",
        "TIDE-8E, float32": FOLDER / "tide-8e",
    }
    losses = {
        name: {
            summary.step: np.average(summary.loss, weights=summary.targets) for summary in read_summaries(folder)
        }
        for name, folder in runs.items()
    }  # fmt: skip
    first, *others = losses.values()
    steps = sorted(set(first).intersection(*others))
    rows = [[f"{step:,}", *(f"{of_run[step]:.3f}" for of_run in losses.values())] for step in steps]
    positions = int(read_summaries(runs["TIDE-8E, float32"])[-1].targets.sum())
    return PRECISION.format(positions=positions, losses=markdown(["step", *runs], rows))


def section_by_banks(file: Path) -> str:
    """The comparison of models that differ in K."""
    facts, tables = read_report(file)
    models = sorted(facts["models"], key=lambda model: model["num_memory_blocks"])
    others = [model for model in models if model["name"] != facts["base"]]
    header = [f"K={model['num_memory_blocks']}" for model in models]
    losses, differences = tables["losses"], tables["differences"]
    everywhere = {"text": "all", "averaging": "position"}

    def losses_of(show, **keys: str) -> list[str]:
        return [show(cell(losses, model=model["name"], **keys)) for model in models]

    texts = [[f"`{text}`", *losses_of(perplexity, text=text, **WHOLE)] for text in losses["text"].unique()]
    bins = losses.query("text == 'all'")[["bin_kind", "bin"]].drop_duplicates()
    groups = [
        [name, *losses_of(lambda row: f"{row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
                          bin_kind="group", bin=name, **everywhere)]
        for name in bins.query("bin_kind == 'group'")["bin"]
    ]  # fmt: skip
    deciles = [
        [name, *(difference(cell(differences, model=model["name"], bin_kind="decile", bin=name, **everywhere))
                 for model in others)]
        for name in bins.query("bin_kind == 'decile'")["bin"]
    ]  # fmt: skip
    return BY_BANKS.format(
        counted=facts["deciles"]["counted"],
        file=file.name,
        verdicts=verdict_list(facts, tables),
        perplexities=markdown(["text", *header], texts),
        groups=markdown(["group", *header], groups),
        deciles=markdown(["decile", *(f"K={model['num_memory_blocks']}" for model in others)], deciles),
    )


def section_summaries(folder: Path) -> str:
    """The last training summary of each of these models, side by side.

    Args:
        folder: of a folder a model, named by K, with its summaries.
    """
    last = {int(run.name): read_summaries(run)[-1] for run in folder.iterdir()}
    null = [
        [f"K={k}", *(f"{w:.2f}" for w in np.average(last[k].routing[..., -1], axis=1, weights=last[k].positions))]
        for k in sorted(last)
        if k
    ]
    gradients = []
    for group, numbers in GROUPS.items():
        row, deciles = [group], list(numbers)
        for k in sorted(last):
            shown = [last[k].embedding_gradient] + ([last[k].total_gradient] if k else [])
            row += [f"{np.average(values[deciles], weights=last[k].types[deciles]):.3g}" for values in shown]
        gradients.append(row)
    tables = ["Base, E", *(f"K={k}, {what}" for k in sorted(last) if k for what in ("E", "all"))]
    return BY_BANKS_SUMMARIES.format(
        null=markdown(["model", *(f"layer {layer}" for layer in range(len(null[0]) - 1))], null),
        gradients=markdown(["group", *tables], gradients),
    )


def verdict_list(facts: dict, tables: dict[str, pd.DataFrame]) -> str:
    """Who wins where, a line a model."""
    labels = {model["name"]: f"{model['name']} (K={model['num_memory_blocks']})" for model in facts["models"]}
    return "\n".join(f"- {sentence}" for sentence in verdicts(tables["differences"], labels))


def main() -> None:
    """Writes assets/demo/README.md."""
    settings = json.loads((FOLDER / "tide-8e" / "recipe.json").read_text())
    recipe, config = settings["recipe"], settings["config"]
    facts, tables = read_report(FOLDER / "evaluation.json")
    log = (FOLDER / "tide-8e" / "train_log.jsonl").read_text().splitlines()
    budgets = [ParameterBudget.of(TideConfig.from_pretrained(FOLDER / name)).total for name in CHECKPOINTS]
    tokens = recipe["steps"] * recipe["batch_size"] * recipe["sequence_length"]
    in_data = settings["data"]["tokens"]
    card = CARD.format(
        parameters=budget_rows(),
        tokens=tokens,
        tokens_in_data=in_data,
        passes=tokens / in_data,
        precision=section_precision(),
        steps=recipe["steps"],
        batch=recipe["batch_size"],
        length=recipe["sequence_length"],
        beta1=recipe["beta1"],
        beta2=recipe["beta2"],
        decay=recipe["weight_decay"],
        z_loss=config["z_loss_coefficient"],
        clip=recipe["grad_clip"],
        start_lr=recipe["start_lr"],
        peak_lr=recipe["peak_lr"],
        warmup=recipe["warmup_steps"],
        floor_lr=recipe["floor_lr"],
        seed=recipe["seed"],
        window=facts["window_length"],
        dtype=facts["dtype"],
        counted=facts["deciles"]["counted"],
        verdicts=verdict_list(facts, tables),
        by_text=text_rows(facts, tables),
        by_bin=bin_rows(facts, tables),
        repeats=section_repeats(facts, tables),
        ratio=budgets[1] / budgets[0],
        probe=4,
        null=" ".join(f"{w:.2f}" for w in json.loads(log[-1])["null_weight"]),
    )
    by_banks = FOLDER / "evaluation-10m.json"
    if by_banks.is_file():
        card += section_by_banks(by_banks) + section_summaries(FOLDER / "by-banks")
    (FOLDER / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
