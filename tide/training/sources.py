"""What `--data` names: local text, JSON lines or Parquet, or a dataset of the Hugging Face hub, as a stream of texts.

The order is fixed: local files by their path, the hub's files as the hub lists them, documents as they stand in a
file. Nothing is shuffled here, so that `documents(skip)` goes on where an earlier reading stopped, whatever the
version of `datasets`; `tide.training.data.WindowDataset` shuffles what has been tokenised. (The files of
`mlfoundations/dclm-baseline-1.0`, the paper's data, are already shuffled by their makers.)
"""

import contextlib
import glob
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tide.checkpoint import file_fingerprint, first_line
from tide.cli import UserError
from tide.training.corpus import read_documents

HUB_PREFIX = "hf:"
CACHE_FOLDER = ".tokens"
HUB_CACHE_FOLDER = "tide-tokens"  # in HF_HOME

TEXT = (".txt",)
JSON_LINES = tuple(f".{kind}{packed}" for kind in ("jsonl", "json") for packed in ("", ".gz", ".zst"))
PARQUET = (".parquet",)
SUPPORTED = TEXT + JSON_LINES + PARQUET
KINDS = ".txt, .jsonl, .json or .parquet file"

BINARY_PROBE_BYTES = 8000  # a NUL among the first bytes means binary data: git's rule
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class DataSource(ABC):
    """A stream of documents that `--data` names; made by `DataSource.parse`.

    Attributes:
        data: what was given as `--data`.
        text_column: the field of JSON lines, Parquet and hub datasets that holds the text.
    """

    data: str
    text_column: str

    @classmethod
    def parse(cls, data: str, text_column: str = "text", split: str = "train") -> "DataSource":
        """Reads the value of `--data`; opens no file and asks no network.

        Args:
            data: a file, a folder, or a dataset `hf:NAME`, `hf:NAME:CONFIG`, either with `@REVISION` behind; NAME
                is one of the hub or a local folder that `datasets.load_dataset` can read.
            text_column: see `DataSource`.
            split: of the hub dataset; local files have none.

        Raises:
            UserError: when there is no such file or folder, it holds nothing that can be read, or a hub name is
                malformed.
        """
        if data.startswith(HUB_PREFIX):
            return HubDataset(data, text_column, *parse_hub_name(data), split)
        path = Path(data)
        if path.is_dir():
            return LocalFiles(data, text_column, path, tuple(training_files(path)))
        if not path.exists():
            raise UserError(
                f"--data {data} is no folder or file; give one, or hf:NAME for a dataset of the hub, or make the "
                f"project's text with `python -m tide.training.corpus --out {data}`."
            )
        if not is_supported(path.name):
            raise UserError(f"--data {data} is no {KINDS}; give one of these, or a folder of them.")
        return LocalFiles(data, text_column, path.parent, (path,))

    def documents(self, skip: int = 0) -> Iterator[str]:
        """The texts one after another, without the first `skip`. JSON lines and rows without a text are left out.

        Raises:
            UserError: one sentence that names the file or dataset: when it cannot be read, is no text, or lacks
                the text column.
        """
        return islice(self._documents(), skip, None)

    @property
    @abstractmethod
    def title(self) -> str:
        """What to call the text where it is recorded; of a hub dataset, what reads the same text again."""

    @abstractmethod
    def identity(self) -> str:
        """Names the documents, 32 hexadecimal digits, without reading them whole; other text has another name.

        Raises:
            UserError: when a file cannot be read, or the hub not be asked.
        """

    @abstractmethod
    def default_cache(self) -> Path:
        """Where tokens of this source are kept, unless `--token-cache` says otherwise."""

    @abstractmethod
    def _documents(self) -> Iterator[str]:
        """All texts, in order."""


@dataclass(frozen=True)
class LocalFiles(DataSource):
    """Files below one folder.

    Attributes:
        folder: the folder, or the one that the file lies in.
        files: in the order in which they are read.
    """

    folder: Path
    files: tuple[Path, ...]

    @property
    def title(self) -> str:
        """The name of the file or folder, without its place."""
        return Path(self.data).absolute().name

    def identity(self) -> str:
        """Depends on the files' names within the folder, sizes, times and sampled content; not on where they lie."""
        return digest_of(["files", self.text_column, *describe_files(self.folder, self.files)])

    def default_cache(self) -> Path:
        """A hidden folder beside the text."""
        return self.folder / CACHE_FOLDER

    def _documents(self) -> Iterator[str]:
        for file in self.files:
            yield from self._read_text(file) if is_supported(file.name, TEXT) else self._read_rows(file)

    def _read_text(self, file: Path) -> Iterator[str]:
        try:
            with file.open("rb") as stream:
                if b"\0" in stream.read(BINARY_PROBE_BYTES):
                    raise UserError(f"{file} is not UTF-8 text but binary data; move it elsewhere or convert it.")
            yield from read_documents(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error

    def _read_rows(self, file: Path) -> Iterator[str]:
        """One file at a time, so that an error can name it, and files need not agree in their other columns."""
        kind = "parquet" if is_supported(file.name, PARQUET) else "json"
        what = "Parquet" if kind == "parquet" else "JSON lines in UTF-8"
        with one_sentence(f"{file} cannot be read as {what}", "repair it or move it elsewhere"):
            try:
                rows = load_streaming(kind, data_files=glob.escape(str(file.absolute())), split="train")
            except StopIteration:  # what `datasets` makes of an empty file
                return
            yield from texts_of(rows, self.text_column, str(file))


@dataclass(frozen=True)
class HubDataset(DataSource):
    """A dataset of the Hugging Face hub, streamed; or a local folder through the same loader.

    Attributes:
        name: of the dataset, or the folder's path.
        config: the configuration; None is the dataset's only or default one.
        revision: branch, tag or commit; None is the main branch.
        split: such as "train".
    """

    name: str
    config: str | None
    revision: str | None
    split: str

    @cached_property
    def commit(self) -> str | None:
        """The commit that is read, found out once; None for a local folder.

        Raises:
            UserError: when the hub does not say it. A full commit in `--data` needs no asking.
        """
        if Path(self.name).is_dir():
            return None
        if self.revision and COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.name, revision=self.revision, timeout=30).sha
        except Exception as error:  # of the hub's client, of its HTTP library, or of the socket
            raise UserError(
                f"--data {self.data} cannot be found on the Hugging Face hub ({type(error).__name__}); check name, "
                f"revision and network; offline, give local files, or hf:NAME@COMMIT if it is tokenised already."
            ) from error

    @property
    def title(self) -> str:
        """Name, configuration and commit, as `--data` takes them."""
        config, commit = (f":{self.config}" if self.config else ""), (f"@{self.commit}" if self.commit else "")
        return f"{HUB_PREFIX}{self.name}{config}{commit}"

    def identity(self) -> str:
        """Depends on name, configuration, commit, split and column; for a local folder on its files instead of name."""
        folder = Path(self.name)
        content = describe_files(folder, visible_files(folder)) if folder.is_dir() else [self.name, self.commit]
        return digest_of(["hub", self.config, self.split, self.text_column, *content])

    def default_cache(self) -> Path:
        """A folder in HF_HOME."""
        from huggingface_hub.constants import HF_HOME

        return Path(HF_HOME) / HUB_CACHE_FOLDER

    def _documents(self) -> Iterator[str]:
        commit = self.commit
        advice = "check the name, the configuration, the split and the network"
        with one_sentence(f"--data {self.data} cannot be read", advice):
            rows = load_streaming(self.name, self.config, revision=commit, split=self.split)
            yield from texts_of(rows, self.text_column, f"--data {self.data}")


def parse_hub_name(data: str) -> tuple[str, str | None, str | None]:
    """The name, configuration and revision in `hf:NAME[:CONFIG][@REVISION]`; a folder's path may hold `:` and `@`.

    Raises:
        UserError: when it is malformed, or names a path where no folder is.
    """
    rest = data.removeprefix(HUB_PREFIX)
    if rest and Path(rest).is_dir():
        return rest, None, None
    match = re.fullmatch(r"([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?", rest)
    if not match:
        raise UserError(f"--data {data} is malformed; write hf:NAME, hf:NAME:CONFIG or hf:NAME@REVISION.")
    name = match[1]
    if not Path(name).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"--data {data}: {name} is no folder and no name of a hub dataset; write hf:OWNER/NAME.")
    return name, match[2], match[3]


def training_files(folder: Path) -> list[Path]:
    """The files of a data folder, subfolders included: those named `train_*`, or all where none is named so.

    Left out are hidden files and folders, files named `heldout_*` and folders named `tokenizer`.

    Returns:
        Files of the supported kinds, sorted by their path.

    Raises:
        UserError: when there is none.
    """
    files = [
        file
        for file in visible_files(folder)
        if is_supported(file.name)
        and not file.name.startswith("heldout_")
        and "tokenizer" not in file.relative_to(folder).parts[:-1]
    ]
    files = [file for file in files if file.name.startswith("train_")] or files
    if not files:
        raise UserError(
            f"--data {folder} holds no {KINDS}; put UTF-8 text there, with a blank line between documents, or JSON "
            "lines or Parquet files with a text column."
        )
    return files


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones and those in hidden folders, sorted by their path."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def is_supported(name: str, suffixes: tuple[str, ...] = SUPPORTED) -> bool:
    """Whether a file's name ends in one of the suffixes, in capitals or not."""
    return name.lower().endswith(suffixes)


def describe_files(folder: Path, files: tuple[Path, ...] | list[Path]) -> list[list]:
    """Names, sizes, times and sampled content: what changes when a text does.

    Raises:
        UserError: when a file cannot be read.
    """
    entries: list[list] = []
    for file in files:
        try:
            status = file.stat()
            fingerprint = file_fingerprint(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error
        entries.append([file.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns, fingerprint])
    return entries


def digest_of(content: list) -> str:
    """32 hexadecimal digits that name a JSON value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def load_streaming(*args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset`, streaming and silent: what it has to say becomes a `UserError`."""
    import datasets  # takes seconds; plain text does without

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else every local file asks the network, and waits for it
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets.load_dataset(*args, streaming=True, **kwargs)


def texts_of(rows: Any, column: str, where: str) -> Iterator[str]:
    """The texts of a streamed `datasets.IterableDataset`, blank and missing ones left out.

    Args:
        rows: the dataset.
        column: which of its columns holds the text.
        where: the file or dataset, for the error.

    Raises:
        UserError: when the column is missing or holds no text.
    """
    columns = rows.column_names  # None where only the rows can tell
    if columns and column in columns:
        rows = rows.select_columns(column)  # the others are not made into Python objects
    for row in rows:
        if column not in row:
            names = ", ".join(columns or row)
            raise UserError(f"{where} has no column {column!r} but {names}; name the one with text by --text-column.")
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"The column {column!r} of {where} holds {type(text).__name__} where text should be; "
                "name the one with text by --text-column."
            )
        if text and not text.isspace():
            yield text


@contextlib.contextmanager
def one_sentence(failure: str, advice: str) -> Iterator[None]:
    """Turns whatever `datasets` raises, and its readers of JSON, Parquet and compressed files, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failure} ({first_line(error)}); {advice}.") from error
