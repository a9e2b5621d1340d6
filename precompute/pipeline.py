"""Making the artifacts that are not there yet: which stage comes when, resumption, several processes, progress.

A stage has a key, a hash of all that it is made from, the keys of the stages that it needs included. A stage whose key
is in the manifest and whose files are whole is kept; with other text, templates, counts or parameters it is made anew.
Of a stage that is not finished, the pieces that are there are kept.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

from precompute.measure import Cost, total
from precompute.parts import Parts
from precompute.stage import Context, Job, Stage, named
from precompute.stages import STAGES
from precompute.store import ArtifactError, Store
from precompute.workers import Workers
from tide.checkpoint import check_checkpoint, read_config
from tide.cli import UserError
from tide.config import TideConfig

PACKAGES = ("tide-explorer", "torch", "transformers", "numpy", "faiss-cpu", "faiss-gpu", "scikit-learn", "umap-learn")


def stages_to_run(only: Sequence[str]) -> list[str]:
    """The stages asked for (all, where none is named) and those they need, in order."""
    wanted = set(only or STAGES)
    while missing := {needed for name in wanted for needed in STAGES[name].needs} - wanted:
        wanted |= missing
    return [name for name in STAGES if name in wanted]


def run(job: Job, only: Sequence[str] = ()) -> list[str]:
    """Makes the artifacts that are not there yet.

    Args:
        job: what to measure.
        only: stages to make; by default all that can be made of this checkpoint.

    Returns:
        The stages that were made, without those that were there.

    Raises:
        UserError: one sentence, for a wrong input (`ArtifactError` for a wrong folder).
    """
    return Pipeline(job).run(only)


class Pipeline:
    """One run, alone or one of several processes of it."""

    def __init__(self, job: Job):
        check_checkpoint(job.checkpoint)
        if job.base is not None:
            check_checkpoint(job.base)
            if blocks := read_config(job.base).get("num_memory_blocks", TideConfig.num_memory_blocks):
                raise UserError(
                    f"--base {job.base} has {blocks} memory banks; give a Base checkpoint, trained with K = 0."
                )
        self.workers = Workers()
        self.job = replace(
            job, device=self.workers.device(job.device), show_progress=job.show_progress and self.workers.is_first
        )
        self.context = Context(self.job)
        self._keys: dict[str, str] = {}

    def run(self, only: Sequence[str] = ()) -> list[str]:
        """Makes stages that are not there yet; returns their names."""
        stages = [STAGES[name] for name in stages_to_run(only)]
        for stage in list(stages):
            if why := stage.unavailable(self.context):
                if stage.name in only or any(stage.name in other.needs for other in stages):
                    raise UserError(why)
                self._say(f"{stage.name}: left out. {why}")
                stages.remove(stage)
        for stage in stages:
            stage.check(self.context)  # wrong inputs end here, before any work
        if self.workers.is_first:
            self._open()  # a folder that cannot be used ends here
        self.workers.wait()
        _ = self._other  # so does one that cannot be reused
        return [stage.name for stage in stages if self._make(stage)]

    def _open(self) -> Store:
        return Store(self.job.out, self._identity)

    def _make(self, stage: Stage) -> bool:
        """Makes one stage, unless it is there."""
        self.workers.wait()  # the first process has written what comes before
        key, store = self.key(stage), Store.reopen(self.job.out)
        if store.is_done(stage.name, key):
            self._say(f"{stage.name}: is there already")
            return False
        if self._is_reusable(stage.name, key):
            if self.workers.is_first:
                self._reuse(stage, key, store)
            return False
        rounds = stage.rounds(self.context)
        parts = Parts(self.job.out, stage.name, key, list(chain.from_iterable(rounds)))
        if self.workers.is_first:
            parts.prepare()
        if there := len(parts.pieces) - len(parts.missing()):
            self._say(f"{stage.name}: {there} of {len(parts.pieces)} pieces are there already")
        self.context.parts = parts
        for pieces in rounds:
            missing = parts.missing(pieces)
            self.workers.wait()  # all have seen the same pieces missing
            for piece in self.workers.mine(missing):
                with Cost() as cost:
                    tables = stage.measure(self.context, piece)
                parts.write(piece, tables, cost)
                del tables  # before the next piece is made
            self.workers.wait()
        self.context.drop_models()  # the next stage may need the memory for tables
        if self.workers.is_first:
            self._finish(stage, key, parts, store)
        return True

    @cached_property
    def _other(self) -> Store | None:
        """The folder of `--reuse`.

        Raises:
            ArtifactError: when it cannot be read, or holds artifacts of another checkpoint.
        """
        if self.job.reuse is None:
            return None
        other = Store.reopen(self.job.reuse)
        if other.manifest["checkpoint"]["fingerprint"] != self._identity["checkpoint"]["fingerprint"]:
            raise ArtifactError(
                f"--reuse {self.job.reuse} holds artifacts of another checkpoint; leave the option out."
            )
        return other

    def _is_reusable(self, stage: str, key: str) -> bool:
        return self._other is not None and self._other.is_done(stage, key)

    def _reuse(self, stage: Stage, key: str, store: Store) -> None:
        assert self._other is not None
        entry = dict(self._other.manifest["stages"][stage.name])
        files = [self._other.folder / name for name in entry.pop("files")]
        store.write_stage(stage.name, key, {file.name: file for file in files}, entry, stage.top(self.context))
        self._say(f"{stage.name}: taken from {self._other.folder}")

    def _finish(self, stage: Stage, key: str, parts: Parts, store: Store) -> None:
        with Cost() as cost:
            tables = stage.combine(self.context, parts)
        spent = total([*parts.costs(), cost.record()])
        record = {
            "needs": {name: self.key(STAGES[name]) for name in stage.needs},
            "parameters": stage.parameters(self.context),
            "device": self.job.device,
            "processes": self.workers.count,
            "versions": versions(),
            **spent,
        }
        store.write_stage(stage.name, key, tables, record, stage.top(self.context))
        parts.clear()
        self._say(f"{stage.name}: {spent['seconds']:.1f} s, peak memory {spent['peak_memory_mb']:,.0f} MB")

    def key(self, stage: Stage) -> str:
        """32 hexadecimal digits that name all that a stage is made from."""
        if stage.name not in self._keys:
            inputs = {
                "stage": stage.name,
                "format": stage.format,
                "inputs": stage.inputs(self.context),
                "needs": {name: self.key(STAGES[name]) for name in stage.needs},
            }
            content = json.dumps(inputs, sort_keys=True).encode()
            self._keys[stage.name] = hashlib.sha256(content).hexdigest()[:32]
        return self._keys[stage.name]

    def _say(self, line: str) -> None:
        if self.job.show_progress:
            print(line, file=sys.stderr)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        config = self.context.config
        model = {
            "num_layers": config.num_hidden_layers,
            "num_banks": config.num_memory_blocks,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "tied": config.tie_word_embeddings,
        }
        return {"checkpoint": named(self.job.checkpoint, self.job.out), "model": model}


def versions() -> dict[str, str]:
    """Versions of the packages that decide what comes out."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
