"""`tide-precompute --export DIR`: the artifacts as plain tidy files for other tools, and vectors for a projector.

DIR/README.md, columns.json    what every file and column is
DIR/NAME.parquet, NAME.csv     `precompute.export.tables`; CSV only of tables below `CSV_ROWS` rows
DIR/projector/                 `precompute.export.projector`
"""

from precompute.export.folder import check_export_folder, export

__all__ = ["check_export_folder", "export"]
