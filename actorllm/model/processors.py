"""Logits processors of the application, in the worker: which requests they see, when they are called, and what fails.

Invariants: a processor's batch has one row for each slot that holds a request with parameters for it, in the order of `_rows`. A
slot's list of output tokens holds what was sampled for it up to now. Changes of the batch are collected from plans, and told to
the processors before the next logits.

They come before everything else that changes logits, so that no processor brings back what a grammar, `allowed_token_ids` or
`bad_words` take away. Those that leave the most likely token (`is_argmax_invariant`) see the scaled logits of rows that are drawn.

A call that raises is made again for each row alone, by an object of its own. So only the requests at fault end, and the others
go on with a new object, which is told of them anew. Owned by the runner, which calls `apply` between forward and sampling, on
the first rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import I32, StepPlan
from actorllm.types.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality
from actorllm.types.logits_processors.paths import load
from actorllm.types.logits_processors.travel import decode_rows
from actorllm.types.params import SamplingParams

MAX_ERROR = 500
"""Characters of what a processor raised."""

logger = logging.getLogger(__name__)


def told_of(config: EngineConfig, dtype: torch.dtype) -> SimpleNamespace:
    """What a processor is told of the engine, under vLLM's names."""
    model, limits = config.model, config.scheduler
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model.name,
            tokenizer=model.tokenizer,
            dtype=dtype,
            max_model_len=model.max_model_len,
            seed=model.seed,
            get_vocab_size=lambda: model.vocab_size,
            logits_processors=list(model.logits_processors),
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        ),
        cache_config=SimpleNamespace(block_size=config.cache.block_size),
        parallel_config=SimpleNamespace(tensor_parallel_size=config.tensor_size),
        speculative_config=None,
    )


@dataclass(slots=True, eq=False)
class Row:
    """A request that processors see."""

    slot: int
    params: SamplingParams
    prompt: list[int] | None
    output: list[int]


class Held:
    """One processor, and how to build it again."""

    def __init__(self, build: Callable[[], LogitsProcessor]) -> None:
        self._build = build
        self.processor = build()
        self.name = type(self.processor).__qualname__
        self.is_argmax_invariant = bool(self.processor.is_argmax_invariant())

    def apply(self, logits: torch.Tensor, rows: Sequence[Row], update: BatchUpdate | None) -> dict[int, BaseException]:
        """Change the logits, [num_rows, vocab_size], in place. Returns what it raised, by row."""
        given = logits.clone()  # a call that raises may have changed some of it
        try:
            self.processor.update_state(update)
            changed = _checked(self.processor.apply(given), logits)
        except (Exception, SystemExit) as error:  # of the application's class
            logger.debug("%s raised %r: each row is tried alone", self.name, error)
        else:
            logits.copy_(changed)
            return {}
        failed: dict[int, BaseException] = {}
        for index, row in enumerate(rows):
            one = logits[index : index + 1]
            try:
                alone = self._build()
                alone.update_state(BatchUpdate(1, (), ((0, row.params, row.prompt, row.output),), ()))
                one.copy_(_checked(alone.apply(one.clone()), one))
            except (Exception, SystemExit) as error:  # likewise: it ends this request
                failed[index] = error
        self._begin_again(rows, failed)
        return failed

    def _begin_again(self, rows: Sequence[Row], failed: dict[int, BaseException]) -> None:
        """With an object that knows the rows which have not failed, and nothing of what led to it."""
        added = tuple((i, r.params, r.prompt, r.output) for i, r in enumerate(rows) if i not in failed)
        try:
            self.processor = self._build()
            self.processor.update_state(BatchUpdate(len(rows), (), added, ()))
        except (Exception, SystemExit) as error:  # likewise: every row is tried alone from now on
            logger.warning("%s cannot be told of %d requests: %r", self.name, len(added), error)


def _checked(changed: Any, logits: torch.Tensor) -> torch.Tensor:
    if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
        raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, not {shape}")
    return changed


class Processors:
    """Those of one engine."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for one that cannot be built."""
        told = told_of(config, dtype)
        self._held: list[Held] = []
        for path in config.model.logits_processors:
            kind = load(path)
            try:
                self._held.append(Held(lambda kind=kind: kind(told, device, False)))  # type: ignore[misc]
            except (Exception, SystemExit) as error:  # of the application's class
                raise ConfigError(
                    f"logits_processors: {path!r} cannot be built: {type(error).__name__}: {error}"
                ) from error
        self._live: dict[int, Row] = {}
        """By slot."""
        self._rows: list[Row] = []
        """As the processors know them."""
        self._is_changed = False

    # Requests ---------------------------------------------------------------------------------------------------------

    def apply_plan(self, plan: StepPlan, known_tokens: dict[int, I32]) -> None:
        """Requests that have left their slots, and new ones. known_tokens: of new slots, prompt and output."""
        for slot in plan.freed.tolist():
            self._is_changed |= self._live.pop(slot, None) is not None
        if not plan.new_processed.size:
            return
        num_outputs = dict(zip(plan.new["slot"].tolist(), plan.new["num_outputs"].tolist(), strict=True))
        for slot, params in decode_rows(plan.new_processed):
            tokens = known_tokens[slot].tolist()
            num_prompt = len(tokens) - num_outputs[slot]
            prompt = tokens[:num_prompt]
            self._live[slot] = Row(slot, params, None if min(prompt) < 0 else prompt, tokens[num_prompt:])
        self._is_changed = True

    def clear(self) -> None:
        """No request is there any more."""
        self._live.clear()
        self._is_changed = True

    def concerns(self, slots: I32) -> bool:
        """Whether any of these slots holds a request that they see."""
        return bool(self._live) and not self._live.keys().isdisjoint(slots.tolist())

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these rows."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            row = self._live.get(slot)
            if row is not None:
                row.output.append(token)

    def _update(self) -> BatchUpdate | None:
        """Bring the order of the rows up to date, and say how it has changed."""
        if not self._is_changed:
            return None
        self._is_changed = False
        rows, live = self._rows, set(self._live.values())
        holes = [index for index, row in enumerate(rows) if row not in live]
        known = set(rows)
        added: list[int] = []
        for row in self._live.values():
            if row not in known:
                if holes:
                    index = holes.pop(0)
                    rows[index] = row
                else:
                    index = len(rows)
                    rows.append(row)
                added.append(index)
        removed, moved = tuple(holes), []
        while holes:
            last = rows.pop()
            if holes[-1] == len(rows):
                holes.pop()
            else:
                target = holes.pop(0)
                rows[target] = last
                moved.append((len(rows), target, MoveDirectionality.UNIDIRECTIONAL))
        new = tuple((i, rows[i].params, rows[i].prompt, rows[i].output) for i in added)
        return BatchUpdate(len(rows), removed, new, tuple(moved))

    # Logits -----------------------------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, slots: I32, temperatures: NDArray[np.float32]) -> dict[int, str]:
        """Change the logits of these slots in place, [num_rows, vocab_size] in float32. Returns what failed, by row."""
        if not self._live:
            return {}
        update, rows = self._update(), self._rows
        # Requests that do not sample in this step have rows of zeros, so that indices are those of the batch.
        row_of = {slot: i for i, slot in enumerate(slots.tolist())}
        at = [row_of.get(row.slot, -1) for row in rows]
        is_whole = len(at) == len(logits) and at == list(range(len(at)))
        here = [index for index, row in enumerate(at) if row >= 0]
        where = [at[index] for index in here]
        batch = logits if is_whole else logits.new_zeros(len(rows), logits.shape[1])
        if not is_whole:
            batch[here] = logits[where]
        failed: dict[int, str] = {}
        for held in self._held:
            if held.is_argmax_invariant:
                raised = self._apply_scaled(held, batch, at, temperatures, update)
            else:
                raised = held.apply(batch, rows, update)
            for index, error in raised.items():
                failed.setdefault(index, _told(held.name, error))
        # NaN, and rows without any choice, show in the highest logit.
        highest = batch.amax(1).cpu().numpy()
        for index in np.flatnonzero(~np.isfinite(highest)).tolist():
            failed.setdefault(index, "the logits processors leave no token to choose, or logits that are not finite")
        if failed:
            batch[list(failed)] = 0.0
        if not is_whole:
            logits[where] = batch[here]
        return {at[index]: text for index, text in failed.items() if at[index] >= 0}

    def _apply_scaled(
        self,
        held: Held,
        batch: torch.Tensor,
        at: list[int],
        temperatures: NDArray[np.float32],
        update: BatchUpdate | None,
    ) -> dict[int, BaseException]:
        """Of one that leaves the most likely token: rows that are drawn, divided by their temperature."""
        given = np.array([temperatures[row] if row >= 0 else 0 for row in at], np.float32)
        drawn = torch.from_numpy(np.flatnonzero(given > 0)).to(batch.device)
        divisor = torch.from_numpy(np.where(given > 0, given, np.float32(1))).to(batch.device).unsqueeze(1)
        scaled = batch / divisor
        raised = held.apply(scaled, self._rows, update)
        batch[drawn] = (scaled * divisor)[drawn]
        return raised


def _told(name: str, error: BaseException) -> str:
    text = f"the logits processor {name} failed: {type(error).__name__}: {error}".encode(errors="replace").decode()
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…"


def processors_of(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Processors | None:
    """Every rank has them, as all take the same way through a step; None: the engine has none."""
    return Processors(config, dtype, device) if config.model.logits_processors else None
