"""The corpus's extractors on tiny packages: what each keeps, what it drops, in which order."""

import bz2
import gzip
import json
import sqlite3
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from tide.training.corpus.extract import books, manuals, ontologies, records, services, wiki


def write(path: Path, content: str | bytes) -> Path:
    """Writes a fixture, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(document) -> list[str]:
    """The paragraphs of an extracted document that are not empty, without the white space around them."""
    return [paragraph.strip() for paragraph in document if paragraph.strip()]


class TestManuals:
    PAGE = """<?xml version="1.0" encoding="utf-8"?><html><head><title>Title</title></head><body class="toc">
        <nav><p>Menu</p></nav><div class="sphinxsidebar"><p>Sidebar</p></div>
        <h1>Heading<a class="headerlink">¶</a></h1><ul><li><p>Item with <em>emphasis</em>.</p></li></ul>
        <pre>code</pre> <table><tr><td>Cell</td></tr></table><div class="para">DocBook.</div>
        <div>Bare.</div></body></html>"""

    def test_a_page_gives_its_innermost_blocks_without_navigation_code_and_tables(self):
        assert lines(manuals.page_paragraphs(self.PAGE)) == ["Heading", "Item with emphasis.", "DocBook."]

    def test_pages_may_be_gzipped_latin1_or_empty(self, tmp_path):
        files = [
            write(tmp_path / "a.html", "<p>caf\u00e9</p>".encode("latin-1")),
            write(tmp_path / "b.html.gz", gzip.compress(b"<p>zipped</p>")),
            write(tmp_path / "c.html", " "),
            write(tmp_path / "d.html", "<!-- only this -->"),
        ]
        assert [lines(page) for page in manuals.html_pages(files)] == [["café"], ["zipped"], [], []]

    def test_pod_gives_text_without_commands_code_and_formatting(self, tmp_path):
        pod = write(tmp_path / "perlx.pod", "=head1 NAME\n\nUse C<< print >> and\nB<bold>.\n\n    code;\n\n=cut\n")
        assert [lines(page) for page in manuals.pod_pages([pod])] == [["Use print and\nbold."]]


class TestWiki:
    MARKUP = """{{Infobox|name={{nested}}}}'''Bold''' [[Link|text]] and [[plain]]<ref name="a"/><ref>Source</ref>.
[[File:x.png|thumb|Caption with [[a link]]]]
{| class="wikitable"
| cell
|}
== History ==
* Item [http://example.org of a list] &amp; <!-- hidden -->more<br/>
== References ==
Not kept."""

    def test_markup_becomes_text_up_to_the_references(self):
        expected = ["Bold text and plain.", "= History =", "Item of a list & more"]
        assert lines(wiki.article_paragraphs(self.MARKUP)) == expected

    def test_a_dump_gives_articles_only(self, tmp_path):
        def page(inside: str) -> str:
            return f"<page><title>T</title>{inside}</page>"

        dump = (
            page("<ns>0</ns><text>An article &amp;lt;3.</text>")
            + page("<ns>0</ns><redirect /><text>A redirect.</text>")
            + page("<ns>4</ns><text>A policy.</text>")
            + page("<text>No namespace.</text>")
        )
        file = write(tmp_path / "dump.bz2", bz2.compress(dump.encode()))
        assert [lines(article) for article in wiki.dump_articles([file])] == [["An article <3."], ["No namespace."]]


class TestBooks:
    def test_plain_books_split_at_blank_lines_speeches_at_lines(self, tmp_path):
        book = write(tmp_path / "book.txt", "one\ntwo\n \nthree\n")
        assert [lines(text) for text in books.paragraphs_by_blank_line([book])] == [["one\ntwo", "three"]]
        assert [lines(text) for text in books.paragraphs_by_line([book])] == [["one", "two", "three"]]

    def test_plays_lose_markdown(self, tmp_path):
        play = write(tmp_path / "play.md", "# Act I\n\n**HAMLET**\n> To be, _or_ not to be\n")
        assert [lines(text) for text in books.markdown_plays([play])] == [["Act I", "HAMLET", "To be, or not to be"]]

    @staticmethod
    def r_object(strings: list[str | None], kind: int = 16) -> bytes:
        """An object of an R lazy-load data base: a vector of strings, None for a missing one."""
        content = (
            b"X\n" + struct.pack(">4i", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">2i", kind, len(strings))
        )
        for string in strings:
            encoded = (string or "").encode()
            content += struct.pack(">2i", 0x00040009, -1 if string is None else len(encoded)) + encoded
        return struct.pack(">i", len(content)) + zlib.compress(content)

    def test_r_novels_are_all_read_whatever_bytes_their_sizes_have(self, tmp_path):
        first, second = ["It is a truth", "x" * 0x78, "", None, "acknowledged"], ["Emma", "", "£20,000", "handsome"]
        number = self.r_object(["not a novel"], kind=13)
        file = write(tmp_path / "Rdata.rdb", self.r_object(first) + number + self.r_object(second))
        novels = [lines(novel) for novel in books.r_novels([file])]
        assert novels == [["It is a truth\n" + "x" * 0x78, "acknowledged"], ["Emma", "handsome"]]

    @pytest.mark.parametrize("unit", ["b", "c"])
    def test_a_sword_module_gives_the_old_testament_first_and_skips_empty_blocks(self, tmp_path, unit):
        for testament, text in {
            "nt": "<verse/>The book<note>n</note>",
            "ot": "<p>In the <i>beginning</i></p>God &amp;",
        }.items():
            block = zlib.compress(text.encode())
            write(tmp_path / f"{testament}.{unit}zz", b"pad" + block)
            index = struct.pack("<3I", 0, 0, 0) + struct.pack("<3I", 3, len(block), len(text))
            write(tmp_path / f"{testament}.{unit}zs", index)
        documents = [lines(text) for text in books.sword_module(sorted(tmp_path.iterdir()))]
        assert documents == [["In the beginning", "God &"], ["The book", "n"]]


class TestOntologies:
    def test_the_newest_version_of_a_cellxgene_ontology_without_deprecated_terms(self, tmp_path):
        zstandard = pytest.importorskip("zstandard")
        terms = {
            "X:1": {"label": " cold ", "description": "An infection."},
            "X:2": {"label": "old", "description": "Gone.", "deprecated": True},
            "X:3": {"label": "bare", "description": None},
        }
        old = write(tmp_path / "X-ontology-v1.json.zst", b"not read")
        new = write(tmp_path / "X-ontology-v2.json.zst", zstandard.compress(json.dumps(terms).encode()))
        assert list(ontologies.cellxgene_terms([old, new])) == [["cold: An infection."]]

    def test_an_obo_stanza_gives_definition_and_comment(self, tmp_path):
        obo = write(
            tmp_path / "hp.obo",
            'format: 1.2\n\n[Term]\nid: 1\nname: Gout\ndef: "A \\"crystal\\" disease." [X:1]\ncomment: Common.\n\n'
            "[Term]\nid: 2\nname: Undefined\n",
        )
        assert list(ontologies.obo_terms([obo])) == [['Gout: A "crystal" disease. Common.']]

    def test_the_gene_ontology_skips_terms_without_definition(self, tmp_path):
        with sqlite3.connect(tmp_path / "GO.sqlite") as connection:
            connection.execute("CREATE TABLE go_term (term, definition)")
            connection.executemany("INSERT INTO go_term VALUES (?, ?)", [("b", "second"), ("c", None), ("a", "first")])
        connection.close()
        assert list(ontologies.gene_ontology_terms([tmp_path / "GO.sqlite"])) == [["b: second"], ["a: first"]]

    def test_descriptions_of_databases_come_registry_by_registry(self, tmp_path):
        files = [
            write(tmp_path / f"{name}.json", json.dumps({"x": [{"description": name, "name": "no"}]}))
            for name in sorted(ontologies.DATABASE_REGISTRIES)
        ]
        found = [description for [description] in ontologies.database_descriptions(files)]
        assert found == list(ontologies.DATABASE_REGISTRIES)


class TestServicesAndRecords:
    def test_aws_takes_the_newest_date_of_each_service(self, tmp_path):
        files = []
        for name in ("s3/2006-03-01", "s3/2020-01-01", "s3-x/2010-01-01"):
            text = {
                "a": {"documentation": f"<p>{name}</p><note>N &lt; 1</note>"},
                "documentation": {"documentation": "deep"},
            }
            files.append(write(tmp_path / name / "service-2.json.gz", gzip.compress(json.dumps(text).encode())))
        documents = [lines(document) for document in services.aws_services(files)]
        assert documents == [["s3/2020-01-01", "N < 1", "deep"], ["s3-x/2010-01-01", "N < 1", "deep"]]

    def test_google_descriptions_come_in_the_order_of_the_file(self, tmp_path):
        api = {
            "description": "one\ntwo",
            "x": [{"enumDescriptions": ["three"], "enum": ["NO"]}],
            "deprecationNotice": "four",
        }
        file = write(tmp_path / "api.json", json.dumps(api))
        assert [lines(document) for document in services.google_services([file])] == [["one", "two", "three", "four"]]

    def test_records_of_each_kind(self, tmp_path):
        leads = write(tmp_path / "leads.json", json.dumps({"A": {"extract": "A is a letter."}}))
        country = write(tmp_path / "xx.json", json.dumps({"Geography": {"Area": {"text": "small"}}, "n": 3}))
        words = write(tmp_path / "d.dict.dz", gzip.compress(b"bit\n  see {byte}\n\nbyte\n"))
        cake = {"title": "Cake", "ingredients": ["flour", "eggs"], "steps": ["Mix.", "Bake."]}
        cookbook = write(tmp_path / "recipes.json", json.dumps({"1": cake, "2": {"title": "Air"}}))
        assert list(records.article_leads([leads])) == [["A is a letter."]]
        assert [list(profile) for profile in records.country_profiles([country])] == [["small"]]
        assert list(records.dictionary_entries([words])) == [["bit\n  see byte"], ["byte\n"]]
        expected = [["Cake. Ingredients: flour, eggs.", "Mix. Bake."], ["Air. Ingredients: .", ""]]
        assert list(records.recipes([cookbook])) == expected

    def test_speeches_keep_line_ends_in_quotes_together(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
            archive.writestr("en.csv", 'speaker,text\nA,"Order,\norder!"\nB,No.\n')
        assert list(records.speeches([tmp_path / "s.zip"])) == [["Order,\norder!"], ["No."]]
