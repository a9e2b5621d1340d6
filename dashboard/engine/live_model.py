"""`LiveModel`: one loaded model that answers token ids for all sessions."""

import copy
import hashlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
import torch

from dashboard.engine.cache import ByteCache, size_of
from dashboard.engine.comparison import Comparison
from dashboard.engine.device import is_out_of_memory, queue_of, release_memory
from dashboard.engine.generation import Generation, end_ids_of, stream
from dashboard.engine.run import LiveRun, RunKey, forward
from dashboard.engine.sweep import Sweep
from tide import Intervention, TideForCausalLM
from tide.cli import UserError

MIB = 2**20
CACHE_BYTES = {"cpu": 256 * MIB, "mps": 256 * MIB, "cuda": 1024 * MIB}
REQUEST_TOKENS = 8192  # of one forward, and of all rows of a generation
SWEEP_TOKENS = 1_000_000  # of all forwards that a sweep stands for
UNEMBEDDED_AT_ONCE = 2**24  # logits of a surprisal's chunk; 64 MiB in float32
TOKEN_BYTES = 40  # of a token id in a cache's key: a Python integer and its place in a tuple

Result = TypeVar("Result")


class Mean(NamedTuple):
    """The mean injections, [L, K, d] on the device, and the name of their content."""

    injection: torch.Tensor
    digest: str


class LiveModel:
    """A model that answers token ids; safe to share between threads.

    An intervention is an argument of the forward, never a state of the model, so that two sessions can ask
    different things of one model. Requests take turns on the device; a sweep or a generation gives its turn back
    after every chunk or token. Results are kept by everything that determines them.

    Args:
        model: in evaluation mode, on its device. Its parameters are frozen.
        mean_injection: as `with_mean_injection` takes it; without them nothing can be replaced by its mean.
    """

    def __init__(self, model: TideForCausalLM, mean_injection: np.ndarray | None = None):
        self.model = model.requires_grad_(False)  # what a page computes from a trace must not record gradients
        self.device = next(model.parameters()).device
        self.cache = ByteCache(CACHE_BYTES.get(self.device.type, CACHE_BYTES["cpu"]))
        self._queue = queue_of(self.device)
        self._injections = WeakValueDictionary[str, torch.Tensor]()  # by digest: one copy for all who have it
        self._mean = None if mean_injection is None else self._mean_of(mean_injection)
        # The first forward pays for set-up that no prompt should be charged with.
        self.on_device(lambda: forward(self.model, self._key((0,), Intervention())[0], None, None), admitted=True)

    @property
    def description(self) -> str:
        """Device and dtype, as the page shows them."""
        return f"{self.device.type} {str(self.model.dtype).removeprefix('torch.')}"

    @property
    def context_length(self) -> int:
        """Most tokens that a prompt may have."""
        return min(self.model.config.max_position_embeddings, REQUEST_TOKENS)

    def with_mean_injection(self, mean_injection: np.ndarray) -> Self:
        """The same model with what every (layer, bank) injects on average, which a replacement by the mean needs.

        It shares all but that: the weights, the turns on the device, and the results that are kept.

        Args:
            mean_injection: [L, K, d] float32, as one artifact folder has it.

        Raises:
            UserError: one sentence, when it is another model's.
        """
        other = copy.copy(self)
        other._mean = self._mean_of(mean_injection)
        return other

    def _mean_of(self, mean_injection: np.ndarray) -> Mean:
        config = self.model.config
        shape = (config.num_hidden_layers, config.num_memory_blocks, config.hidden_size)
        if mean_injection.shape != shape:
            raise UserError(
                f"The mean injections have shape {list(mean_injection.shape)}, the model needs {list(shape)}; "
                "run tide-precompute for this checkpoint."
            )
        numbers = np.ascontiguousarray(mean_injection, dtype=np.float32)
        digest = hashlib.sha256(numbers.tobytes()).hexdigest()
        injection = self._injections.get(digest)
        if injection is None:
            injection = self._injections[digest] = torch.tensor(numbers, device=self.device)
        return Mean(injection, digest)

    def run(self, token_ids: tuple[int, ...], intervention: Intervention | None = None) -> LiveRun:
        """One forward, from the cache where this very one has run before.

        Args:
            token_ids: [T].
            intervention: what the forward does differently.

        Raises:
            UserError: one sentence, when the intervention or a token id is not the model's, and when the device
                is busy or full.
        """
        key, mean = self._key(token_ids, intervention or Intervention())

        def work() -> LiveRun:
            result = self.cache.get(key)  # another request may have made it while this one waited
            if result is None:
                trained = self.cache.get(RunKey(token_ids, Intervention(), None))
                result = forward(self.model, key, mean, trained)
                self.cache.put(key, result, result.nbytes)
            return result

        return self.cache.get(key) or self.on_device(work)

    def derived(self, run: LiveRun, name: Hashable, work: Callable[[], Result]) -> Result:
        """What follows from a run, computed once: numbers that a page shows again at every redraw.

        Args:
            run: of this model.
            name: names what is computed, its arguments included.
            work: computes it; the result is shared, so nobody may change it.

        Returns:
            An array, a table, or a `Comparison`.
        """
        key = (name, run.key)
        found = self.cache.get(key)
        if found is None:
            found = self._guarded(work)
            self.cache.put(key, found, size_of(found) + TOKEN_BYTES * len(run.token_ids))
        return found

    def log_probs(self, run: LiveRun, position: int) -> torch.Tensor:
        """Log-probabilities of the token after `position`: [V] float32 on the device, in nats."""
        return self._guarded(lambda: self._unembed(run.stream[position]))

    def compare(self, trained: LiveRun, switched: LiveRun, position: int, k: int = 10) -> Comparison:
        """What the switches do to the prediction of the token after `position`.

        Args:
            trained: the forward as trained.
            switched: the same prompt with an intervention.
            position: 0..T-1.
            k: rows of each table.
        """

        def work() -> Comparison:
            return Comparison.of(self.log_probs(trained, position), self.log_probs(switched, position), k)

        return self.derived(switched, ("compare", trained.key, position, k), work)

    def surprisal(self, run: LiveRun) -> np.ndarray:
        """How little each token of the prompt was expected: [T-1] float32 nats, -log p of tokens 1..T-1.

        Raises:
            UserError: one sentence, when the device is busy or full.
        """
        key = ("surprisal", run.key)

        def work() -> np.ndarray:
            size = max(1, UNEMBEDDED_AT_ONCE // self.model.config.vocab_size)
            targets = torch.tensor(run.token_ids[1:], dtype=torch.long, device=self.device)
            parts = [
                -self._unembed(stream).gather(-1, part.unsqueeze(-1)).squeeze(-1)
                for stream, part in zip(run.stream[:-1].split(size), targets.split(size), strict=True)
            ]
            return torch.cat(parts).cpu().numpy()

        found = self.cache.get(key)
        if found is None:
            found = self.on_device(work)
            found.flags.writeable = False
            self.cache.put(key, found, found.nbytes + TOKEN_BYTES * len(run.token_ids))
        return found

    def sweep(
        self,
        token_ids: tuple[int, ...],
        position: int,
        target_id: int,
        progress: Callable[[int, int], None] | None = None,
        control_seed: int | None = 0,
    ) -> pd.DataFrame:
        """Switches every layer and every (layer, bank) off in turn.

        Args:
            token_ids: [T].
            position: whose prediction is measured.
            target_id: the token whose log-probability is measured.
            progress: told (switches done, of how many) after every chunk. What it raises ends the sweep.
            control_seed: of the controls, a random direction of the same length in the place of what is off; None
                leaves them out.

        Returns:
            One row a switch, the largest KL first: kind ("layer" or "pair"), layer, bank (-1 for a layer), kl (nats,
            KL(trained || switched) at `position`), delta (change of log p(target), nats), and of the control
            control_kl and control_delta (NaN without one).

        Raises:
            UserError: one sentence, when something asked for is not the model's, for a Base model, for a sweep that
                is too long, and when the device is busy or full.
        """
        config = self.model.config
        if not config.num_memory_blocks:
            raise UserError("This checkpoint is a Base model (K = 0): it has no memory to switch off.")
        if not 0 <= position < len(token_ids):
            raise UserError(f"The prompt has no position {position}, only 0..{len(token_ids) - 1}.")
        self._check_tokens((target_id,))
        switches = config.num_hidden_layers * (config.num_memory_blocks + 1)
        forwards = switches if control_seed is None else 2 * switches
        if forwards * (position + 1) > SWEEP_TOKENS:
            raise UserError(
                f"The sweep takes {forwards:,} forwards of {position + 1:,} tokens, more than {SWEEP_TOKENS:,} tokens "
                "together; mark an earlier position or shorten the prompt."
            )
        key = ("sweep", token_ids, position, target_id, control_seed)
        table = self.cache.get(key)
        if table is None:
            trained = self.run(token_ids)
            sweep = self.on_device(lambda: Sweep(self.model, trained.trace, position, target_id, control_seed))
            done = 0
            for chunk in sweep.chunks():
                self.on_device(partial(sweep.run, chunk), admitted=True)
                done += len(chunk)
                if progress is not None:
                    progress(done * switches // forwards, switches)
            table = sweep.table()
            self.cache.put(key, table, int(table.memory_usage(deep=True).sum()) + TOKEN_BYTES * len(token_ids))
        return table.copy()

    def generate(
        self,
        token_ids: tuple[int, ...],
        interventions: Sequence[Intervention],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: threading.Event | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Continues a prompt under several interventions side by side.

        All texts step together as one batch and draw from the same random numbers, so that equal predictions give
        equal tokens. A text ends with the token that ends a text, at the context length, or when `stop` is set.

        Args:
            token_ids: [T].
            interventions: one a text; at least one.
            max_new_tokens: of each text.
            temperature: 0 takes the likeliest token.
            seed: of the random numbers.
            stop: ends all texts before their next token.

        Returns:
            An iterator of (which text, token id), as they come.

        Raises:
            UserError: one sentence, when something asked for is not the model's or too long, here; when the device
                is busy or full, while iterating.
        """
        if temperature < 0:
            raise UserError(f"The temperature is {temperature}; it must be 0 or above.")
        means = [self._key(token_ids, intervention)[1] for intervention in interventions]
        room = self.context_length - len(token_ids)
        if room < 1:
            raise UserError(f"The prompt fills the {self.context_length:,} tokens that the model reads; shorten it.")
        steps = min(max_new_tokens, room)
        if (wanted := len(interventions) * (len(token_ids) + steps)) > REQUEST_TOKENS:
            raise UserError(
                f"The {len(interventions)} texts would have {wanted:,} tokens together, more than {REQUEST_TOKENS:,}; "
                "shorten the prompt or ask for fewer tokens."
            )
        mean = next((mean for mean in means if mean is not None), None)
        generation = Generation(self.model, token_ids, interventions, mean, temperature, seed)
        return stream(generation, len(interventions), steps, end_ids_of(self.model), stop, self.on_device)

    def _unembed(self, stream: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(stream).float().log_softmax(dim=-1)

    def on_device(self, work: Callable[[], Result], admitted: bool = False) -> Result:
        """Does some work on the device when it is its turn; what reads a long trace belongs in here too.

        Args:
            work: what to do.
            admitted: it is the next step of a job that has begun, which is never refused.

        Raises:
            UserError: one sentence, when too many wait, and when the device's memory runs out: then everything that
                was kept is freed, and the next request finds an empty device.
        """
        with self._queue.turn(admitted):
            return self._guarded(work)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        try:
            with torch.inference_mode():
                return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Here the error is gone, and with it the frames that held the tensors.
        self.cache.clear()
        release_memory(self.device)
        raise UserError(
            f"The memory of the device ({self.device.type}) ran out; what was kept there is freed: try again, "
            "and shorten the prompt if it happens again."
        )

    def _key(self, token_ids: tuple[int, ...], intervention: Intervention) -> tuple[RunKey, torch.Tensor | None]:
        """What names a forward, and the mean injections if it needs them; both of one moment.

        Raises:
            UserError: one sentence, when the intervention or a token id is not the model's.
        """
        self._check_tokens(token_ids)
        try:
            intervention.validate(self.model.config)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not intervention.needs_mean:
            return RunKey(token_ids, intervention, None), None
        mean = self._mean
        if mean is None:
            raise UserError(
                "Replacing by the mean needs the mean injections, which these artifacts lack; run tide-precompute anew."
            )
        return RunKey(token_ids, intervention, mean.digest), mean.injection

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        size = self.model.config.vocab_size
        if not token_ids:
            raise UserError("The prompt is empty; type some text.")
        if wrong := [i for i in token_ids if not 0 <= i < size]:
            raise UserError(f"Token id {wrong[0]} is outside the vocabulary, 0..{size - 1}.")
        if len(token_ids) > self.context_length:
            raise UserError(
                f"The prompt has {len(token_ids):,} tokens, the model reads at most {self.context_length:,}; "
                "shorten it."
            )
