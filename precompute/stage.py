"""What a stage is, and what a run gives it to work with.

A stage measures one thing. Its work is cut into pieces that depend on its inputs alone, never on the number of
processes: whoever makes a piece, and however often a run was killed, the pieces and what is made of them are the same.
"""

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tqdm import tqdm

from precompute.artifacts import Artifacts
from precompute.parts import Parts
from precompute.store import Tables, read_manifest
from precompute.tables import CheckpointTables
from precompute.text import HeldOutText, describe_text
from tide.checkpoint import fingerprint, load_checkpoint
from tide.cli import UserError
from tide.config import TideConfig
from tide.model import TideForCausalLM
from tide.tokens import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WHOLE = "all"
GIB = 2**30
DEFAULT_WINDOW = 2048  # sequence length of Table 7; models that take more read no more at once here


@dataclass(frozen=True)
class Job:
    """What to measure, on what.

    Attributes:
        checkpoint: folder of the model.
        out: folder of the artifacts.
        templates: file of the collapse study.
        text: held-out text, for everything that runs the model; and for counts where there are no others.
        count_text: text whose tokens are counted, as `tide-train --data` takes it; instead of the counts that the
            checkpoint holds.
        base: folder of the Base model to compare with.
        device: cpu, cuda or mps.
        max_memory: bytes that a stage may take beyond the model's backbone and one table.
        window: tokens that the model reads at once; None takes what it was made for, up to 2,048.
        probe_tokens: tokens of the held-out text on which the model is changed and measured again, many times.
        index: form of the neighbour indexes on disk: flat (exact), fp16 or sq8.
        reuse: another folder with artifacts of the same checkpoint, from which stages that are there are taken.
        show_progress: draw progress bars and say what is done.
    """

    checkpoint: Path
    out: Path
    templates: Path
    text: tuple[Path, ...] = ()
    count_text: tuple[str, ...] = ()
    base: Path | None = None
    device: str = "cpu"
    max_memory: int = 4 * GIB
    window: int | None = None
    probe_tokens: int = 8_192
    index: str = "flat"
    reuse: Path | None = None
    show_progress: bool = True


class Context:
    """What the stages of one run share. Models, tables and text are opened when the first stage asks for them.

    Attributes:
        job: what to measure, on what.
        config: of the checkpoint.
        shows_progress: whether this process draws bars and speaks.
        parts: the pieces of the stage that is being made; those of earlier rounds are there.
    """

    def __init__(self, job: Job):
        self.job = job
        self.config = TideConfig.from_pretrained(job.checkpoint)
        self.shows_progress = job.show_progress
        self.parts: Parts | None = None
        self._loaded: dict[Path, tuple[TideForCausalLM, PreTrainedTokenizerFast]] = {}

    @cached_property
    def tables(self) -> CheckpointTables:
        """The input embedding and the banks, row by row from the checkpoint's files; no model is loaded."""
        return CheckpointTables(self.job.checkpoint, self.config)

    @property
    def model(self) -> TideForCausalLM:
        """The checkpoint's model on the job's device, in evaluation mode. Whoever changes it puts it back.

        Its memory, and an untied input embedding, stay in the checkpoint's file: a forward reads the rows of its
        tokens. Of this model and Base only the one that was asked for last is held, and that until the stage is done.
        """
        return self._load(self.job.checkpoint)[0]

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The checkpoint's tokenizer."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.job.checkpoint)
        return tokenizer

    @property
    def base(self) -> "tuple[TideForCausalLM, PreTrainedTokenizerFast]":
        """The Base model, as `model`, and its tokenizer.

        Raises:
            UserError: when the job names none, or it cannot be loaded.
        """
        if self.job.base is None:
            raise UserError("There is no Base checkpoint to compare with; give --base CHECKPOINT.")
        return self._load(self.job.base)

    def _load(self, checkpoint: Path) -> "tuple[TideForCausalLM, PreTrainedTokenizerFast]":
        if checkpoint not in self._loaded:
            self.drop_models()  # before the other is read
            self._loaded[checkpoint] = load_checkpoint(checkpoint, self.job.device, memory="disk")
        return self._loaded[checkpoint]

    def drop_models(self) -> None:
        """Lets go of the model that is held; who asks for one later has it loaded anew."""
        self._loaded.clear()

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Names the checkpoint's tokenizer, 32 hexadecimal digits."""
        return hashlib.sha256((self.job.checkpoint / "tokenizer.json").read_bytes()).hexdigest()[:32]

    @cached_property
    def text_entry(self) -> dict[str, Any]:
        """What the manifest says of the held-out files; they are read once for it."""
        return describe_text(self.job.text)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Token ids as text, of the model's size V."""
        return Vocabulary(self.tokenizer, self.config.vocab_size)

    @property
    def artifacts(self) -> Artifacts:
        """What the stages that are done have measured."""
        return Artifacts(self.job.out, read_manifest(self.job.out))

    @property
    def text(self) -> HeldOutText:
        """The held-out text as the stage `text` has tokenised it, memory-mapped."""
        return HeldOutText.open(self.artifacts)

    @property
    def deciles(self) -> np.ndarray:
        """[V] int8, frequency decile of every token id, -1 where none, as the stage `frequency` has it."""
        return self.artifacts.bins

    def bar(self, total: int, what: str, unit: str) -> tqdm:
        """A progress bar on stderr; of several processes only the first draws."""
        return tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, disable=not self.shows_progress)

    def base_entry(self) -> dict[str, str] | None:
        """What the manifest says of the Base checkpoint: its path, seen from the artifacts folder, and fingerprint."""
        return None if self.job.base is None else named(self.job.base, self.job.out)

    @property
    def window(self) -> int:
        """Tokens that the model reads at once."""
        return self.job.window or min(self.config.max_position_embeddings, DEFAULT_WINDOW)

    def rows_within(self, bytes_per_row: float, share: float = 0.5, most: int | None = None) -> int:
        """How many rows of a tile fit into the memory that a stage may take.

        Args:
            bytes_per_row: all that one row costs while it is worked on.
            share: of the memory that the tile may take.
            most: never more than these.

        Raises:
            UserError: when not a single row fits.
        """
        rows = math.floor(self.job.max_memory * share / bytes_per_row)
        if rows < 1:
            need = bytes_per_row / share / GIB
            raise UserError(f"--max-memory is too little: one row of a table needs {need:.2g} GiB here; give more.")
        return rows if most is None else min(rows, most)


def named(checkpoint: Path, out: Path) -> dict[str, str]:
    """Path of a checkpoint seen from the artifacts folder, so that both can move together, and its fingerprint."""
    relative = os.path.relpath(checkpoint.resolve(), out.resolve())
    return {"path": Path(relative).as_posix(), "fingerprint": fingerprint(checkpoint)}


class Stage(ABC):
    """One stage.

    Attributes:
        name: of its folder and on the command line.
        needs: stages that it reads; other inputs of theirs make this one anew.
        format: of what it stores; a new number makes older artifacts of this stage anew.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    format: ClassVar[int] = 1

    def unavailable(self, context: Context) -> str | None:
        """Why this stage cannot be made of this checkpoint, and what would help, as a sentence; None where it can.

        Such a stage is left out of a run of all stages, and refused when it is asked for by name.
        """
        return None

    def check(self, context: Context) -> None:  # noqa: B027
        """Checks the inputs before any work.

        Raises:
            UserError: one sentence.
        """

    def inputs(self, context: Context) -> dict[str, Any]:
        """All that decides what comes out, beside the checkpoint and the stages that it needs; plain JSON."""
        return {}

    def parameters(self, context: Context) -> dict[str, Any]:
        """What the manifest says about how it was made; by default its inputs."""
        return self.inputs(context)

    def top(self, context: Context) -> dict[str, Any]:
        """Entries that it brings to the manifest itself: "text", "base"."""
        return {}

    def pieces(self, context: Context) -> Sequence[str]:
        """Names of the pieces of its work, which are file names too; decided by the inputs alone."""
        return (WHOLE,)

    def rounds(self, context: Context) -> Sequence[Sequence[str]]:
        """The pieces, those that are made from others in a later round; by default all in one."""
        return (self.pieces(context),)

    @abstractmethod
    def measure(self, context: Context, piece: str) -> Tables:
        """Makes one piece. Pieces of a round are made in any order, by any process."""

    def combine(self, context: Context, parts: Parts) -> Tables:
        """Makes the stage's files of its pieces, all of which are there; by default the files of all pieces."""
        return parts.files()


Stages = Mapping[str, Stage]
