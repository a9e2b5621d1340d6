"""What `--data` can name: the same documents in every format, a fixed order, one sentence for what is wrong."""

import gzip
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.conftest import toy_documents
from tide.cli import UserError
from tide.training.corpus.documents import write_documents
from tide.training.data import tokenize
from tide.training.sources import DataSource, HubDataset, LocalFiles, training_files

DOCUMENTS = [*toy_documents(50), 'a "quoted" text\nof two lines', "£ and 漢字 \U0001f98a"]


def json_lines(documents, column="text"):
    return "".join(json.dumps({"id": {"n": i}, column: text}) + "\n" for i, text in enumerate(documents)).encode()


def write(path, documents, column="text"):
    """Writes documents as the file's name says, half of the rows of a Parquet file in a row group of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        write_documents(path, documents)
    elif path.suffix == ".parquet":
        table = pa.table({"id": list(range(len(documents))), column: documents})
        pq.write_table(table, path, row_group_size=max(1, len(documents) // 2))
    elif path.suffix == ".json":
        path.write_text(json.dumps([{column: text} for text in documents], indent=1))
    else:
        pack = {".jsonl": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[path.suffix]
        path.write_bytes(pack(json_lines(documents, column)))
    return path


def documents_of(path, skip=0, **options):
    return list(DataSource.parse(str(path), **options).documents(skip))


def refusal(path, **options):
    """The one sentence in which reading ends."""
    with pytest.raises(UserError) as error:
        documents_of(path, **options)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


NAMES = ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.JSONL"]


class TestFormats:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_file_of_any_kind_gives_the_documents_and_skips_some(self, tmp_path, name):
        path = tmp_path / name
        write(tmp_path / name.lower(), DOCUMENTS).rename(path)
        assert documents_of(path) == DOCUMENTS
        assert documents_of(tmp_path) == DOCUMENTS
        for skip in (1, 30, len(DOCUMENTS), len(DOCUMENTS) + 1):
            assert documents_of(path, skip) == DOCUMENTS[skip:]

    def test_the_token_stream_does_not_tell_the_format_nor_the_cut_into_files(self, tmp_path, tokenizer):
        half = len(DOCUMENTS) // 2
        for kind in ("txt", "jsonl", "parquet"):
            write(tmp_path / kind / f"part_1.{kind}", DOCUMENTS[:half])
            write(tmp_path / kind / f"part_2.{kind}", DOCUMENTS[half:])
        write(tmp_path / "whole.jsonl.gz", DOCUMENTS)
        write(tmp_path / "mixed" / "1.parquet", DOCUMENTS[:half])
        write(tmp_path / "mixed" / "2.txt", DOCUMENTS[half:])
        names = [str(tmp_path / name) for name in ("txt", "jsonl", "parquet", "whole.jsonl.gz", "mixed")]
        names += [f"hf:{tmp_path / kind}" for kind in ("jsonl", "parquet")]
        streams = [
            tokenize(DataSource.parse(name), tokenizer, tmp_path / "cache", shard_tokens=500, show_progress=False)
            for name in names
        ]
        assert len({stream.folder for stream in streams}) == len(names)
        assert len({stream.sha256 for stream in streams}) == 1
        stream = streams[-1].read(0, streams[-1].num_tokens)
        assert tokenizer.decode(stream).split(tokenizer.bos_token)[1:] == DOCUMENTS

    def test_another_column(self, tmp_path):
        for name in ("a.jsonl", "a.parquet"):
            path = write(tmp_path / name, DOCUMENTS, column="content")
            assert documents_of(path, text_column="content") == DOCUMENTS

    def test_rows_without_text_are_no_documents(self, tmp_path):
        for name in ("a.jsonl", "a.parquet"):
            path = write(tmp_path / name, [None, "one", "", " \n", "two", None])
            assert documents_of(path) == ["one", "two"]
            assert documents_of(path, skip=1) == ["two"]

    def test_files_need_not_agree_in_their_other_columns(self, tmp_path):
        (tmp_path / "1.jsonl").write_text('{"text": "one", "id": 1}\n')
        (tmp_path / "2.jsonl").write_text('{"id": {"name": "x"}, "text": "two"}\n')
        assert documents_of(tmp_path) == ["one", "two"]

    def test_names_are_not_patterns(self, tmp_path):
        write(tmp_path / "part[1].jsonl", ["one"])
        write(tmp_path / "part*.jsonl", ["two"])
        assert documents_of(tmp_path) == ["two", "one"]  # "*" sorts before "["

    @pytest.mark.parametrize("content", [b"", b"\n\n"])
    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
    def test_empty_files_hold_no_documents(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        assert documents_of(tmp_path) == []


class TestFolders:
    def test_held_out_hidden_and_tokenizer_files_are_left_out(self, tmp_path):
        taken = ["b.txt", "a.jsonl", "deep/er/c.parquet", "d.JSON"]
        left = ["heldout_web.txt", "deep/heldout_x.jsonl", ".hidden.txt", ".tokens/x.json", "tokenizer/tokenizer.json"]
        for name in [*taken, *left, "notes.md", "deep/tokenizer/tokenizer.json"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("text\n")
        names = [file.relative_to(tmp_path).as_posix() for file in training_files(tmp_path)]
        assert names == sorted(taken)

    def test_where_files_are_named_train_only_those_are_taken(self, tmp_path):
        for name in ("a.txt", "train_b.txt", "b.jsonl", "sub/train_a.parquet", "train_notes.md"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("text\n")
        assert [file.name for file in training_files(tmp_path)] == ["train_a.parquet", "train_b.txt"]

    def test_hidden_parents_do_not_hide_the_folder(self, tmp_path):
        write(tmp_path / ".cache" / "tokenizer" / "a.txt", ["one"])
        assert documents_of(tmp_path / ".cache" / "tokenizer") == ["one"]


class TestIdentity:
    def test_it_is_that_of_the_content_not_of_the_place(self, tmp_path):
        write(tmp_path / "here" / "a.txt", DOCUMENTS)
        write(tmp_path / "here" / "b.jsonl", DOCUMENTS)
        shutil.copytree(tmp_path / "here", tmp_path / "there")  # keeps the times
        here, there = (DataSource.parse(str(tmp_path / name)) for name in ("here", "there"))
        assert here.identity() == there.identity()
        hub = [DataSource.parse(f"hf:{tmp_path / name}").identity() for name in ("here", "there")]
        assert hub[0] == hub[1] != here.identity()

    @pytest.mark.parametrize("prefix", ["", "hf:"])
    def test_it_changes_with_everything_that_changes_the_documents(self, tmp_path, prefix):
        path = write(tmp_path / "a.jsonl", ["one", "two"])

        def identity(**options):
            return DataSource.parse(f"{prefix}{tmp_path}", **options).identity()

        seen = [identity(), identity(text_column="id")]
        status = path.stat()
        write(path, ["one", "too"])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        seen.append(identity())
        os.utime(path, ns=(0, 0))
        seen.append(identity())
        write(tmp_path / "b.jsonl", ["three"])
        seen.append(identity())
        (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
        seen.append(identity())
        assert len(set(seen)) == len(seen)


class TestHub:
    COMMIT = "0123456789abcdef" * 2 + "01234567"

    @pytest.mark.parametrize(
        ("data", "parts"),
        [
            ("hf:mlfoundations/dclm-baseline-1.0", ("mlfoundations/dclm-baseline-1.0", None, None)),
            ("hf:wikitext:wikitext-2-raw-v1", ("wikitext", "wikitext-2-raw-v1", None)),
            ("hf:a/b@refs/convert/parquet", ("a/b", None, "refs/convert/parquet")),
            ("hf:a/b:en.noblocklist@v1.0", ("a/b", "en.noblocklist", "v1.0")),
        ],
    )
    def test_name_configuration_and_revision(self, data, parts):
        source = DataSource.parse(data, split="validation")
        assert isinstance(source, HubDataset)
        assert (source.name, source.config, source.revision) == parts
        assert source.split == "validation"

    @pytest.mark.parametrize("data", ["hf:", "hf::x", "hf:a/b@", "hf:a:b:c", "hf:a/b/c", "hf:/no/such/folder"])
    def test_malformed_names(self, data):
        with pytest.raises(UserError, match=r"^--data hf:.*write hf:"):
            DataSource.parse(data)

    def test_a_folder_whose_path_looks_like_a_revision(self, tmp_path):
        write(tmp_path / "a@b:c" / "train.jsonl", ["one"])
        assert documents_of(f"hf:{tmp_path / 'a@b:c'}") == ["one"]

    def test_the_split_is_that_of_the_loader(self, tmp_path):
        write(tmp_path / "train.jsonl", ["one", "two"])
        write(tmp_path / "test.jsonl", ["three"])
        assert documents_of(f"hf:{tmp_path}") == ["one", "two"]
        assert documents_of(f"hf:{tmp_path}", skip=1) == ["two"]
        assert documents_of(f"hf:{tmp_path}", split="test") == ["three"]
        assert "Bad split: dev" in refusal(f"hf:{tmp_path}", split="dev")

    def test_a_full_commit_needs_no_network(self):
        source = DataSource.parse(f"hf:a/b:c@{self.COMMIT}")
        assert source.title == f"hf:a/b:c@{self.COMMIT}"
        assert source.identity() != DataSource.parse(f"hf:a/b@{self.COMMIT}").identity()
        assert source.identity() != DataSource.parse(f"hf:a/b:c@{self.COMMIT}", split="test").identity()

    def test_a_branch_is_the_commit_that_it_stands_for(self, monkeypatch):
        from huggingface_hub import HfApi

        class Info:
            sha = self.COMMIT

        monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: Info)
        branch, commit = DataSource.parse("hf:a/b"), DataSource.parse(f"hf:a/b@{self.COMMIT}")
        assert branch.identity() == commit.identity()
        assert branch.title == commit.title

    @pytest.mark.parametrize("use", [DataSource.identity, lambda source: list(source.documents())])
    def test_no_network(self, monkeypatch, use):
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        source = DataSource.parse("hf:mlfoundations/dclm-baseline-1.0")
        with pytest.raises(UserError, match=r"cannot be found on the Hugging Face hub \(OfflineModeIsEnabled\)"):
            source.identity() if use is DataSource.identity else use(source)

    def test_a_missing_column_or_an_empty_folder(self, tmp_path):
        assert "cannot be read" in refusal(f"hf:{tmp_path}")
        write(tmp_path / "a.jsonl", DOCUMENTS, column="content")
        assert "has no column 'text' but id, content; name the one with text by --text-column" in refusal(
            f"hf:{tmp_path}"
        )


class TestBadInput:
    def test_nothing_there(self, tmp_path):
        assert "nowhere is no folder or file" in refusal(tmp_path / "nowhere")

    def test_a_folder_without_text(self, tmp_path):
        (tmp_path / "picture.png").touch()
        (tmp_path / "heldout_a.txt").write_text("text")
        assert "holds no .txt, .jsonl, .json or .parquet file" in refusal(tmp_path)

    def test_a_file_of_another_kind(self, tmp_path):
        (tmp_path / "picture.png").touch()
        assert "picture.png is no .txt, .jsonl" in refusal(tmp_path / "picture.png")

    @pytest.mark.parametrize("content", [bytes(range(256)) * 100, b"good\n\n\xff\xfe bad", bytes(5000), b"\xff\xfea\0"])
    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
    def test_binary_data(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        assert f"{tmp_path / name} " in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", b"plain text\nno JSON\n"),
            ("a.jsonl", b'{"text": "good"}\n{"text": "cut sh'),
            ("a.jsonl", b'{"text": "\xff\xfe"}\n'),
            ("a.jsonl.gz", gzip.compress(b'{"text": "good"}\n' * 9)[:-12]),
            ("a.parquet", b""),
        ],
    )
    def test_damaged_files(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        assert f"{tmp_path / name} cannot be read as " in refusal(tmp_path)

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.zst", "a.parquet"])
    def test_a_missing_column(self, tmp_path, name):
        write(tmp_path / name, DOCUMENTS, column="content")
        message = refusal(tmp_path)
        assert f"{tmp_path / name} has no column 'text' but " in message
        assert "content; name the one with text by --text-column" in message

    @pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
    def test_a_column_that_is_no_text(self, tmp_path, name):
        write(tmp_path / name, [1, 2])
        assert f"The column 'text' of {tmp_path / name} holds int where text should be" in refusal(tmp_path)

    def test_what_comes_before_a_bad_file_is_read(self, tmp_path):
        write(tmp_path / "1.txt", ["one"])
        (tmp_path / "2.jsonl").write_text("not JSON\n")
        source = DataSource.parse(str(tmp_path))
        assert isinstance(source, LocalFiles)
        documents = source.documents()
        assert next(documents) == "one"
        with pytest.raises(UserError, match=r"2\.jsonl"):
            next(documents)
