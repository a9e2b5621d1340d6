"""Stage `text`: the held-out text as token ids, once for all stages that run the model, and for showing contexts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from precompute.parts import Parts
from precompute.stage import Context, Stage
from precompute.store import Tables
from precompute.text import check_text_files, domain_names
from tide.cli import UserError
from tide.training.corpus import read_documents
from tide.training.data import encode_documents


class Text(Stage):
    """One piece a file."""

    name = "text"

    def check(self, context: Context) -> None:
        """The files must be there, and the window must fit the model.

        Raises:
            UserError: one sentence.
        """
        if not context.job.text:
            raise UserError("There is no held-out text; give --text FILE.")
        check_text_files(context.job.text, "--text")
        longest = context.config.max_position_embeddings
        if context.window > longest:
            raise UserError(f"--window {context.window} is more than the {longest} tokens that the model takes.")

    def inputs(self, context: Context) -> dict[str, Any]:
        """The text, its files in order, the tokenizer and the window."""
        return {
            **context.text_entry,
            "tokenizer": context.tokenizer_fingerprint,
            "window_tokens": context.window,
        }

    def parameters(self, context: Context) -> dict[str, Any]:
        """The inputs, and what the texts are called."""
        return {**self.inputs(context), "domains": domain_names(context.job.text)}

    def top(self, context: Context) -> dict[str, Any]:
        """The text that everything was measured on."""
        return {"text": context.text_entry}

    def pieces(self, context: Context) -> Sequence[str]:
        """One a file."""
        return [f"file-{number:04d}" for number in range(len(context.job.text))]

    def measure(self, context: Context, piece: str) -> Tables:
        """Token ids of one file: `tokens` int32 [n]."""
        file = context.job.text[int(piece.removeprefix("file-"))]
        documents = encode_documents(read_documents(file), context.tokenizer)
        parts = [ids.astype(np.int32) for ids in documents] or [np.empty(0, dtype=np.int32)]
        return {"tokens": {"tokens": np.concatenate(parts)}}

    def combine(self, context: Context, parts: Parts) -> Tables:
        """`tokens`: tokens int32 [N], file_starts int64 [F+1].

        Raises:
            UserError: when all files together hold no text.
        """
        files = [parts.tensors(piece, "tokens")["tokens"] for piece in parts.pieces]
        if not sum(map(len, files)):
            raise UserError(
                f"There is no text in {', '.join(map(str, context.job.text))}; give --text files that hold some."
            )
        starts = np.cumsum([0, *map(len, files)], dtype=np.int64)
        return {"tokens": {"tokens": np.concatenate(files), "file_starts": starts}}
