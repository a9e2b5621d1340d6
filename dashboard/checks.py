"""Trust checks: what must hold if the numbers of live inference are to be believed. No Streamlit in here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from precompute import Artifacts
from tide import Intervention, TideForCausalLM
from tide.checkpoint import fingerprint, first_line
from tide.cli import UserError

PROBE_TOKENS = 32
PROBE_SEED = 0
PROBE_NEIGHBORS = 5  # of each token in each table: the nearest decide what the page of banks shows
# Largest differences that pass. Of weights and cosines computed in float32, by kernels that sum in another order;
# else in bfloat16, whose rounding (relative 2^-9) the layers carry on: 0.008 and 0.001 in the demo's 8 layers.
ROW_SUM_TOLERANCE = 1e-5  # the router's softmax is in float32 whatever the model's dtype
ROUTING_TOLERANCE = {True: 1e-4, False: 0.05}
COSINE_TOLERANCE = {True: 1e-4, False: 0.01}
INDEX_TOLERANCE = {"flat": 0.0, "fp16": 2e-3, "sq8": 0.02}  # of cosines of rows that an index has rounded, beside that
LOGIT_TOLERANCE = {True: 0.0, False: 0.02}  # of the largest logit; in float32 bit for bit

Finding = tuple[bool, str]
"""Whether a check passed, and what it found, as a sentence."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: what must hold, as a clause.
        passed: whether it holds; true, too, where there is nothing to check.
        detail: what was found, one sentence.
        remedy: what to do, one sentence; empty where it passed.
    """

    name: str
    passed: bool
    detail: str
    remedy: str


@torch.no_grad()
def run_checks(model: TideForCausalLM, artifacts: Artifacts) -> list[Check]:
    """Checks a loaded model, its artifacts, and the one against the other.

    What fails, whatever the reason, is a failed check and never an exception. The model is only read; the random
    tokens are the same at every call. Two small forwards of 32 tokens, one of 32 times up to 16.

    Args:
        model: as the live pages use it, in its dtype and on its device.
        artifacts: what the other pages show; `artifacts.checkpoint` is the folder that the model was loaded from.

    Returns:
        Five checks: routing rows sum to one; all banks off equals LLaMA without memory; stored neighbours and stored
        routing equal live ones; the artifacts belong to this checkpoint.
    """
    folder, command = artifacts.folder, f"tide-precompute {artifacts.checkpoint} --out {artifacts.folder}"
    restart = f"Restart tide-dashboard; if it fails again, copy {artifacts.checkpoint} anew and run `make test`."
    checks: tuple[tuple[str, Callable[[TideForCausalLM, Artifacts], Finding], str], ...] = (
        ("routing rows sum to one", _rows_sum_to_one, restart),
        ("all banks off equals the path without memory", _all_off_is_llama, restart),
        ("stored neighbours equal live ones", _neighbors, _again(artifacts, "neighbors")),
        ("stored routing equals live routing", _routing, _again(artifacts, "routing")),
        (
            "the artifacts belong to this checkpoint",
            _belongs,
            f"Delete {folder}, run `{command}`, and reload the page.",
        ),
    )
    made = []
    for name, check, remedy in checks:
        try:
            passed, detail = check(model, artifacts)
        except UserError as error:
            passed, detail = False, str(error)
        except Exception as error:  # whatever a broken model or file raises is a finding, not a crash of the page
            passed, detail = False, f"The check could not be made: {type(error).__name__}, {first_line(error)}."
        made.append(Check(name, passed, detail, "" if passed else remedy))
    return made


def _again(artifacts: Artifacts, stage: str) -> str:
    """How to measure a stage anew; one whose files are whole is kept until they are deleted."""
    command = f"tide-precompute {artifacts.checkpoint} --out {artifacts.folder} --only {stage}"
    return f"Delete {artifacts.folder / stage}, run `{command}`, and reload the page."


def _probe(vocab_size: int, most: int = PROBE_TOKENS) -> np.ndarray:
    """Distinct random token ids [T] int64, the same at every call."""
    return np.random.default_rng(PROBE_SEED).choice(vocab_size, min(PROBE_TOKENS, most, vocab_size), replace=False)


def _probe_text(model: TideForCausalLM) -> torch.Tensor:
    """Random tokens as a text [1, T], no longer than the model's context."""
    ids = _probe(model.config.vocab_size, model.config.max_position_embeddings)
    return torch.from_numpy(ids).unsqueeze(0).to(model.device)


def _rows_sum_to_one(model: TideForCausalLM, _: Artifacts) -> Finding:
    """Equation 3.5: the weights of K banks and null are a distribution."""
    if not model.config.num_memory_blocks:
        return True, "The model has no memory banks, and so no router."
    routing = model.trace(_probe_text(model), with_logits=False).routing
    error = float((routing.sum(dim=-1) - 1).abs().max())
    detail = (
        f"Over {routing[..., 0].numel():,} rows the sum is off by at most {error:.1e} ({ROW_SUM_TOLERANCE:g} passes)"
    )
    smallest = float(routing.min())
    return error <= ROW_SUM_TOLERANCE and smallest >= 0, f"{detail}; the smallest weight is {smallest:.1e}."


def _all_off_is_llama(model: TideForCausalLM, _: Artifacts) -> Finding:
    """Logits with every bank switched off against transformers' own LLaMA on the same weights."""
    if not model.config.num_memory_blocks:
        return True, "The model has no memory banks to switch off."
    ids = _probe_text(model)
    without = llama_on_the_weights_of(model)(input_ids=ids, use_cache=False).logits.float()
    off = model(input_ids=ids, intervention=Intervention.all_off(), use_cache=False).logits.float()
    error, largest = float((off - without).abs().max()), float(without.abs().max())
    allowed = LOGIT_TOLERANCE[model.dtype == torch.float32] * largest
    passes = f"up to {allowed:.1e} passes" if allowed else "only 0 passes"
    return error <= allowed, f"The logits of {ids.numel()} tokens differ by at most {error:.1e} ({passes})."


def llama_on_the_weights_of(model: TideForCausalLM) -> LlamaForCausalLM:
    """transformers' LLaMA that shares a TIDE model's backbone tensors and knows nothing of memory: no copy is made."""
    fields = {name: value for name, value in model.config.to_dict().items() if name != "model_type"}
    fields["attn_implementation"] = model.config._attn_implementation
    config = LlamaConfig(**fields)
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    shared = {name: x for name, x in model.state_dict().items() if ".memory." not in name and ".router." not in name}
    llama.load_state_dict(shared, assign=True)
    llama.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)  # its buffers are in no checkpoint
    return llama.eval()


def _neighbors(model: TideForCausalLM, artifacts: Artifacts) -> Finding:
    """Stored cosines of random tokens and their nearest against those of the model's own tables (table 6)."""
    if not artifacts.has("neighbors"):
        return True, "There is nothing to compare: the stage neighbors was not run."
    token_ids, k = _probe(artifacts.vocab_size), min(PROBE_NEIGHBORS, artifacts.vocab_size - 1)
    errors = []
    for table in artifacts.tables:
        found = [artifacts.neighbors(token_id, table, k) for token_id in token_ids]
        ids = np.concatenate([token_ids[:, None], np.stack([nearest for nearest, _ in found])], axis=1)  # (P, 1 + k)
        rows = _vectors(model, table, torch.from_numpy(ids).to(model.device)).float()  # (P, 1 + k, d)
        live = torch.cosine_similarity(rows[:, :1], rows[:, 1:], dim=-1).cpu().numpy()
        errors.append(np.abs(live - np.stack([cosines for _, cosines in found])).max(axis=1))
    allowed = COSINE_TOLERANCE[_is_float32(model, artifacts, "neighbors")]
    allowed += INDEX_TOLERANCE[artifacts.parameters("neighbors")["index"]]
    return _compared("cosines", np.stack(errors).max(axis=0), allowed)


def _vectors(model: TideForCausalLM, table: str | int, ids: torch.Tensor) -> torch.Tensor:
    """[..., d], what the model reads for token ids [...] in a table."""
    if table == "embedding":
        return model.get_input_embeddings()(ids)
    if table == "unembedding":
        return model.lm_head.weight[ids]
    assert model.model.memory is not None
    return model.model.memory(ids)[..., table, :]


def _routing(model: TideForCausalLM, artifacts: Artifacts) -> Finding:
    """Stored routing of random tokens that the text holds once against the forward of their context (figure 10)."""
    if not artifacts.has("routing"):
        return True, "There is nothing to compare: the stage routing was not run."
    contexts = artifacts.once_contexts()
    if not contexts:
        return True, "There is nothing to compare: no token occurs exactly once near the beginning of a window."
    # Padding behind a token changes nothing at it: attention is causal.
    ids = pad_sequence([torch.from_numpy(context) for context in contexts], batch_first=True).to(model.device)
    routing = model.trace(ids, with_logits=False).routing.cpu().numpy()
    live = np.stack([routing[row, len(context) - 1] for row, context in enumerate(contexts)])  # (P, L, K+1)
    stored = np.stack([artifacts.routing(int(context[-1]))[0] for context in contexts])
    error = np.abs(live - stored).max(axis=(1, 2))
    return _compared("routing weights", error, ROUTING_TOLERANCE[_is_float32(model, artifacts, "routing")])


def _is_float32(model: TideForCausalLM, artifacts: Artifacts, stage: str) -> bool:
    """Whether both sides of a comparison were computed in float32, as `load_checkpoint` does on the CPU alone."""
    return model.dtype == torch.float32 and artifacts.manifest["stages"][stage]["device"] == "cpu"


def _compared(what: str, errors: np.ndarray, allowed: float) -> Finding:
    """A finding from the largest difference of each token, [P]; NaN is one."""
    wrong = int((~(errors <= allowed)).sum())
    detail = f"The {what} of {len(errors)} random tokens differ by at most {errors.max():.1e} ({allowed:g} passes)"
    return not wrong, f"{detail}, those of {wrong} by more." if wrong else f"{detail}."


def _belongs(model: TideForCausalLM, artifacts: Artifacts) -> Finding:
    """Sizes of the loaded model and the weights on disk, as they are now, against the manifest."""
    config, manifest = model.config, artifacts.manifest
    sizes = {
        "num_layers": config.num_hidden_layers,
        "num_banks": config.num_memory_blocks,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
    }
    for name, size in sizes.items():
        if manifest["model"][name] != size:
            return (
                False,
                f"The model has {name} {size}, the artifacts were made from one with {manifest['model'][name]}.",
            )
    if fingerprint(artifacts.checkpoint) != manifest["checkpoint"]["fingerprint"]:
        return False, f"The weights in {artifacts.checkpoint} are not those that the artifacts were made from."
    return True, f"The fingerprint of {artifacts.checkpoint} is that in the artifacts."
