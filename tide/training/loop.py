"""The training loop, on Accelerate: deterministic batches, atomic saves, exact resumption, one process or many."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tide.cli import UserError
from tide.config import TideConfig
from tide.frequency import frequency_deciles
from tide.model import TideForCausalLM
from tide.tokens import Vocabulary
from tide.training.data import WindowDataset
from tide.training.export import write_checkpoint
from tide.training.folder import LOG_FILE, RunFolder, quiet_single_process, saving
from tide.training.log import TrainingLog
from tide.training.module import (
    RowGradients,
    TrainingModule,
    build_model,
    build_optimizer,
    evaluating,
    full,
    set_attention,
)
from tide.training.recipe import Recipe
from tide.training.summaries import (
    NUM_SUMMARIES,
    SUMMARY_FILE,
    BinnedRouting,
    GradientNorms,
    Summarizer,
    summary_steps,
)

NULL_PROBE_ROWS = 4  # sequences of the batch, in each process, on which the logged null weight is measured
WRITTEN_WHEN_SAVED = ("architectures", "dtype", "transformers_version")  # fields of a config.json


@dataclass(frozen=True)
class Schedule:
    """What a run does beside training, and when: none of it changes the weights.

    Attributes:
        save_every: steps between two saved states.
        log_every: steps between two lines of the log.
        keep: steps after which the checkpoint of that moment is kept in a `step-STEP` folder.
        stop_at: step after which to save the state and stop, before the schedule's end; None goes on to the end.
        summaries: about how many training summaries to keep, beside that of step 0; 0 keeps none.
        trackers: other logs beside the JSONL one: "csv", "tensorboard".
    """

    save_every: int = 200
    log_every: int = 10
    keep: tuple[int, ...] = ()
    stop_at: int | None = None
    summaries: int = NUM_SUMMARIES
    trackers: tuple[str, ...] = ()


def make_accelerator(recipe: Recipe, device: str | None = None) -> Accelerator:
    """The engine of a run: one process, DDP or FSDP as `accelerate launch` or `torchrun` set it up.

    Args:
        recipe: says autocast and compilation.
        device: "cpu" keeps off the accelerators; None or another is what Accelerate finds.

    Raises:
        UserError: for FSDP's first version, whose flat parameters have no rows.
    """
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision="bf16" if recipe.autocast == "bfloat16" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend="inductor" if recipe.compile else "no"),
    )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("tide-train shards with FSDP's second version: launch with --fsdp_version 2.")
    return accelerator


class Run:
    """One training run in one folder (`RunFolder`).

    Args:
        folder: of the run.
        config: of the model.
        recipe: of the training.
        data: the batches.
        tokenizer: saved with the checkpoint.
        probe: token ids [N, T] int64, the text on which the summaries measure loss and routing.
        accelerator: the engine; by default made from the recipe.
        initial: makes the initial weights in float32 on the CPU; by default random ones from the recipe's seed.
        origin: names the initial weights where they are not random; a resumed run must have the same.
        save_dtype: of the saved checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        config: TideConfig,
        recipe: Recipe,
        data: WindowDataset,
        tokenizer: PreTrainedTokenizerFast,
        probe: np.ndarray,
        accelerator: Accelerator | None = None,
        initial: Callable[[], TideForCausalLM] | None = None,
        origin: str | None = None,
        save_dtype: torch.dtype = torch.bfloat16,
    ):
        self.folder, self.config, self.recipe, self.data, self.tokenizer = (
            RunFolder(folder),
            config,
            recipe,
            data,
            tokenizer,
        )
        self.accelerator = accelerator or make_accelerator(recipe)
        self.initial = initial or (lambda: build_model(config, recipe.seed))
        self.origin, self.save_dtype = origin, save_dtype
        self.device = self.accelerator.device
        deciles = frequency_deciles(data.tokens.counts, Vocabulary(tokenizer, size=len(data.tokens.counts)))
        padded = np.full(config.vocab_size, -1, dtype=np.int8)
        padded[: len(deciles)] = deciles
        self.summarizer = Summarizer(probe, padded, recipe.micro_batch_size)
        world = self.accelerator.num_processes
        if recipe.batch_size % world:
            raise UserError(
                f"--batch-size {recipe.batch_size} does not divide among {world} processes; choose another."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed; saved in `recipe.json`."""
        shape = {k: v for k, v in self.config.to_dict().items() if k not in WRITTEN_WHEN_SAVED}
        tokens = self.data.tokens
        return {
            "recipe": self.recipe.what_is_trained(),
            "config": shape,
            "data": {"tokens": tokens.num_tokens, "sha256": tokens.sha256},
            "initial_weights": self.origin,
        }

    def train(self, resume: bool = False, schedule: Schedule | None = None) -> int:
        """Trains to the recipe's last step, or to where the schedule stops.

        The checkpoint is saved in the folder in `save_dtype` when the last step is done.

        Args:
            resume: go on from the latest state in the folder; without one, start.
            schedule: when to save, log, keep and stop.

        Returns:
            Steps done.

        Raises:
            UserError: when the folder holds another run, or a finished one, or a run and `resume` is False; when the
                disk is full, which leaves the latest state.
        """
        schedule = schedule or Schedule()
        accelerator, recipe = self.accelerator, self.recipe
        start = 0
        if accelerator.is_main_process:
            about = {"recipe": asdict(recipe)}
            start = self.folder.open(self.settings, about, resume, (LOG_FILE, SUMMARY_FILE))
        accelerator.wait_for_everyone()
        start = start if accelerator.is_main_process else self.folder.latest_step()

        self.prepare()
        if start:
            self._load_state(start)
        end = min(recipe.steps, schedule.stop_at or recipe.steps)
        summarize_at = {
            *summary_steps(recipe.steps, schedule.summaries),
            *(schedule.keep if schedule.summaries else ()),
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(saving(self.folder.path, "The run"))
            log = self._open_log(schedule, start, stack)
            if not start and 0 in summarize_at:
                self._summarize(0)
            bar = stack.enter_context(
                tqdm(initial=start, total=end, desc="train", unit="step", disable=not accelerator.is_main_process)
            )
            for step in range(start, end):
                loss, norm, batch = self.step(step)
                done = step + 1
                bar.update()
                self._meter(done, batch)
                if done % schedule.log_every == 0 or done == recipe.steps:
                    record = self._record(done, loss, norm, batch)
                    bar.set_postfix(loss=f"{record['loss']:.3f}", tok_s=f"{record['tokens_per_second']:.0f}")
                    if log:
                        log.write(record)
                if done in summarize_at:
                    self._summarize(done)
                if done in schedule.keep:
                    self._save_checkpoint(done, self.folder.kept(done))
                if done < recipe.steps and (done % schedule.save_every == 0 or done == end):
                    self._save_state(done)
            if end == recipe.steps:
                self._save_checkpoint(end, None)
        return end

    def prepare(self) -> None:
        """Builds the model, wraps it for this launch, and makes the sums that the run accumulates."""
        accelerator = self.accelerator
        shares_loading = accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        if (
            shares_loading and not accelerator.is_main_process
        ):  # the weights come from the main process: no second copy in this computer's memory
            with init_empty_weights(include_buffers=False):
                model = TideForCausalLM(self.config)
            # Accelerate matches parameters by their address, so they need one; pages that nobody writes take no memory
            model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
            model.tie_weights()
        else:
            model = self.initial()
        if self.recipe.freeze_backbone:
            from tide.training.upcycle import freeze_backbone

            freeze_backbone(model)
        set_attention(model, self.recipe.attention)
        if self.recipe.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module = TrainingModule(model).train()
        self.module, self.optimizer = accelerator.prepare(module, build_optimizer(module, self.recipe))
        self.plain: TrainingModule = accelerator.unwrap_model(self.module, keep_torch_compile=False)
        self.gradients = GradientNorms(self.plain.model, self.device)
        memory, alone = self.plain.model.model.memory, accelerator.distributed_type == DistributedType.NO
        table = memory.weight if memory is not None and alone else None
        self.row_gradients = None if table is None else RowGradients(table)
        self.counts = torch.zeros(self.config.vocab_size, dtype=torch.int64, device=self.device)
        self._since, self._seen = time.perf_counter(), 0

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One optimiser step.

        Returns:
            This process's loss (nats, z-loss included), the gradient's norm before clipping, this process's batch.
        """
        recipe, accelerator = self.recipe, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        batch = self.data.batch(step, accelerator.process_index, accelerator.num_processes).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        if self.row_gradients:
            self.row_gradients.start()
        micros = batch.split(recipe.micro_batch_size)
        lookup = self._lookup_buffer()
        total = torch.zeros((), device=self.device)
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            offset = None if lookup is None else self._zero_offset(micro)
            rows = self.row_gradients.read(micro) if self.row_gradients else None
            with contextlib.nullcontext() if last else accelerator.no_sync(self.module):
                loss = self.module(micro, embedding_offset=offset, memory_rows=rows) * (len(micro) / len(batch))
                accelerator.backward(loss)
            if self.row_gradients and rows:
                self.row_gradients.add(rows)
            total += loss.detach()
            if lookup is not None and offset is not None and offset.grad is not None:
                lookup.index_add_(0, micro.flatten(), offset.grad.flatten(0, 1))
        if lookup is not None:
            lookup = accelerator.reduce(lookup, "mean")
        self.gradients.add(self.plain.model, lookup)
        norm = accelerator.clip_grad_norm_(self.module.parameters(), recipe.grad_clip or float("inf"))
        self.optimizer.step()
        return total, norm, batch

    def _lookup_buffer(self) -> torch.Tensor | None:
        """[V, d] zeros for the embedding's gradient through the lookup, where it must be measured apart."""
        if not self.gradients.splits_lookup:
            return None
        return torch.zeros(self.config.vocab_size, self.config.hidden_size, device=self.device)

    def _zero_offset(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self.config.hidden_size, device=self.device, requires_grad=True)

    def _meter(self, done: int, batch: torch.Tensor) -> None:
        self.counts += torch.bincount(batch.flatten(), minlength=self.config.vocab_size)
        self._seen += batch.numel() * self.accelerator.num_processes

    def _open_log(self, schedule: Schedule, start: int, stack: contextlib.ExitStack) -> TrainingLog | None:
        if not self.accelerator.is_main_process:
            return None
        log = TrainingLog(self.folder.path, schedule.trackers, start)
        stack.callback(log.close)
        return log

    def _record(self, done: int, loss: torch.Tensor, norm: torch.Tensor, batch: torch.Tensor) -> dict[str, Any]:
        """A line of the log. With several processes all must ask for it."""
        elapsed = time.perf_counter() - self._since
        record = {
            "step": done,
            "tokens": done * self.recipe.tokens_per_step,
            "loss": round(self.accelerator.reduce(loss, "mean").item(), 6),
            "gradient_norm": round(float(full(norm)), 5),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": round(self._seen / elapsed, 1),
            "null_weight": self._null_weights(batch[:NULL_PROBE_ROWS]),
        }
        self._since, self._seen = time.perf_counter(), 0
        return record

    def _null_weights(self, ids: torch.Tensor) -> list[float]:
        """Mean weight of the null bank in every layer over a batch [B, T]: L numbers, 0..1; none for Base."""
        if not self.config.num_memory_blocks:
            return []
        recorder = BinnedRouting(torch.zeros_like(ids), num_bins=1)
        with evaluating(self.plain):
            self.plain(ids, recorder=recorder)
        null = torch.stack([sums[0, -1] for sums in recorder.sums]) / ids.numel()
        return [round(weight, 4) for weight in self.accelerator.reduce(null, "mean").tolist()]

    def _summarize(self, done: int) -> None:
        began = time.perf_counter()
        summary = self.summarizer.summarize(
            self.plain, self.gradients, done, done * self.recipe.tokens_per_step, self.device
        )
        if self.accelerator.is_main_process:
            with (self.folder.path / SUMMARY_FILE).open("a", encoding="utf-8") as out:
                out.write(summary.to_json() + "\n")
        self._since += time.perf_counter() - began  # the logged rate is that of training

    def _progress(self) -> dict[str, torch.Tensor]:
        """What the run has accumulated, whole in every process."""
        return {"counts": self.accelerator.reduce(self.counts, "sum"), "gradient_norms": self.gradients.sums}

    def _save_state(self, step: int) -> None:
        """Saves model, optimiser and progress, each process its share."""
        target = self.folder.state(step)
        temporary = self.folder.temporary(target) if self.accelerator.is_main_process else None
        self.accelerator.wait_for_everyone()
        model, optimizer = get_state_dict(self.module, self.optimizer.optimizer)
        state = {"model": model, "optimizer": optimizer, "progress": self._progress()}
        with saving(self.folder.path, target.name), quiet_single_process():
            dcp.save(state, checkpoint_id=temporary or target.with_name(target.name + ".tmp"), no_dist=self._alone)
        self.accelerator.wait_for_everyone()
        if temporary:
            self.folder.replace(temporary, target)
        self.accelerator.wait_for_everyone()

    def _load_state(self, step: int) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "progress": self._progress()}
        with quiet_single_process():
            dcp.load(state, checkpoint_id=self.folder.state(step), no_dist=self._alone)
        set_state_dict(
            self.module,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.gradients.sums.copy_(state["progress"]["gradient_norms"])
        self.counts.zero_()
        if self.accelerator.is_main_process:
            self.counts.copy_(state["progress"]["counts"])

    @property
    def _alone(self) -> bool:
        return self.accelerator.num_processes == 1

    def _save_checkpoint(self, step: int, target: Path | None) -> None:
        """Saves weights, tokenizer and what the model was trained on.

        Args:
            step: steps done.
            target: folder to keep it in; None makes the run's own folder the checkpoint and removes the states.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(self.module, options=options)
        counts = self._progress()["counts"].cpu()
        if self.accelerator.is_main_process:
            temporary = self.folder.temporary(target or self.folder.path / "checkpoint")
            with saving(self.folder.path, "The checkpoint"):
                about = {**self.settings, "recipe": asdict(self.recipe), "steps_done": step}
                own = {name.removeprefix("model."): weight.to(self.save_dtype) for name, weight in weights.items()}
                write_checkpoint(temporary, self.config, own, self.tokenizer, counts, about)
                if target:
                    self.folder.replace(temporary, target)
                else:
                    self.folder.finish(temporary)
        self.accelerator.wait_for_everyone()
