"""Writing an export: whole or not at all, and large tables a part at a time."""

import csv
import json
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet
from tqdm import tqdm

from precompute.artifacts import Artifacts
from precompute.export.projector import write_projector
from precompute.export.readme import as_markdown
from precompute.export.tables import TABLES, ExportTable
from precompute.tables import CheckpointTables
from tide.cli import UserError
from tide.files import write_text

CSV_ROWS = 200_000  # a table of as many rows or more is Parquet only
COLUMNS_FILE = "columns.json"
FORMAT = "tide-precompute --export"  # by which a folder is known as an export
PROJECTOR = "projector"
PROJECTOR_STAGE = "frequency"  # which tokens it shows, and what they are called


def check_export_folder(folder: Path) -> None:
    """Checks that an export may be written to a folder: it is not there yet, is empty, or holds an export.

    Raises:
        UserError: one sentence, when it holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--export {folder} is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_export(folder):
        raise UserError(f"--export {folder} holds something else than an export; give a folder that is new or empty.")


def _is_export(folder: Path) -> bool:
    try:
        return json.loads((folder / COLUMNS_FILE).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def export(
    artifacts: Artifacts,
    tables: CheckpointTables,
    folder: Path,
    stages: Collection[str],
    show_progress: bool = True,
) -> list[str]:
    """Writes an export; one that is there is replaced.

    Args:
        artifacts: what to export.
        tables: of their checkpoint, for the projector.
        folder: where to; it is made.
        stages: whose tables to write; those that were not made are left out.
        show_progress: draw a progress bar, and say what is left out.

    Returns:
        Names of what was written.

    Raises:
        UserError: one sentence, when the folder holds something else or cannot be written.
    """
    check_export_folder(folder)
    wanted = {name: table for name, table in TABLES.items() if table.stage in stages}
    absent = dict.fromkeys(table.stage for table in wanted.values() if not artifacts.has(table.stage))
    if absent and show_progress:
        print(f"export: left out, not made: {', '.join(absent)}", file=sys.stderr)
    chosen = {name: table for name, table in wanted.items() if table.stage not in absent}
    target = folder.absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        points = PROJECTOR_STAGE in stages and artifacts.has(PROJECTOR_STAGE)
        made = _write(artifacts, tables, temporary, chosen, points, show_progress)
        _put_in_place(temporary, target)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"--export {folder} cannot be written ({error}); make room or give another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        older = temporary.with_suffix(".old")
        os.replace(target, older)
        os.replace(temporary, target)
        shutil.rmtree(older)
    else:
        os.replace(temporary, target)  # also in the place of an empty folder


def _write(
    artifacts: Artifacts,
    tables: CheckpointTables,
    folder: Path,
    chosen: dict[str, ExportTable],
    with_projector: bool,
    show_progress: bool,
) -> list[str]:
    described: dict[str, Any] = {}
    points = 0
    with tqdm(total=len(chosen) + with_projector, desc="export", unit=" tables", disable=not show_progress) as bar:
        for name, table in chosen.items():
            described[name] = write_table(folder, name, table, artifacts)
            bar.update()
        if with_projector:
            (folder / PROJECTOR).mkdir()
            points = write_projector(folder / PROJECTOR, tables, artifacts.frame("frequency", "tokens"))
            bar.update()
    about = {name: artifacts.manifest[name] for name in ("model", "checkpoint", "base", "text")}
    content = {"format": FORMAT, **about, "tables": described}
    write_text(folder / COLUMNS_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "README.md", as_markdown(content, CSV_ROWS, points))
    return [*described, *([PROJECTOR] if with_projector else [])]


def write_table(folder: Path, name: str, table: ExportTable, artifacts: Artifacts) -> dict[str, Any]:
    """Writes one table as Parquet and, where it is small, as CSV.

    Returns:
        What `columns.json` says about it.
    """
    file = folder / f"{name}.parquet"
    made = table.frames(artifacts)
    rows = write_parquet(file, [made] if isinstance(made, pd.DataFrame) else made)
    files = [file.name]
    if rows < CSV_ROWS:
        small = folder / f"{name}.csv"
        # Quoted: a token's text may be a line's end.
        pd.read_parquet(file).to_csv(small, index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        files.append(small.name)
    columns = {column: table.meaning(column) for column in parquet.read_schema(file).names}
    return {"about": table.about, "stage": table.stage, "rows": rows, "files": files, "columns": columns}


def write_parquet(file: Path, frames: Iterable[pd.DataFrame]) -> int:
    """Writes frames of the same columns one after the other, each as row groups of its own.

    Args:
        file: the Parquet file.
        frames: at least one; the types of the first are those of the file.

    Returns:
        How many rows there are.
    """
    rows, writer = 0, None
    try:
        for frame in frames:
            schema = None if writer is None else writer.schema
            table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False).replace_schema_metadata()
            writer = writer or parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
            rows += len(frame)
    finally:
        if writer is not None:
            writer.close()
    return rows
