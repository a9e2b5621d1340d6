"""Makes the corpus of extracted sources: held-out sets, domain files, no paragraph twice, always the same bytes."""

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tide.cli import UserError
from tide.training.corpus.documents import fingerprint, read_documents, write_documents
from tide.training.corpus.sources import DOMAINS, HeldOut, Source

MIN_UNIQUE_LENGTH = 40
"""Longer paragraphs, in characters, are in the corpus once; shorter ones are headings and the like."""

_MIX_SEED = 0
_HELD_OUT_SEED = 1


def mix(texts: Mapping[str, Path], out: Path, sources: Iterable[Source], held_out: Iterable[HeldOut]) -> list[Path]:
    """Writes the held-out sets and the domain files.

    Args:
        texts: the corpus file of each source, by its name.
        out: folder to write `heldout_NAME.txt` and `train_DOMAIN.txt` to.
        sources: all sources; the order matters, see `SOURCES`.
        held_out: the held-out sets, of different sources.

    Returns:
        The files written.

    Raises:
        UserError: if a held-out set would be empty.
    """
    paths = []
    kept_out: dict[str, set[int]] = {}  # documents by number, of each source that has a held-out set
    used: set[bytes] = set()  # fingerprints of the paragraphs that must not come again
    for one in held_out:
        documents = list(read_documents(texts[one.source]))
        kept_out[one.source] = chosen = _choose(one, documents)
        paths.append(out / f"heldout_{one.name}.txt")
        write_documents(paths[-1], (documents[number] for number in sorted(chosen)))
        for number in chosen:
            used.update(map(fingerprint, documents[number].split("\n")))

    rng = random.Random(_MIX_SEED)
    for domain in DOMAINS:
        domain_documents: list[str] = []
        for source in sources:
            if source.domain == domain:
                left_out = kept_out.get(source.name, set())
                numbered = enumerate(read_documents(texts[source.name]))
                documents = [document for number, document in numbered if number not in left_out]
                domain_documents += _take(documents, source.max_bytes, used, rng)
        rng.shuffle(domain_documents)
        paths.append(out / f"train_{domain}.txt")
        write_documents(paths[-1], domain_documents)
    return paths


def _choose(held_out: HeldOut, documents: list[str]) -> set[int]:
    """The numbers of the documents of a held-out set: drawn, or those with its sentence."""
    if held_out.fraction is not None:
        count = max(1, int(len(documents) * held_out.fraction))
        return set(random.Random(_HELD_OUT_SEED).sample(range(len(documents)), count))
    chosen = {number for number, document in enumerate(documents) if held_out.sentence in document}
    if not chosen:
        raise UserError(
            f"the held-out set {held_out.name} would be empty, as no document of {held_out.source} has the words "
            f"“{held_out.sentence}”; use the package version that docs/corpus.md names"
        )
    return chosen


def _take(documents: list[str], max_bytes: int | None, used: set[bytes], rng: random.Random) -> Iterator[str]:
    """Yields documents without the paragraphs used before; where there is a limit, in random order up to it."""
    if max_bytes is not None:
        rng.shuffle(documents)
    size = 0
    for document in documents:
        kept = []
        for paragraph in document.split("\n"):
            mark = fingerprint(paragraph)
            if len(paragraph) <= MIN_UNIQUE_LENGTH or mark not in used:
                used.add(mark)
                kept.append(paragraph)
        if kept:
            yield "\n".join(kept)
            size += len("\n".join(kept).encode()) + len("\n\n")
            if max_bytes is not None and size > max_bytes:
                return
