"""`StatRecorder`: tells the loggers of an application (`stat_loggers=`) what the engine does, in vLLM's words.

It looks at every message of outputs before the frontend hands it out, and asks the scheduler for its numbers once a second. A
logger that raises is named in the log, and is not called again; requests never notice. An engine without loggers has none of
this. Called on the engine thread, and by an `LLMEngine` on that of its caller.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import anyio

from actorllm.actors.frontend import JournalEntry
from actorllm.clock import now, to_epoch
from actorllm.errors import ConfigError, EngineError
from actorllm.messages import Outputs
from actorllm.types.request_end import RequestEnd
from actorllm.types.stat_loggers import (
    AggregateStatLoggerBase,
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
    StatLoggerBase,
)

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""How old the numbers of the scheduler may be."""


def check_factories(given: object) -> tuple[Callable[..., Any], ...]:
    """Of `stat_loggers=`: classes, or functions of the configuration and a number. Raises ConfigError."""
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"stat_loggers={given!r:.80} must be a list of classes derived from StatLoggerBase")
    made = tuple(given)
    for one in made:
        if not callable(one):
            raise ConfigError(f"stat_loggers: {one!r:.80} is no class of a logger, and no function that makes one")
    return made


class StatRecorder:
    """Of the whole engine. Each replica has loggers of its own, but for those that are of all (`AggregateStatLoggerBase`)."""

    def __init__(self, factories: tuple[Callable[..., Any], ...]) -> None:
        self._factories = factories
        self._config: Any = None
        self._of_all: list[StatLoggerBase] = []
        self._of_one: dict[int, list[StatLoggerBase]] = {}
        self._takes: dict[int, frozenset[str]] = {}
        """Which arguments the `record` of each logger knows, by its id: vLLM's had fewer once."""
        self._engines: dict[int, ObservedEngine] = {}

    def begin(self, config: Any, numbers: Iterable[int] = (0,)) -> None:
        """The engine has started, for the first time or again. config: the `EngineConfig`. numbers: of its replicas."""
        if self._config is not None:
            return
        self._config = config
        all_numbers = list(numbers)
        for number in all_numbers:
            self.of(number)
        self._of_all = self._made([one for one in self._factories if _is_of_all(one)], all_numbers)
        for one in self._of_all:
            self._call(one, "log_engine_initialized", {})

    def of(self, number: int) -> ObservedEngine:
        """What observes this replica, also one that comes later."""
        if number not in self._engines:
            self._engines[number] = ObservedEngine(self, number)
            own = self._made([one for one in self._factories if not _is_of_all(one)], number)
            self._of_one[number] = own
            for one in own:
                self._call(one, "log_engine_initialized", {})
        return self._engines[number]

    def _made(self, factories: Iterable[Callable[..., Any]], numbers: int | list[int]) -> list[StatLoggerBase]:
        made = []
        for factory in factories:
            try:
                one = factory(self._config, numbers)
                self._takes[id(one)] = _arguments_of(one.record)
            except Exception:  # of the application's: the engine runs without this one
                logger.exception("%r of stat_loggers cannot be made: it is left out", factory)
            else:
                made.append(one)
        return made

    def log(self) -> None:
        """`do_log_stats` was called."""
        for one in (*self._of_all, *(one for own in self._of_one.values() for one in own)):
            self._call(one, "log", {})

    async def follow(self, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Ask the scheduler for its numbers, for ever."""
        while True:
            await anyio.sleep(INTERVAL_S)
            try:
                statistics = await ask()
            except EngineError:  # it recovers, or ends, and this task with it
                continue
            self.note_schedulers(statistics)

    def note_schedulers(self, statistics: Mapping[str, Any]) -> None:
        """statistics: of the scheduler actor, or of those of all replicas."""
        for number, one in statistics.get("replicas", {0: statistics}).items():
            self.of(number).note_scheduler(one)

    def record(self, number: int, scheduler: SchedulerStats, iteration: IterationStats | None) -> None:
        """What a replica tells, to its loggers."""
        told = {
            "scheduler_stats": scheduler,
            "iteration_stats": iteration,
            "mm_cache_stats": None,
            "engine_idx": number,
        }
        for one in (*self._of_all, *self._of_one[number]):
            takes = self._takes[id(one)]
            self._call(one, "record", {name: value for name, value in told.items() if name in takes})

    def _call(self, one: StatLoggerBase, method: str, arguments: Mapping[str, Any]) -> None:
        began = now()
        try:
            getattr(one, method)(**arguments)
        except Exception:  # of the application's: no request may end of it
            logger.exception(
                "%s.%s raised: this logger of stat_loggers is not called any more", type(one).__name__, method
            )
            for known in (self._of_all, *self._of_one.values()):
                if one in known:
                    known.remove(one)
        else:
            if now() - began > INTERVAL_S:
                logger.warning(
                    "%s.%s took %.1f s, in which no stream went on", type(one).__name__, method, now() - began
                )


class ObservedEngine:
    """One replica, or the engine if it is alone: looks at its outputs (`OutputObserver`), and hears its scheduler's numbers."""

    def __init__(self, recorder: StatRecorder, number: int) -> None:
        self._recorder = recorder
        self._number = number
        self._scheduler = SchedulerStats()
        self._counted = (0, 0)
        """Of the prefix cache, when the scheduler was asked last."""

    def see(self, outputs: Outputs, ends: Mapping[int, RequestEnd] | None, journal: Mapping[int, JournalEntry]) -> None:
        """A message, before it counts. ends: by its rows. journal: of the frontend, by rid."""
        stats = IterationStats(to_epoch(outputs.emitted))
        counts = outputs.counts.tolist() if outputs.counts.size else None
        for row, rid in enumerate(outputs.rids.tolist()):
            entry = journal.get(rid)
            if entry is None:
                continue
            number = counts[row] if counts is not None else 1
            if number:
                self._see_tokens(stats, entry, number, outputs.emitted)
            if ends is not None and row in ends:
                self._see_end(stats, entry, ends[row], number, outputs.emitted)
        self._recorder.record(self._number, self._scheduler, stats)
        self._forget_cache()

    @staticmethod
    def _see_tokens(stats: IterationStats, entry: JournalEntry, number: int, at: float) -> None:
        stats.num_generation_tokens += number
        if entry.last_token is not None:
            stats.inter_token_latencies_iter.append(at - entry.last_token)
        elif entry.first_token is None:
            stats.num_prompt_tokens += entry.submit.prompt.size
            stats.time_to_first_tokens_iter.append(at - entry.submit.arrival)
        entry.last_token = at

    @staticmethod
    def _see_end(stats: IterationStats, entry: JournalEntry, end: RequestEnd, number: int, at: float) -> None:
        submit = entry.submit
        num_tokens = len(entry.emitted) + number
        queued = 0.0 if end.scheduled is None else end.scheduled - end.queued
        prefill = decode = 0.0
        if end.scheduled is not None and end.first_token is not None and end.last_token is not None:
            prefill, decode = end.first_token - end.scheduled, end.last_token - end.first_token
        stats.num_preempted_reqs += end.num_preemptions
        stats.num_corrupted_reqs += bool(end.num_nonfinite)
        stats.max_num_generation_tokens_iter.append(num_tokens)
        stats.n_params_iter.append(submit.num_sequences)
        stats.finished_requests.append(
            FinishedRequestStats(
                end.reason,
                e2e_latency=at - submit.arrival,
                num_prompt_tokens=submit.prompt.size,
                num_generation_tokens=num_tokens,
                max_tokens_param=submit.max_tokens,
                queued_time=queued,
                prefill_time=prefill,
                inference_time=prefill + decode,
                decode_time=decode,
                mean_time_per_output_token=decode / (num_tokens - 1) if num_tokens > 1 else 0.0,
                is_corrupted=bool(end.num_nonfinite),
                num_cached_tokens=end.num_cached_tokens,
            )
        )

    def note_scheduler(self, statistics: Mapping[str, Any]) -> None:
        """statistics: of the scheduler actor."""
        scheduler = statistics["scheduler"]
        cache = scheduler["prefix_cache"] or {"queries": 0, "hits": 0}
        counted = cache["queries"], cache["hits"]
        # Counters that have become smaller are those of another scheduler, which began at 0.
        before = self._counted if all(new >= old for new, old in zip(counted, self._counted, strict=True)) else (0, 0)
        self._counted = counted
        found = SchedulerStats(
            num_running_reqs=scheduler["num_running"],
            num_waiting_reqs=scheduler["num_waiting"],
            num_skipped_waiting_reqs=scheduler["num_blocked"],
            step_counter=scheduler["num_steps"],
            kv_cache_usage=scheduler["kv"]["usage"],
            prefix_cache_stats=PrefixCacheStats(queries=counted[0] - before[0], hits=counted[1] - before[1]),
        )
        if found != self._scheduler:
            self._scheduler = found
            self._recorder.record(self._number, found, None)
            self._forget_cache()

    def _forget_cache(self) -> None:
        """It counts from one time to the next, and was told. What loggers were given stays as it was."""
        old = self._scheduler
        if old.prefix_cache_stats.queries:
            self._scheduler = SchedulerStats(
                old.num_running_reqs,
                old.num_waiting_reqs,
                old.num_skipped_waiting_reqs,
                old.step_counter,
                kv_cache_usage=old.kv_cache_usage,
            )


def _is_of_all(factory: Callable[..., Any]) -> bool:
    return isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)


def _arguments_of(record: Callable[..., Any]) -> frozenset[str]:
    known = ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx")
    parameters = inspect.signature(record).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return frozenset(known)
    return frozenset(name for name in known if name in parameters)
