"""Upcycling on real weights: SmolLM2-135M. Opt-in, since it downloads 93 MB and trains for minutes."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.real.smollm2 import checkpoint_folder
from tide.checkpoint import load_checkpoint
from tide.evaluation import heldout_windows, token_losses
from tide.training.__main__ import SLOW_BFLOAT16, bfloat16_slowdown
from tide.training.upcycle import source_tokenizer, upcycle

pytestmark = [
    pytest.mark.skipif(os.environ.get("TIDE_REAL") != "1", reason="opt-in: make test-real"),
    pytest.mark.timeout(7200),
]

CORPUS = Path(os.environ.get("TIDE_REAL_CORPUS") or "corpus")
DOMAINS = {"train_biomed.txt": "heldout_biomed_like.txt", "train_tech.txt": "heldout_tech.txt"}
BLOCKS = 4
LENGTH = 256  # tokens a window, in training and on the held-out texts
HELDOUT_TOKENS = 8192
PAGE = 4000  # characters of held-out text for the summaries that the run writes about itself, a forward each
RUN = {
    "--steps": 40,
    "--batch-size": 8,
    "--micro-batch-size": 8,
    "--sequence-length": LENGTH,
    "--peak-lr": 1e-2,
    "--start-lr": 2e-3,
    "--floor-lr": 1e-3,
    "--warmup-steps": 5,
    "--log-every": 1,
    "--save-every": 1000,  # no state on the way
}


@pytest.fixture(autouse=True, scope="module")
def all_threads():
    """The other tests are for tiny models and run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus() -> Path:
    missing = [name for pair in DOMAINS.items() for name in pair if not (CORPUS / name).is_file()]
    assert not missing, (
        f"{CORPUS.absolute()} lacks {', '.join(missing)}: run `python -m tide.training.corpus --out {CORPUS}`, "
        "or name the folder in TIDE_REAL_CORPUS."
    )
    return CORPUS


@pytest.fixture(scope="module")
def source() -> Path:
    return checkpoint_folder()


@pytest.fixture(scope="module")
def windows(source, corpus) -> dict[str, np.ndarray]:
    """Token ids [32, 256] of each held-out text."""
    tokenizer = source_tokenizer(source)
    return {name: heldout_windows(corpus / name, tokenizer, LENGTH, HELDOUT_TOKENS) for name in DOMAINS.values()}


@pytest.fixture(scope="module")
def original(source) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def losses_of(model, windows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: token_losses(model, ids, batch_size=4) for name, ids in windows.items()}


@pytest.mark.parametrize("num_banks", [0, BLOCKS])
@torch.no_grad()
def test_the_logits_are_the_originals_bit_for_bit(source, original, windows, num_banks):
    model = upcycle(source, num_banks)
    for ids in windows.values():
        batch = torch.from_numpy(ids[:2])
        assert torch.equal(model(batch).logits, original(batch).logits)


@pytest.fixture(scope="module")
def trained(source, corpus):
    """The checkpoint after a short run of the command with a frozen backbone."""
    with tempfile.TemporaryDirectory() as folder:  # half a gigabyte, which pytest's own folders would keep
        data, out = Path(folder) / "text", Path(folder) / "run"
        data.mkdir()
        for name in DOMAINS:
            (data / name).symlink_to((corpus / name).absolute())
        page = (corpus / "heldout_tech.txt").read_text(encoding="utf-8")[:PAGE]
        (data / "heldout_page.txt").write_text(page, encoding="utf-8")
        command = [sys.executable, "-m", "tide.training", "--from", source, "--blocks", BLOCKS, "--freeze-backbone"]
        slow = bfloat16_slowdown(torch.device("cpu")) > SLOW_BFLOAT16  # emulated, the run would take hours
        command += ["--autocast", "float32" if slow else "bfloat16"]
        command += ["--data", data, "--out", out, *(part for option in RUN.items() for part in option)]
        subprocess.run([str(part) for part in command], check=True)
        yield out


def test_a_short_run_with_a_frozen_backbone_predicts_heldout_text_better(trained, original, windows):
    """At step 0 the model's losses are the original's, since its logits are."""
    before, after = losses_of(original, windows), losses_of(load_checkpoint(trained)[0], windows)
    better = {}
    for name in windows:
        difference = (before[name] - after[name]).astype(np.float64)  # paired: the same positions
        error = difference.std(ddof=1) / math.sqrt(difference.size)
        figures = {"step 0": before[name].mean(), "trained": after[name].mean(), "difference": difference.mean()}
        rounded = {key: round(float(value), 4) for key, value in {**figures, "standard error": error}.items()}
        print(json.dumps({"text": name, "n": difference.size, **rounded}))
        better[name] = difference.mean() > 3 * error
    assert all(better.values()), better


def test_the_run_left_the_backbone_as_it_was(trained, source):
    original, saved = load_file(source / "model.safetensors"), load_file(trained / "model.safetensors")
    assert {name for name in saved if ".router." not in name and ".memory." not in name} == original.keys()
    for name, weight in original.items():
        assert torch.equal(saved[name], weight.to(saved[name].dtype)), name  # a run saves in bfloat16
