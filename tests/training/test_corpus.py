"""The corpus builder: its files, what the mix promises, what a person is told when something is missing."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from tide.cli import UserError
from tide.training.corpus import DOMAINS, HELD_OUT, read_documents, tables
from tide.training.corpus.__main__ import main
from tide.training.corpus.archive import unpack
from tide.training.corpus.build import extract
from tide.training.corpus.documents import clean, is_prose, write_documents
from tide.training.corpus.extract import books, extras
from tide.training.corpus.fetch import fetch, fetched_version, require_clients
from tide.training.corpus.mix import MIN_UNIQUE_LENGTH, mix
from tide.training.corpus.recorded import RECORDED, compare
from tide.training.corpus.sources import SOURCES, HeldOut, Package, Source

REPOSITORY = Path(__file__).parents[2]
PACKAGE = Package("pip", "some-text", "1.0")


def write(path: Path, content: str | bytes) -> Path:
    """Writes a fixture, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def one_sentence(error: pytest.ExceptionInfo) -> str:
    """The message, which must fit on one line and not be a traceback."""
    message = str(error.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


class TestDocuments:
    def test_what_is_written_is_read_back(self, tmp_path):
        documents = ["one line", "two\nlines", "£ and 漢字"]
        write_documents(tmp_path / "text.txt", documents)
        assert list(read_documents(tmp_path / "text.txt")) == documents
        assert (tmp_path / "text.txt").read_bytes() == "one line\n\ntwo\nlines\n\n£ and 漢字\n".encode()

    def test_more_blank_lines_make_no_empty_documents(self, tmp_path):
        assert list(read_documents(write(tmp_path / "text.txt", "\n\na\n\n\n\nb\n\n"))) == ["a", "b"]

    def test_a_file_is_streamed_not_read_whole(self, tmp_path):
        write_documents(tmp_path / "text.txt", ("word " * 200 for _ in range(2000)))
        tracemalloc.start()
        count = sum(1 for _ in read_documents(tmp_path / "text.txt"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == 2000
        assert peak < 200_000 < (tmp_path / "text.txt").stat().st_size / 9

    def test_a_missing_file_tells_how_to_build_it(self, tmp_path):
        with pytest.raises(UserError) as error:
            list(read_documents(tmp_path / "train_wiki.txt"))
        assert "train_wiki.txt" in one_sentence(error)
        assert "python -m tide.training.corpus" in str(error.value)

    def test_a_file_that_is_not_text_is_named(self, tmp_path):
        with pytest.raises(UserError) as error:
            list(read_documents(write(tmp_path / "x.bin", b"\xff\xfe\x00")))
        assert "x.bin is not UTF-8 text" in one_sentence(error)

    def test_a_failed_write_leaves_the_old_file_and_no_other(self, tmp_path):
        path = write(tmp_path / "text.txt", "old")
        documents = (1 / number for number in (2, 1, 0))
        with pytest.raises(ZeroDivisionError):
            write_documents(path, map(str, documents))
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_cleaning_keeps_prose_once_and_one_line_a_paragraph(self):
        documents = [
            ["soft\u00adhyphen  and\n a break", "1 2 3 4 5 6 7"],
            ["too short"],
            ["softhyphen and a break", "another one of these"],
        ]
        assert list(clean(documents, min_words=4)) == ["softhyphen and a break", "another one of these"]

    def test_without_a_word_limit_only_empty_paragraphs_go(self):
        assert list(clean([["1 2 3", " "], [""], ["x"]], min_words=None)) == ["1 2 3", "x"]

    def test_prose_needs_words_and_letters(self):
        assert is_prose("four words of text", 4)
        assert not is_prose("four words of text", 5)
        assert not is_prose("a = 1; b = 2; c = 3;", 4)


class TestArchive:
    @staticmethod
    def archive(folder: Path, kind: str) -> Path:
        """A package with two files, the later name first, and one that leaves the folder."""
        files = {"package/b.txt": b"b", "package/a.txt": b"a", "package/c.bin": b"c", "../evil.txt": b"e"}
        path = folder / f"p.{kind}"
        if kind == "whl":
            with zipfile.ZipFile(path, "w") as wheel:
                for name, content in files.items():
                    wheel.writestr(name, content)
        else:
            with tarfile.open(path, "w:gz") as tar:
                for name, content in files.items():
                    member = tarfile.TarInfo(f"./{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return path

    @pytest.mark.parametrize("kind", ["whl", "tgz"])
    def test_wanted_files_in_the_archive_s_order_and_none_outside(self, tmp_path, kind):
        inside = tmp_path / "deep" / "inside"
        paths = unpack(self.archive(tmp_path, kind), inside, r"\.txt$")
        assert [path.relative_to(inside).as_posix() for path in paths] == ["package/b.txt", "package/a.txt"]
        assert [path.read_bytes() for path in paths] == [b"b", b"a"]
        assert not list(tmp_path.rglob("evil.txt"))
        assert not list(tmp_path.rglob("c.bin"))

    @pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
    def test_debian_packages_without_their_links(self, tmp_path):
        write(
            tmp_path / "root/DEBIAN/control",
            "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: m\nDescription: d\n",
        )
        (write(tmp_path / "root/usr/a.html", "a").parent / "link.html").symlink_to("a.html")
        deb = tmp_path / "p_1_all.deb"
        subprocess.run(["dpkg-deb", "--build", tmp_path / "root", deb], check=True, capture_output=True)
        assert [path.name for path in unpack(deb, tmp_path / "x", r"\.html$")] == ["a.html"]

    def test_another_version_or_a_damaged_download_is_told(self, tmp_path):
        with pytest.raises(UserError) as error:
            unpack(self.archive(tmp_path, "whl"), tmp_path, r"\.rst$")
        assert "p.whl holds no file that matches" in one_sentence(error)
        for kind in ("whl", "tgz"):
            with pytest.raises(UserError) as error:
                unpack(write(tmp_path / f"bad.{kind}", b"half"), tmp_path, "x")
            assert f"bad.{kind} is damaged; delete it" in one_sentence(error)

    def test_a_source_is_extracted_cleaned_and_in_the_order_it_asks_for(self, tmp_path):
        archive = self.archive(tmp_path, "whl")
        for archive_order, expected in ((False, ["a", "b"]), (True, ["b", "a"])):
            source = Source(
                "s",
                "wiki",
                "t",
                PACKAGE,
                "CC0",
                True,
                r"\.txt$",
                books.paragraphs_by_line,
                1,
                archive_order=archive_order,
            )
            extract(source, archive, tmp_path / "s.txt")
            assert list(read_documents(tmp_path / "s.txt")) == expected


def paragraph(name: str, number: int, part: int) -> str:
    """A paragraph that is long enough to be kept unique."""
    return f"Paragraph {part} of document {number} of the source called {name}."


class TestMix:
    CAP = 1500
    HELD = (HeldOut("drawn", "b", "t", fraction=0.25), HeldOut("whole", "a", "t", sentence="document 4 of"))

    def build(self, folder: Path) -> dict[str, str]:
        """Mixes three sources: the second has the first's text too, the third has a limit and a held-out paragraph."""
        folder.mkdir()
        texts = {}
        for name in "abc":
            documents = [f"Heading\n{paragraph(name, number, 0)}\n{paragraph(name, number, 1)}" for number in range(40)]
            if name == "b":
                documents += [
                    f"{paragraph('a', 7, 0)}\nnew words, but no more than forty letters",
                    paragraph("a", 8, 1),
                ]
            if name == "c":
                documents[3] += f"\n{paragraph('a', 4, 1)}"
            texts[name] = folder / f"{name}.txt"
            write_documents(texts[name], documents)
        domains = {"a": "wiki", "b": "books", "c": "books"}
        sources = [
            Source(
                name,
                domains[name],
                "t",
                PACKAGE,
                "CC0",
                True,
                "",
                books.r_novels,
                max_bytes=self.CAP if name == "c" else None,
            )
            for name in "abc"
        ]
        out = folder / "out"
        out.mkdir()
        return {path.name: path.read_text() for path in mix(texts, out, sources, self.HELD)}

    def test_the_same_texts_give_the_same_bytes_in_shuffled_order(self, tmp_path):
        files = self.build(tmp_path / "1")
        assert files == self.build(tmp_path / "2")
        assert set(files) == {f"train_{domain}.txt" for domain in DOMAINS} | {"heldout_drawn.txt", "heldout_whole.txt"}
        wiki_text = files["train_wiki.txt"]
        places = [wiki_text.find(paragraph("a", number, 0)) for number in range(40) if number != 4]
        assert -1 not in places
        assert places != sorted(places)

    def test_held_out_paragraphs_are_in_no_training_file(self, tmp_path):
        files = self.build(tmp_path / "1")
        held = [line for name, text in files.items() if name.startswith("heldout") for line in text.splitlines()]
        held = [line for line in held if len(line) > MIN_UNIQUE_LENGTH]
        trained = {line for name, text in files.items() if name.startswith("train") for line in text.splitlines()}
        assert len(held) == 2 * 10 + 2
        assert not trained & set(held)
        assert "document 4 of" in files["heldout_whole.txt"]
        assert files["heldout_whole.txt"].count("Heading") == 1

    def test_a_long_paragraph_comes_once_and_a_heading_as_often_as_it_is_there(self, tmp_path):
        files = self.build(tmp_path / "1")
        text = files["train_wiki.txt"] + files["train_books.txt"]
        long = [line for line in text.splitlines() if len(line) > MIN_UNIQUE_LENGTH]
        assert len(long) == len(set(long)) > 100
        assert files["train_wiki.txt"].count("Heading") == 39
        assert paragraph("a", 7, 0) in files["train_wiki.txt"]
        assert paragraph("a", 7, 0) not in files["train_books.txt"]

    def test_a_limit_is_passed_by_one_document_at_most(self, tmp_path):
        documents = self.build(tmp_path / "1")["train_books.txt"].rstrip("\n").split("\n\n")
        limited = [document for document in documents if "source called c" in document]
        size = sum(len(document) + 2 for document in limited)
        assert self.CAP < size <= self.CAP + max(len(document) + 2 for document in limited)
        numbers = sorted(int(document.split("of document ")[1].split()[0]) for document in limited)
        assert numbers != list(range(len(numbers)))  # a random part, not the first

    def test_a_held_out_book_that_is_not_there_is_told(self, tmp_path):
        write_documents(tmp_path / "a.txt", ["no such words"])
        with pytest.raises(UserError) as error:
            mix({"a": tmp_path / "a.txt"}, tmp_path, [], [HeldOut("books", "a", "t", sentence="It is a truth")])
        assert "held-out set books would be empty" in one_sentence(error)


class TestSources:
    def test_names_are_unique_and_domains_known(self):
        assert len({source.name for source in SOURCES}) == len(SOURCES)
        assert {source.domain for source in SOURCES} == set(DOMAINS)

    def test_held_out_sets_are_of_different_sources_and_each_has_one_rule(self):
        names = {source.name for source in SOURCES}
        assert len({one.source for one in HELD_OUT}) == len(HELD_OUT)
        assert {one.source for one in HELD_OUT} <= names
        assert all((one.fraction is None) == bool(one.sentence) for one in HELD_OUT)

    def test_recorded_files_are_those_that_the_mix_writes(self):
        expected = {f"train_{domain}.txt" for domain in DOMAINS} | {f"heldout_{one.name}.txt" for one in HELD_OUT}
        assert set(RECORDED) == expected

    def test_no_excerpt_is_shipped_of_a_text_that_asks_for_the_same_licence(self):
        shipped = {source.licence for source in SOURCES if source.excerpts}
        assert shipped == {"public domain", "CC BY 3.0", "CC BY 4.0"}

    @pytest.mark.parametrize("table", [tables.licence_table, tables.held_out_table, tables.file_table])
    def test_the_documentation_has_the_tables_of_the_code(self, table):
        page = (REPOSITORY / "docs" / "corpus.md").read_text(encoding="utf-8")
        assert table() in page, "paste the output of `python -m tide.training.corpus --tables` into docs/corpus.md"

    def test_the_licence_table_tells_the_versions_that_were_downloaded(self):
        linux = next(source.package for source in SOURCES if source.name == "linux")
        assert "linux-doc-6.1 6.1.999-1 |" in tables.licence_table({linux: "6.1.999-1"})

    def test_a_changed_file_is_said_to_differ(self, tmp_path):
        assert compare(write(tmp_path / "train_wiki.txt", "changed")).startswith("differs")


class TestCommand:
    def test_tables_need_no_download(self, capsys):
        assert main(["--tables"]) == 0
        assert capsys.readouterr().out.count("| wiki | ") == 5

    def test_a_folder_that_cannot_be_written_to_is_named(self, tmp_path):
        file = write(tmp_path / "file", "")
        for arguments in (["--out", str(file)], ["--out", str(tmp_path), "--cache", str(file)]):
            with pytest.raises(UserError) as error:
                main(arguments)
            assert str(file) in one_sentence(error)
            assert arguments[-2] in str(error.value)

    @pytest.mark.parametrize(("registry", "program"), [("apt", "apt-get"), ("npm", "npm")])
    def test_a_missing_client_is_named(self, monkeypatch, registry, program):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(UserError) as error:
            require_clients([Package(registry, "x", "1")])
        assert f"{program} is not installed" in one_sentence(error)

    def test_a_missing_library_tells_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(UserError) as error:
            extras.import_extra("zstandard")
        assert 'pip install "tide-explorer[corpus]"' in one_sentence(error)

    @staticmethod
    def client(folder: Path, name: str, script: str, monkeypatch) -> None:
        """Puts a stand-in for a registry's client first in the path."""
        write(folder / name, f"#!/bin/sh\n{script}").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def test_a_failed_download_names_the_package_and_the_reason(self, tmp_path, monkeypatch):
        self.client(
            tmp_path / "bin", "npm", "touch half; echo 'npm error code E404\nnpm error more' >&2; exit 1", monkeypatch
        )
        (tmp_path / "cache").mkdir()
        with pytest.raises(UserError) as error:
            fetch(Package("npm", "@a/b", "1.0"), tmp_path / "cache")
        assert "@a/b@1.0 (npm error code E404)" in one_sentence(error)
        assert not list((tmp_path / "cache").rglob("half"))

    def test_apt_updates_its_lists_only_when_a_download_fails_and_a_second_fetch_downloads_nothing(
        self, tmp_path, monkeypatch
    ):
        log, deb = tmp_path / "log", "a_1%3a2-3_all.deb"
        script = f"""echo "$2" >> {log}
            [ "$2" = update ] && touch {log}.updated
            [ -e {log}.updated ] && [ "$2" = download ] && echo > {deb}"""
        self.client(tmp_path / "bin", "apt-get", script, monkeypatch)
        (tmp_path / "cache").mkdir()
        package = Package("apt", "a", "1:2-1")
        archive = fetch(package, tmp_path / "cache")
        assert log.read_text().split() == ["download", "update", "download"]
        assert fetch(package, tmp_path / "cache") == archive
        assert len(log.read_text().split()) == 3
        assert fetched_version(package, archive) == "1:2-3"
