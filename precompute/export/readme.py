"""The README of an export, for people; `columns.json` says the same to programs."""

from pathlib import Path
from typing import Any


def as_markdown(content: dict[str, Any], csv_rows: int, points: int) -> str:
    """The README.

    Args:
        content: what `columns.json` holds.
        csv_rows: tables of so many rows or more have no CSV file.
        points: rows of the projector's files; 0 where there are none.
    """
    model, tables = content["model"], content["tables"]
    lines = [
        f"# Measurements of {Path(content['checkpoint']['path']).name}",
        "",
        f"A TIDE model of {model['num_layers']} layers, {model['num_banks']} memory banks and {model['vocab_size']:,} "
        "token ids, measured by `tide-precompute` and written by its option `--export`. Layers and banks are 0-based; "
        f"of routing weights, bank {model['num_banks']} is the null bank. Losses are in nats. Null is what is not "
        "known: a mean over nothing, a deviation of fewer than two values.",
        "",
        f"Every table is a Parquet file; one of fewer than {csv_rows:,} rows is a CSV file too (UTF-8, text quoted, "
        'null empty). Read those with `pandas.read_csv(file, keep_default_na=False, na_values=[""])`: a token may be '
        "called `NA`. `columns.json` holds what stands here for programs.",
        "",
        "| table | rows | a row is |",
        "| --- | ---: | --- |",
    ]
    lines += [f"| `{name}` | {table['rows']:,} | {table['about']} |" for name, table in tables.items()]
    if points:
        lines += [
            f"| `projector/` | {points:,} | a token: its vectors in every table, of a bank as the model reads them |",
            "",
            f"`projector/` holds the {points:,} most frequent tokens. `tensorboard --logdir projector` shows them; or "
            "load a TSV file and `metadata.tsv` in the standalone projector, or serve the folder and give that one the "
            "address of `projector_config.json`, the paths in it made addresses.",
        ]
    for name, table in tables.items():
        lines += ["", f"## {name}", "", "| column | meaning |", "| --- | --- |"]
        lines += [f"| `{column}` | {_cell(meaning)} |" for column, meaning in table["columns"].items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
