r"""Writes the model card of the demo checkpoints from their own files: `python -m assets.model_card`.

Needs `evaluation.json` beside the checkpoints, made by

    python -m tide.evaluation assets/demo/tide-8e --base assets/demo/base --text corpus/heldout_*.txt \
        --out assets/demo/evaluation.json
"""

import json
from pathlib import Path

from tide import ParameterBudget, TideConfig

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
  [docs/corpus.md](../../docs/corpus.md)); {tokens_in_data:,} tokens, of which the first {tokens:,} of the shuffled
  order were used. Tokenizer: byte-level BPE of 16,384 ids,
  `python -m tide.training.tokenizer --text corpus --out corpus/tokenizer`.
- **Commands**: `tide-train --preset demo --blocks 8 --data corpus --compile --out runs/tide-8e` and the same with
  `--blocks 0 --out runs/base`, each on one thread (`OMP_NUM_THREADS=1`), both beside each other on two cores.
- **Recipe** (`recipe.json` in each folder): {steps:,} steps of {batch} sequences of {length} tokens, AdamW with betas
  {beta1} and {beta2}, weight decay {decay}, z-loss {z_loss}, gradients clipped at norm {clip}; learning rate from
  {start_lr} to {peak_lr} over {warmup} steps, then a cosine down to {floor_lr}; bfloat16 autocast; seed {seed}. Betas,
  weight decay and z-loss are the paper's (Table 7); the rest is ours, for a model this small.
- **Saved** in bfloat16. `train_log.jsonl` holds loss, learning rate, speed and null weight by layer.
- **Licence**: Apache-2.0 for the weights. What the training text's licences ask for is listed in docs/corpus.md.

## Held-out loss

Cross entropy in nats, mean over positions, windows of {window} tokens, on the shipped weights. Difference is
Base - TIDE on the same positions, with its standard error; positive means that TIDE predicts better. Made by

    python -m tide.evaluation assets/demo/tide-8e --base assets/demo/base --text corpus/heldout_*.txt \\
        --out assets/demo/evaluation.json

| text | what | n | Base | TIDE-8E | Base - TIDE |
|---|---|---:|---:|---:|---:|
{by_text}

By frequency decile of the predicted token (appendix B of the paper; counted over {corpus}), all texts together:

| decile | n | Base | TIDE-8E | Base - TIDE |
|---|---:|---:|---:|---:|
{by_decile}

Rare are deciles 0-2, mid 3-6, common 7-9; "none" are punctuation, white space and special tokens.

| group | n | Base | TIDE-8E | Base - TIDE |
|---|---:|---:|---:|---:|
{by_group}

TIDE-8E has {ratio:.1f} times the parameters of Base: this compares equal backbones on equal data, not equal sizes.

Null weight by layer at the last step, mean over {probe} sequences of the batch: {null}.
"""


def budget_rows() -> str:
    """Parameters of the two models, part by part."""
    budgets = [ParameterBudget.of(TideConfig.from_pretrained(FOLDER / name)) for name in CHECKPOINTS]
    parts = ("backbone", "embeddings", "memory", "memory_norms", "router", "total")
    return "\n".join(
        f"| {part.replace('_', ' ')} parameters | " + " | ".join(f"{getattr(b, part):,}" for b in budgets) + " |"
        for part in parts
    )


def loss_row(label: str, row: dict) -> str:
    """One row of a table of losses."""
    difference = f"{row['difference_mean']:+.3f} ± {row['difference_se']:.3f}"
    return f"| {label} | {row['n']:,} | {row['base_mean']:.3f} | {row['tide_mean']:.3f} | {difference} |"


def main() -> None:
    """Writes assets/demo/README.md."""
    settings = json.loads((FOLDER / "tide-8e" / "recipe.json").read_text())
    recipe, config = settings["recipe"], settings["config"]
    report = json.loads((FOLDER / "evaluation.json").read_text())
    log = (FOLDER / "tide-8e" / "train_log.jsonl").read_text().splitlines()
    tables = {
        name: [row for row in rows if name == "text" or row["text"] == "all"] for name, rows in report["tables"].items()
    }
    budgets = [ParameterBudget.of(TideConfig.from_pretrained(FOLDER / name)).total for name in CHECKPOINTS]
    card = CARD.format(
        parameters=budget_rows(),
        tokens=recipe["steps"] * recipe["batch_size"] * recipe["sequence_length"],
        tokens_in_data=settings["tokens_in_data"],
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
        window=report["window_length"],
        corpus=report["counted_corpus"],
        by_text="\n".join(loss_row(f"`{r['text']}` | {DOMAINS[r['text']]}", r) for r in tables["text"]),
        by_decile="\n".join(loss_row("none" if r["decile"] < 0 else r["decile"], r) for r in tables["decile"]),
        by_group="\n".join(loss_row(r["group"], r) for r in tables["group"]),
        ratio=budgets[1] / budgets[0],
        probe=4,
        null=" ".join(f"{w:.2f}" for w in json.loads(log[-1])["null_weight"]),
    )
    (FOLDER / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
