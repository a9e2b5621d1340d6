"""Vectors for TensorBoard's embedding projector: a pair of TSV files a table, and the configuration that lists them.

    FOLDER/embedding.tsv, bank_0.tsv, ...  a row a token, numbers alone
    FOLDER/metadata.tsv                    the same rows: token, id, count, decile, under a header
    FOLDER/projector_config.pbtxt          for `tensorboard --logdir FOLDER`
    FOLDER/projector_config.json           for the standalone projector

The forms are those that the projector parses: vectors have no header, metadata of more than one column has one, both
have the same number of rows, and paths lie below the configuration's folder.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv

from precompute.tables import CheckpointTables, Table, table_name
from tide.files import write_text

MOST_POINTS = 10_000  # TensorBoard draws no more than 100,000, and finds neighbours and UMAP among so many in seconds
TILE_ROWS = 4096  # of a table at once: 32 MiB in float32 at d 2048
METADATA_FILE = "metadata.tsv"
_VISIBLE = str.maketrans({"\t": "⇥", "\n": "⏎", "\r": "␍"})  # in the name of a special token, which is shown as it is
_NUMBERS = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


def projected_tokens(counts: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """The most frequent token ids, ascending by id; of equal counts the smaller id.

    Args:
        counts: [V], occurrences of every token id.
        most: how many.

    Returns:
        [min(V, most)] int64.
    """
    return np.sort(np.argsort(-np.asarray(counts), kind="stable")[:most])


def write_projector(folder: Path, tables: CheckpointTables, tokens: pd.DataFrame) -> int:
    """Writes everything into an empty folder.

    Args:
        folder: where to.
        tables: of the checkpoint; a bank's vectors are M_k(v).
        tokens: the token table, columns shown, count and decile, a row a token id.

    Returns:
        How many tokens there are.
    """
    token_ids = projected_tokens(tokens["count"].to_numpy())
    _write_metadata(folder / METADATA_FILE, tokens, token_ids)
    entries = []
    for table in tables.names:
        name = table_name(table)
        _write_vectors(folder / f"{name}.tsv", tables, table, token_ids)
        shape = [len(token_ids), tables.hidden_size]
        entry = {"tensorName": name, "tensorShape": shape, "tensorPath": f"{name}.tsv", "metadataPath": METADATA_FILE}
        entries.append(entry)
    write_text(folder / "projector_config.json", json.dumps({"embeddings": entries}, indent=1) + "\n")
    write_text(folder / "projector_config.pbtxt", "".join(map(_as_pbtxt, entries)))
    return len(token_ids)


def _write_metadata(file: Path, tokens: pd.DataFrame, token_ids: np.ndarray) -> None:
    chosen = tokens.iloc[token_ids]
    columns = (chosen["shown"].str.translate(_VISIBLE), token_ids, chosen["count"], chosen["decile"])
    with file.open("w", encoding="utf-8", newline="\n") as out:  # by hand: the projector takes quotes for text
        out.write("token\tid\tcount\tdecile\n")
        out.writelines("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True))


def _write_vectors(file: Path, tables: CheckpointTables, table: Table, token_ids: np.ndarray) -> None:
    """Numbers that read back as the same float32."""
    schema = pa.schema([(str(column), pa.float32()) for column in range(tables.hidden_size)])
    with csv.CSVWriter(file, schema, write_options=_NUMBERS) as out:
        for start in range(0, tables.vocab_size, TILE_ROWS):
            stop = min(start + TILE_ROWS, tables.vocab_size)
            inside = token_ids[(token_ids >= start) & (token_ids < stop)]
            if len(inside):
                rows = tables.read(table, start, stop)[inside - start]
                out.write_table(pa.table([np.ascontiguousarray(column) for column in rows.T], schema=schema))


def _as_pbtxt(entry: dict) -> str:
    """An `EmbeddingInfo` of projector_config.proto; the names of tables need no escaping."""
    shape = "".join(f"  tensor_shape: {size}\n" for size in entry["tensorShape"])
    return (
        f'embeddings {{\n  tensor_name: "{entry["tensorName"]}"\n{shape}'
        f'  tensor_path: "{entry["tensorPath"]}"\n  metadata_path: "{entry["metadataPath"]}"\n}}\n'
    )
