"""An evaluation on disk: report.json and a Parquet file a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tide.cli import UserError
from tide.files import replacing, write_text

REPORT_FILE = "report.json"
TABLES = ("losses", "differences", "repeats", "repeat_differences", "tasks")


def write_report(folder: Path, facts: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> None:
    """Writes all that is known so far, every file whole or not at all; tables of an earlier run are removed.

    Args:
        folder: where to.
        facts: what the tables are about: models, texts, settings.
        tables: by name, one of `TABLES`.

    Raises:
        UserError: when the disk does not take it.
    """
    try:
        for name in TABLES:
            file = folder / f"{name}.parquet"
            if name in tables:
                with replacing(file) as temporary:
                    tables[name].to_parquet(temporary, index=False)
            else:
                file.unlink(missing_ok=True)
        write_text(folder / REPORT_FILE, as_json(facts, tables))
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); make room or choose another --out.") from error


def as_json(facts: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> str:
    """The facts and, under "tables", the rows of each table, a row a line; unknown numbers are null."""
    entries = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    blocks = []
    for name, table in tables.items():
        rows = json.loads(table.to_json(orient="records", double_precision=6))
        lines = ",\n".join(f"   {json.dumps(row)}" for row in rows)
        blocks.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    entries.append(' "tables": {\n' + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read_report(file: Path) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Facts and tables of a report.json."""
    facts = json.loads(file.read_text(encoding="utf-8"))
    tables = {name: pd.DataFrame(rows) for name, rows in facts.pop("tables").items()}
    return facts, tables
