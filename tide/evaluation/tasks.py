"""Zero-shot tasks through lm-eval, Table 2 of the paper.

Importing this module imports lm-eval, which is an extra.
"""

import contextlib
import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pandas as pd
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import first_line
from tide.cli import UserError
from tide.model import TideForCausalLM

PAPER = "paper"
PAPER_TASKS = (
    "arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "openbookqa", "piqa", "sciq",
)  # fmt: skip
AVERAGE = "average"
AVERAGED_METRIC = "acc"

for _logger in ("lm_eval", "huggingface_hub"):  # what matters of their warnings becomes a `UserError`
    logging.getLogger(_logger).setLevel(logging.ERROR)
os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap of perplexities would fork a process a core


class TideLM(HFLM):
    """lm-eval's wrapper of transformers models, around a model that is loaded already.

    The project's tokenizer puts BOS before every text, as every training document has it; lm-eval encodes context +
    continuation and the context alone, both with it, and scores what the first has more. A context that is longer than
    the model loses its beginning, BOS included. Log-probabilities are float32 whatever the model's dtype.
    """

    add_bos_token: bool | None  # None leaves it to the tokenizer

    def __init__(self, model: TideForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int):
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=model.config.max_position_embeddings,
            softmax_dtype=torch.float32,
            # The cache gives a wrong number (in lm-eval 0.4.13) to two requests that are one text, split between
            # context and continuation at different places.
            logits_cache=False,
        )

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Whole texts: lm-eval puts BOS in front itself, so the tokenizer must not, or BOS would be scored too."""
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = None


@dataclass
class TaskScores:
    """What one model scored.

    Attributes:
        rows: of "task", "metric", "value", "stderr" and "n" documents, a row a metric.
        documents: scores a document, of the metrics that are means over documents, by (task, metric).
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)


def load_tasks(names: Sequence[str], folder: Path | None = None) -> list[Any]:
    """Loads tasks and their documents, most of them from the Hugging Face hub.

    Args:
        names: tasks, groups or tags of lm-eval; "paper" stands for the eight of Table 2.
        folder: of further task files (YAML); its names come before lm-eval's own.

    Returns:
        lm-eval's task objects, each once.

    Raises:
        UserError: one sentence, when a name is unknown or its documents cannot be had.
    """
    wanted = list(dict.fromkeys(name for given in names for name in (PAPER_TASKS if given == PAPER else [given])))
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-folder {folder} is no folder; give one that holds task files of lm-eval.")
    include = None if folder is None else str(folder)
    manager = TaskManager(include_path=include, include_defaults=False)
    if not set(wanted) <= set(manager.all_tasks):  # lm-eval's own 14,000 take ten seconds to list
        manager = TaskManager(include_path=include)
    for name in wanted:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "give --task-folder for tasks of your own."
            raise UserError(f"--tasks {name}: lm-eval knows no such task; {hint}")
    tasks: dict[str, Any] = {}
    for name in wanted:
        try:
            tasks |= manager.load(name)["tasks"]
        except Exception as error:  # datasets, huggingface_hub and YAML raise whatever they meet
            raise UserError(
                f"--tasks {name} cannot be loaded ({first_line(error)}); most tasks need the Hugging Face hub or its "
                "local cache."
            ) from error
    return list(tasks.values())


def score_tasks(
    model: TideForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[Any],
    batch_size: int,
    limit: int | None = None,
    replicates: int = 1000,
    seed: int = 0,
) -> TaskScores:
    """Runs lm-eval.

    Args:
        model: on its device, in evaluation mode.
        tokenizer: the model's.
        tasks: from `load_tasks`.
        batch_size: requests a forward.
        limit: documents of each task, the first ones; None takes all.
        replicates: of lm-eval's bootstrap, for metrics whose standard error has no formula.
        seed: of whatever a task draws, few-shot examples for one.

    Returns:
        The scores. Standard errors are lm-eval's; NaN where it gives none.
    """
    names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the tables
        result: Any = lm_eval.simple_evaluate(
            model=TideLM(model, tokenizer, batch_size),
            tasks=list(tasks),
            task_manager=TaskManager(include_defaults=False),  # they are loaded; listing the others takes long
            limit=limit,
            bootstrap_iters=replicates,
            log_samples=True,
            **dict.fromkeys(names, seed),
        )
    scores = TaskScores()
    for task, values in result["results"].items():
        samples = result["samples"][task]
        for key, value in values.items():
            metric, _, name_of_filter = key.partition(",")
            if not name_of_filter or metric.endswith("_stderr"):
                continue
            label = metric if name_of_filter == "none" else key
            stderr = pd.to_numeric(values.get(f"{metric}_stderr,{name_of_filter}"), errors="coerce")
            n = result["n-samples"][task]["effective"]
            scores.rows.append({"task": task, "metric": label, "value": value, "stderr": stderr, "n": n})
            chosen = [s for s in samples if s["filter"] == name_of_filter and np.isscalar(s.get(metric))]
            documents = np.array([s[metric] for s in sorted(chosen, key=lambda s: s["doc_id"])], dtype=np.float64)
            if len(documents) == n and np.isclose(documents.mean(), value):
                scores.documents[task, label] = documents
    return scores


def task_table(scores: Mapping[str, TaskScores], base: str | None = None) -> pd.DataFrame:
    """One table of several models' scores.

    Args:
        scores: by model.
        base: which of them the others are compared with.

    Returns:
        A row a (model, task, metric): value, stderr, n documents. For a model that is no base: `gain`, its value minus
        the base's on the same documents, with `gain_stderr` (paired), for metrics that are means over documents. Two
        tasks or more have a row "average": the mean of their acc, each task weighing the same, as Table 2 averages.
    """
    frames = []
    for model, of_model in scores.items():
        rows = pd.DataFrame(of_model.rows).assign(gain=np.nan, gain_stderr=np.nan)
        if base is not None and base in scores and model != base:
            for i, key in enumerate(zip(rows["task"], rows["metric"], strict=True)):
                if key in of_model.documents and key in scores[base].documents:
                    gain = of_model.documents[key] - scores[base].documents[key]
                    rows.loc[i, "gain"] = gain.mean()
                    rows.loc[i, "gain_stderr"] = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else np.nan
        averaged = rows[rows["metric"] == AVERAGED_METRIC]
        if len(averaged) > 1:
            means = averaged[["value", "gain"]].mean(skipna=False)
            errors = averaged[["stderr", "gain_stderr"]].pow(2).sum(skipna=False).pow(0.5) / len(averaged)
            average = {"task": AVERAGE, "metric": AVERAGED_METRIC, "n": averaged["n"].sum(), **means, **errors}
            rows = pd.concat([rows, pd.DataFrame([average])], ignore_index=True)
        frames.append(rows.assign(model=model))
    table = pd.concat(frames, ignore_index=True)
    return table[["model", "task", "metric", "n", "value", "stderr", "gain", "gain_stderr"]]
