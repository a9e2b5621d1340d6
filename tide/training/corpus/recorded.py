"""What the corpus was when its sizes and sums were recorded: on Debian 12, with lxml 6.1 (libxml2 2.14)."""

import hashlib
from pathlib import Path

RECORDED = {
    "train_wiki.txt": (25_328_014, "2ed0ef0468e4da3e75ae26d7c0fef7f9"),
    "train_books.txt": (34_575_357, "ea7a8a57305b2b6ae2fdab520aeb4667"),
    "train_biomed.txt": (32_023_299, "2e1171427baaa98166edea435b626d16"),
    "train_tech.txt": (45_556_387, "dfcec3c011116fba79f824bb28caabab"),
    "train_web.txt": (15_672_606, "0d00431dc6ecad9934e6359e48ccfcee"),
    "heldout_wikitext_like.txt": (497_894, "fa4a077c6a30c4773c6fa69d6fa3d14d"),
    "heldout_wiki_lead.txt": (251_643, "d84b2f7a9b7aef89f580a1bf1c57cb9f"),
    "heldout_biomed_like.txt": (225_042, "7eb906a4218a72fef5837de67f8dab55"),
    "heldout_books.txt": (681_726, "60ecf3a372b4e44b5dfa7b217afe5de0"),
    "heldout_tech.txt": (757_982, "d997f397c6319bbca96398dda81e5423"),
    "heldout_web.txt": (316_437, "7e07dc3bc3462af8b1bb58ac0c60157b"),
}
"""Size in bytes and MD5 sum of each file."""


def compare(path: Path) -> str:
    """Says in words whether a file of the corpus is the recorded one."""
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return "as recorded" if md5 == RECORDED[path.name][1] else "differs (another package version?)"
