"""Which stage needs which, what each is made from, and running those that are not there yet.

A stage has a key, a hash of all that it is made from. A stage whose key is in the manifest and whose files are whole
is kept; with other text, templates, counts or parameters it is made anew.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from precompute.artifacts import Artifacts
from precompute.collapse import collapse_tables, read_study
from precompute.frequency import token_table
from precompute.measure import Cost
from precompute.neighbors import STORED_K, load_faiss, neighbor_tables
from precompute.routing import FORMAT as ROUTING_FORMAT
from precompute.routing import routing_statistics
from precompute.store import Store, Tables
from precompute.text import check_text_files, describe_text, encode_files
from tide.checkpoint import COUNTS_FILE, check_checkpoint, fingerprint, load_checkpoint, read_config, token_counts
from tide.cli import UserError
from tide.config import TideConfig
from tide.frequency import count_tokens
from tide.model import TideForCausalLM
from tide.tokens import Vocabulary

NEEDS: dict[str, tuple[str, ...]] = {"frequency": (), "routing": ("frequency",), "neighbors": (), "collapse": ()}
"""The stages in the order in which they run, each with those it needs."""

PACKAGES = ("tide-explorer", "torch", "transformers", "numpy", "faiss-cpu", "faiss-gpu")


@dataclass(frozen=True)
class Job:
    """What to measure, on what.

    Attributes:
        checkpoint: folder of the model.
        out: folder of the artifacts.
        templates: file of the collapse study.
        text: held-out text, for routing; and for counts where there are no others.
        count_text: text whose tokens are counted, where the checkpoint holds no counts.
        base: folder of the Base model of the collapse study.
        device: cpu, cuda or mps.
        show_progress: draw progress bars and say what is done.
    """

    checkpoint: Path
    out: Path
    templates: Path
    text: tuple[Path, ...] = ()
    count_text: tuple[Path, ...] = ()
    base: Path | None = None
    device: str = "cpu"
    show_progress: bool = True


@dataclass
class Plan:
    """How one stage is made.

    Attributes:
        inputs: names all that it is made from; its hash is the stage's key.
        make: makes it.
        parameters: what the manifest says about how it was made.
        top: entries that it brings to the manifest itself.
    """

    inputs: dict[str, Any]
    make: Callable[[], Tables]
    parameters: dict[str, Any]
    top: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()[:32]


def stages_to_run(only: Sequence[str]) -> list[str]:
    """The stages asked for (all, where none is named) and those they need, in order."""
    wanted = set(only or NEEDS)
    wanted |= {needed for stage in wanted for needed in NEEDS[stage]}
    return [stage for stage in NEEDS if stage in wanted]


def run(job: Job, only: Sequence[str] = ()) -> list[str]:
    """Makes the artifacts that are not there yet.

    Args:
        job: what to measure.
        only: stages to make; by default all.

    Returns:
        The stages that were made, without those that were there.

    Raises:
        UserError: one sentence, for a wrong input (`ArtifactError` for a wrong folder).
    """
    return Pipeline(job).run(stages_to_run(only))


class Pipeline:
    """One run. Models and texts are read when the first stage that is not there asks for them."""

    def __init__(self, job: Job):
        self.job = job
        check_checkpoint(job.checkpoint)
        if job.base is not None:
            check_checkpoint(job.base)
            if blocks := read_config(job.base).get("num_memory_blocks", TideConfig.num_memory_blocks):
                raise UserError(
                    f"--base {job.base} has {blocks} memory banks; give a Base checkpoint, trained with K = 0."
                )

    def run(self, stages: Sequence[str]) -> list[str]:
        """Makes the stages of a list that are not there yet; returns their names."""
        plans = {stage: getattr(self, f"_plan_{stage}")() for stage in stages}  # wrong inputs end here, before any work
        self.store = Store(self.job.out, self._identity())
        made = []
        for stage, plan in plans.items():
            if self.store.is_done(stage, plan.key):
                self._say(f"{stage}: is there already")
                continue
            with Cost() as cost:
                tables = plan.make()
            record = {
                "parameters": plan.parameters,
                "device": self.job.device,
                "versions": versions(),
                "seconds": cost.seconds,
                "peak_memory_mb": cost.peak_memory_mb,
                "peak_gpu_memory_mb": cost.peak_gpu_memory_mb,
            }
            self.store.write_stage(stage, plan.key, tables, record, plan.top)
            self._say(f"{stage}: {cost.seconds:.1f} s, peak memory {cost.peak_memory_mb:,.0f} MB")
            made.append(stage)
        return made

    def _say(self, line: str) -> None:
        if self.job.show_progress:
            print(line, file=sys.stderr)

    # --- What everything is made from ------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        config = TideConfig.from_pretrained(self.job.checkpoint)
        model = {
            "num_layers": config.num_hidden_layers,
            "num_banks": config.num_memory_blocks,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
        }
        return {"checkpoint": self._named(self.job.checkpoint), "model": model}

    def _named(self, checkpoint: Path) -> dict[str, str]:
        """Path of a checkpoint seen from the artifacts folder, so that both can move together, and its fingerprint."""
        relative = os.path.relpath(checkpoint.resolve(), self.job.out.resolve())
        return {"path": Path(relative).as_posix(), "fingerprint": fingerprint(checkpoint)}

    @cached_property
    def _text(self) -> dict[str, Any]:
        if not self.job.text:
            raise UserError("There is no held-out text; give --text FILE.")
        check_text_files(self.job.text, "--text")
        return describe_text(self.job.text)

    @cached_property
    def _model(self) -> tuple[TideForCausalLM, PreTrainedTokenizerFast]:
        return load_checkpoint(self.job.checkpoint, self.job.device)

    # --- Plans -----------------------------------------------------------------------------------------------

    def _plan_frequency(self) -> Plan:
        counted = token_counts(self.job.checkpoint)
        if counted is not None:
            counts, corpus = counted
            source = {"counts": hashlib.sha256(counts.tobytes()).hexdigest()[:32]}
            parameters: dict[str, Any] = {"count_corpus": corpus, "count_source": COUNTS_FILE}
        else:
            text = self._count_text
            source = {"text": text["fingerprint"]}
            names = ", ".join(entry["name"] for entry in text["files"])
            parameters = {"count_corpus": names, "count_source": text}
        tokenizer = hashlib.sha256((self.job.checkpoint / "tokenizer.json").read_bytes()).hexdigest()[:32]
        inputs = {"stage": "frequency", "tokenizer": tokenizer, **source, "corpus": parameters["count_corpus"]}

        def make() -> Tables:
            model, tokenizer = self._model
            return token_table(Vocabulary(tokenizer, model.config.vocab_size), self._counts())

        return Plan(inputs, make, parameters)

    @cached_property
    def _count_text(self) -> dict[str, Any]:
        if not self.job.count_text:
            return self._text
        check_text_files(self.job.count_text, "--count-text")
        return describe_text(self.job.count_text)

    def _counts(self) -> np.ndarray:
        vocab_size = self._model[0].config.vocab_size
        counted = token_counts(self.job.checkpoint)
        if counted is None:
            files = self.job.count_text or self.job.text
            return count_tokens(files, self._model[1], vocab_size, self.job.show_progress)
        if len(counted[0]) != vocab_size:
            raise UserError(
                f"{self.job.checkpoint / COUNTS_FILE} has {len(counted[0]):,} counts, the model {vocab_size:,} "
                "token ids; remove the file or put the right one there."
            )
        return counted[0]

    def _plan_routing(self) -> Plan:
        window = TideConfig.from_pretrained(self.job.checkpoint).max_position_embeddings
        inputs = {
            "stage": "routing",
            "format": ROUTING_FORMAT,
            "text": self._text["fingerprint"],
            "window": window,
            "frequency": self._plan_frequency().key,
        }

        def make() -> Tables:
            model, tokenizer = self._model
            deciles = Artifacts(self.job.out, self.store.manifest).bins  # stored: a resumed run counts nothing again
            tokens = encode_files(self.job.text, tokenizer)
            return routing_statistics(model, tokens, deciles, window, show_progress=self.job.show_progress)

        parameters = {"format": ROUTING_FORMAT, "window_tokens": window, "text": self._text}
        return Plan(inputs, make, parameters, top={"text": self._text})

    def _plan_neighbors(self) -> Plan:
        load_faiss()  # a missing FAISS is said before any work
        parameters = {"k": STORED_K, "metric": "cosine", "index": "IndexFlatIP"}

        def make() -> Tables:
            return neighbor_tables(self._model[0], show_progress=self.job.show_progress)

        return Plan({"stage": "neighbors", **parameters}, make, parameters)

    def _plan_collapse(self) -> Plan:
        study = read_study(self.job.templates)
        content = hashlib.sha256(self.job.templates.read_bytes()).hexdigest()[:32]
        base = self._named(self.job.base) if self.job.base is not None else None
        inputs = {"stage": "collapse", "templates": content, "base": base["fingerprint"] if base else None}

        def make() -> Tables:
            models = {"tide": self._model}
            if self.job.base is not None:
                models["base"] = load_checkpoint(self.job.base, self.job.device)
            return collapse_tables(models, study, self.job.show_progress)

        parameters = {"templates": {"name": self.job.templates.name, "fingerprint": content}}
        return Plan(inputs, make, parameters, top={"base": base})


def versions() -> dict[str, str]:
    """Versions of the packages that decide what comes out."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
