"""The training loop: deterministic batches, atomic saves, exact resumption."""

import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.checkpoint import COUNTS_FILE
from tide.cli import UserError
from tide.config import TideConfig
from tide.model import TideForCausalLM
from tide.training.data import WindowDataset
from tide.training.recipe import Recipe

LOG_FILE = "train_log.jsonl"
RECIPE_FILE = "recipe.json"
STATE_PREFIX = "state-"
NULL_PROBE_ROWS = 4  # sequences of the batch on which the logged null weight is measured


def build_model(config: TideConfig, seed: int) -> TideForCausalLM:
    """Initial weights. The backbone's are the same for every K, so that models of one seed differ in memory alone.

    Args:
        config: the model's configuration.
        seed: of the random generator.

    Returns:
        A float32 model on the CPU.
    """
    torch.manual_seed(seed)
    base = TideForCausalLM(TideConfig(**{**config.to_dict(), "num_memory_blocks": 0}))
    if not config.num_memory_blocks:
        return base
    model = TideForCausalLM(config)
    model.load_state_dict(base.state_dict(), strict=False)
    return model


def build_optimizer(model: TideForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with the recipe's betas; weight decay on matrices and tables, not on norm gains and biases."""
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and "norm" not in name]
    spared = [p for name, p in model.named_parameters() if p.ndim <= 1 or "norm" in name]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(recipe.beta1, recipe.beta2), fused=True)


class Run:
    """One training run in one folder.

    The folder holds the recipe, a JSONL log and, while the run is not finished, the latest `state-STEP` folder:
    a loadable checkpoint and the optimiser's moments, both safetensors. A state is written under a temporary
    name and renamed, and only then is the older one removed, so that a kill at any moment leaves a whole one.
    When the last step is done the folder itself is the checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        config: TideConfig,
        recipe: Recipe,
        data: WindowDataset,
        tokenizer: PreTrainedTokenizerFast,
        device: str = "cpu",
        save_dtype: torch.dtype = torch.bfloat16,
    ):
        self.folder, self.config, self.recipe, self.data, self.tokenizer = folder, config, recipe, data, tokenizer
        self.device, self.save_dtype = torch.device(device), save_dtype

    @property
    def settings(self) -> dict:
        """What must be the same for a run to be resumed; saved as `recipe.json`."""
        shape = {k: v for k, v in self.config.to_dict().items() if k not in ("transformers_version", "dtype")}
        return {"recipe": asdict(self.recipe), "config": shape, "tokens_in_data": len(self.data.tokens)}

    def train(self, resume: bool = False, save_every: int = 200, log_every: int = 10) -> TideForCausalLM:
        """Trains to the recipe's last step.

        Args:
            resume: go on from the latest state in the folder; without one, start.
            save_every: steps between two saved states.
            log_every: steps between two lines of the log.

        Returns:
            The trained model, which is also saved in the folder in `save_dtype`.

        Raises:
            UserError: when the folder holds another run, or a finished one, or a run and `resume` is False.
        """
        start = self._prepare_folder(resume)
        model = build_model(self.config, self.recipe.seed)
        model.to(self.device).train()  # type: ignore[arg-type]  # transformers' annotation of `to` hides torch's
        optimizer = build_optimizer(model, self.recipe)
        if start:
            self._load_state(start, model, optimizer)
        forward = torch.compile(model) if self.recipe.compile else model

        bar = tqdm(range(start, self.recipe.steps), initial=start, total=self.recipe.steps, desc="train", unit="step")
        since, seen = time.perf_counter(), 0
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as log:
            for step in bar:
                batch = self.data.batch(step).to(self.device)
                loss = self._step(forward, model, optimizer, step, batch)
                seen += batch.numel()
                done = step + 1
                if done % log_every == 0 or done == self.recipe.steps:
                    now = time.perf_counter()
                    record = {
                        "step": done,
                        "tokens": done * self.recipe.tokens_per_step,
                        "loss": round(loss, 6),
                        "learning_rate": optimizer.param_groups[0]["lr"],
                        "tokens_per_second": round(seen / (now - since), 1),
                        "null_weight": null_weights(model, batch[:NULL_PROBE_ROWS]),
                    }
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{record['tokens_per_second']:.0f}")
                    since, seen = time.perf_counter(), 0
                if done % save_every == 0 and done < self.recipe.steps:
                    self._save_state(done, model, optimizer)
        self._finish(model)
        return model

    def _step(self, forward, model, optimizer, step: int, batch: torch.Tensor) -> float:
        """One optimiser step on `batch` [batch_size, T]; returns its loss in nats (z-loss included)."""
        recipe = self.recipe
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.autocast == "bfloat16")
        for micro in batch.split(recipe.micro_batch_size):
            with autocast:
                loss = forward(input_ids=micro, labels=micro, use_cache=False).loss
            loss = loss * (len(micro) / len(batch))
            loss.backward()
            total += loss.item()
        if recipe.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        return total

    def _prepare_folder(self, resume: bool) -> int:
        """Checks the folder against this run, cuts the log to the state, and returns the step to go on from."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.folder} cannot be made a folder: {error.strerror}.") from error
        recipe_file = self.folder / RECIPE_FILE
        if not recipe_file.exists():
            write_text(recipe_file, json.dumps(self.settings, indent=2) + "\n")
            return 0
        try:
            settings = json.loads(recipe_file.read_text(encoding="utf-8"))
        except ValueError as error:  # not JSON, or not text
            raise UserError(f"{recipe_file} is damaged; choose another --out.") from error
        if settings != json.loads(json.dumps(self.settings)):
            raise UserError(f"{self.folder} holds a run with other settings or data; choose another --out.")
        if (self.folder / "model.safetensors").exists():
            raise UserError(f"{self.folder} holds a finished run; choose another --out.")
        if not resume:
            raise UserError(f"{self.folder} holds an unfinished run; add --resume to go on, or choose another --out.")
        start = max((int(p.name.removeprefix(STATE_PREFIX)) for p in self._states()), default=0)
        log_file = self.folder / LOG_FILE
        if log_file.exists():
            kept = [line for line in log_file.read_text().splitlines() if is_up_to(line, start)]
            write_text(log_file, "".join(line + "\n" for line in kept))
        return start

    def _states(self) -> list[Path]:
        return [p for p in self.folder.glob(f"{STATE_PREFIX}*") if p.name.removeprefix(STATE_PREFIX).isdigit()]

    def _save_state(self, step: int, model: TideForCausalLM, optimizer: torch.optim.AdamW) -> None:
        target = self.folder / f"{STATE_PREFIX}{step:07d}"
        temporary = target.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        moments = {f"{key}.{names[p]}": value for p, state in optimizer.state.items() for key, value in state.items()}
        save_file(moments, temporary / "optimizer.safetensors")
        os.replace(temporary, target)
        for other in self._states():
            if other != target:
                shutil.rmtree(other)

    def _load_state(self, step: int, model: TideForCausalLM, optimizer: torch.optim.AdamW) -> None:
        folder = self.folder / f"{STATE_PREFIX}{step:07d}"
        weights = load_file(folder / "model.safetensors")
        model.load_state_dict(weights, strict=False)  # a tied unembedding is stored once
        model.tie_weights()
        moments = load_file(folder / "optimizer.safetensors")
        for name, parameter in model.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: moments[f"{key}.{name}"].to(self.device) for key in keys}

    def _finish(self, model: TideForCausalLM) -> None:
        """Saves the checkpoint and what the model was trained on; removes the states."""
        counts = torch.from_numpy(self.data.counts(self.recipe.steps, self.config.vocab_size))
        metadata = {"corpus": f"the {self.recipe.steps * self.recipe.tokens_per_step:,} tokens of the training run"}
        save_file({"counts": counts}, self.folder / COUNTS_FILE, metadata=metadata)
        self.tokenizer.save_pretrained(self.folder)
        temporary = self.folder / "checkpoint.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        for parameter in model.eval().parameters():  # not model.to(), which would round the rotary frequencies too
            parameter.data = parameter.data.to(self.save_dtype)
        model.save_pretrained(temporary)
        for file in sorted(temporary.iterdir(), key=lambda f: f.name == "model.safetensors"):  # weights last
            os.replace(file, self.folder / file.name)
        temporary.rmdir()
        for state in self.folder.glob(f"{STATE_PREFIX}*"):  # also what a kill left half written
            shutil.rmtree(state)


def null_weights(model: TideForCausalLM, input_ids: torch.Tensor) -> list[float]:
    """Mean weight of the null bank in every layer over a batch [B, T]: L numbers, 0..1."""
    trace = model.trace(input_ids, with_logits=False)
    return [round(w, 4) for w in trace.routing[..., -1].mean(dim=(0, 1)).tolist()]


def is_up_to(line: str, step: int) -> bool:
    """Whether a line of the log is whole and not later than `step`: a killed run can leave half a line."""
    try:
        return json.loads(line)["step"] <= step
    except (json.JSONDecodeError, KeyError):
        return False


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
