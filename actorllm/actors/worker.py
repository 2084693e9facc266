"""The worker actor: a thin shell around `ModelRunner`, one per rank.

Steps are executed one after the other, in the order of their plans. A step that raises is answered with StepFailed, and
the worker lives on. The next plan frees every slot, which drops what the failed step left behind. What it wrote into
the cache is cleared at once.

*Self-check.* Before the worker reports a step that raised, or in which nothing was finite, it computes a small step of
its own (`ModelRunner.check_itself`). If that fails as well, the worker can do nothing any more, and no request is at
fault. It then ends like one that crashed, and the step is not reported.

*Scheduler death.* A worker outlives its scheduler and keeps the weights. With the first plan of the next scheduler,
which comes over another link, it forgets every request. Of several ranks none leaves a step that the others may be in.
All of them finish what the dead scheduler had sent, which was the same for all.

*Backpressure.* A result that its link has no room for waits until what was sent before is in the ring. No step begins
before it is sent, so large results (many log-probabilities) slow their own engine down and do nothing else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import numpy as np
from numpy.typing import NDArray

from actorllm.actors.actor import Actor
from actorllm.actors.giving_way import GivingWay
from actorllm.actors.heartbeat import WITHOUT_NUMBER
from actorllm.actors.link import Link
from actorllm.actors.pipeline import Pipeline
from actorllm.actors.step_budget import NEW_BUDGET_S, StepBudget
from actorllm.actors.tiers.block_mover import BlockMover
from actorllm.actors.tiers.fingerprint import fingerprint_of
from actorllm.actors.tiers.lease_board import LeaseBoard
from actorllm.actors.tiers.peer_memory import PeerMemory
from actorllm.actors.tiers.slot_file import SlotFile
from actorllm.actors.tiers.tier_files import keys_of, open_tiers
from actorllm.actors.weight_receiver import WeightReceiver
from actorllm.actors.worker_calls import LONGEST_CALL_S, WorkerCalls
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import EngineError, InvalidParameterError, PeerLostError, TransportError, WouldBlock
from actorllm.messages import Drafted, LateInputs, Message, StepFailed, StepPlan, StepResult
from actorllm.types.adapter_folder import Adapter
from actorllm.types.roles import NIXL
from actorllm.types.sleep import SLEEPING_PARTS
from actorllm.types.weight_version import WeightSource

if TYPE_CHECKING:
    from actorllm.model.adapters.store import Adapters, Tensors
    from actorllm.model.runner import ModelRunner, StagedWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")

TORN_PAUSE_S = 0.1
"""Before a rank ends that others wait for. Those fail in their turn as soon as one has ended: it is to be known by then which was
the first, and that is the cause."""


class WorkerActor(Actor):
    """Executes plans. Rank 0 reports tokens, in a pipeline the first one of the last stage; the others acknowledge."""

    VERBS = (
        *Actor.VERBS,
        *("start_profile", "stop_profile", "limit_threads"),
        *("load_adapter", "add_adapter", "pin_adapter", "remove_adapter", "list_adapters"),
        *("stage_weights", "discard_weights", "commit_weights", "transfer_weights"),
        "call_worker",
        *("sleep", "wake_up", "asleep"),
        *("load_blocks", "store_blocks", "pull_blocks", "cache_era"),
    )

    def __init__(self, name: str = "worker0", rank: int = 0) -> None:
        super().__init__(name, rank)
        self.plans: deque[tuple[Link, StepPlan]] = deque()
        self.late_inputs: dict[tuple[Link, int], LateInputs] = {}
        self.owner: Link | None = None
        """Whose requests the runner has: the link that the last plan came over."""
        self.unsent: tuple[Link, StepResult | StepFailed] | None = None
        """What is to be sent before anything else is done (`send_unsent`)."""
        self.is_alone = True
        self._is_replacement = False
        self._budget = StepBudget()
        self._num_decode: dict[int, int] = {}
        """Rows of each lane."""
        # Of one stage, until the configuration is known.
        self._reports, self._samples = not rank, True
        self._stage, self._has_stages = 0, False
        self._num_steps = 0
        self._num_failed = 0
        self._num_checks = 0
        self._num_orphaned = 0
        self._busy_s = 0.0
        self._profile_prefix = ""
        self._pipeline: Pipeline | None = None
        self._weights = WeightSource()
        """The version that steps are computed with."""
        self._staged: tuple[WeightSource, StagedWeights] | None = None
        self._calls: WorkerCalls | None = None
        self._receiver: WeightReceiver | None = None
        """Where weights have come from a trainer."""
        self._mover: BlockMover | None = None
        """Where there are KV tiers."""
        self._peers: PeerMemory | None = None
        """The memory of other replicas, where there are roles."""
        self._cache_era = 0
        """Of the memory of this cache, as the lease board tells it."""
        self._asleep: set[str] = set()
        """What was given back, of SLEEPING_PARTS."""

    async def on_start(self, config: EngineConfig) -> dict[str, Any]:
        """Load the model and say how many KV blocks fit."""
        self.runner = self._load(config)
        if config.worker_cls is not None or config.worker_extension_cls is not None:
            self._make_calls()  # what is wrong with the classes is wrong with the start
        self._weights = config.model.weights
        self.is_alone = config.num_workers == 1
        self._reports = self.rank == config.reporting_rank
        self._samples = self.rank >= config.reporting_rank
        self._stage = self.rank // config.tensor_size
        self._has_stages = bool(config.stages)
        self._is_replacement = config.cache.num_blocks is not None
        sizes: dict[str, Any] = {}
        if config.data_parallel_size > 1 or config.max_replicas or config.rank_nodes:
            from actorllm.model.arithmetic import arithmetic_of  # imports torch: only where a worker runs

            sizes["arithmetic"] = arithmetic_of(config, self.runner.scheme)
        if self._is_replacement:  # of an engine that runs already, and knows how many it needs
            return {"num_blocks": config.cache.num_blocks, **sizes}
        sizes["weight_bytes"] = self.runner.weight_bytes
        if self.runner.scheme is not None:
            sizes["scheme"] = self.runner.scheme
        if self.runner.cache_window is not None:
            sizes["window"] = self.runner.cache_window
        if config.cache.has_tiers:
            sizes["tier"] = self._tier(config)
        num_blocks = self.runner.profile_num_blocks()
        if self.runner.num_snapshots is not None:
            sizes["snapshots"] = self.runner.num_snapshots
        if config.model.pooler is None or not config.model.pooler.is_encoder:
            sizes["block_bytes"] = self.runner.block_bytes
            # With its share of the second group, or of states.
            if num_blocks and (self.runner.cache_window is not None or self.runner.num_snapshots is not None):
                sizes["block_bytes"] = -(-self.runner.cache_bytes_of(num_blocks) // num_blocks)
        return {"num_blocks": num_blocks, **sizes, **self._measured(config)}

    def _tier(self, config: EngineConfig) -> tuple[str, int]:
        """What its blocks are told apart by in a tier, and their size. Raises ConfigError: there cannot be one."""
        from actorllm.model.arithmetic import arithmetic_of

        fingerprint = fingerprint_of(config, arithmetic_of(config, self.runner.scheme)).hex()
        cache = replace(config.cache, tier_fingerprint=fingerprint, tier_slot_bytes=self.runner.block_bytes)
        for file in open_tiers(cache, self.rank, config.num_workers):
            file.close()
        return fingerprint, self.runner.block_bytes

    def _measured(self, config: EngineConfig) -> dict[str, Any]:
        """What steps take, where the number of drafts goes by it."""
        if config.speculation is None or not config.speculation.goes_by_costs or config.world_size > 1:
            return {}  # of several ranks none computes a step alone
        return self.runner.measured_costs()

    def _load(self, config: EngineConfig) -> ModelRunner[Any, Any]:
        from actorllm.model import backends

        runner = backends.load(config.device)(config, self.rank)  # imports torch: only where a worker runs
        runner.load()
        if config.is_launched:
            from actorllm.model.launched.launched_runners import LeadingRunner

            return cast("ModelRunner[Any, Any]", LeadingRunner(runner))
        return runner

    def on_configure(self, config: EngineConfig) -> None:
        """One that takes another's place shows first that it can do more than that one could at its end."""
        assert config.cache.num_blocks is not None
        if config.cache.pools:
            self._lend(config)
        if config.cache.window is None:
            self.runner.allocate(config.cache.num_blocks)
        else:
            self.runner.allocate_groups(config.cache.num_blocks, config.num_window_blocks)
        if self._peers is not None:
            self._peers.publish(self._own_pool(config))
        if config.cache.has_tiers:
            slot_bytes = sum(view.nbytes for view in self.runner.block_views(0))
            if slot_bytes != config.cache.tier_slot_bytes:  # what a block is, is not all in these bytes
                raise EngineError(
                    f"blocks have {slot_bytes} bytes of {config.cache.tier_slot_bytes}: no tier can keep them"
                )
            self._mover = BlockMover(self._open_tiers(config), self.runner.block_views)
        elif config.cache.pools:
            self._mover = BlockMover([], self.runner.block_views)
        if config.speculation is not None:
            self.runner.take_costs(config.speculation)
        self.runner.tell_drafts = self._tell_drafts
        if config.topology == "inline" and self.waker() is not None:
            self.runner.between_layers = GivingWay().between_layers
        self._budget = StepBudget(config.step_timeout_s)
        if self._is_replacement and (error := self._why_unable()) is not None:
            raise error

    def _lend(self, config: EngineConfig) -> None:
        """Have the cache where other replicas see it. What was lent of the worker whose place this one takes is over first."""
        assert config.cache.lease_path is not None
        board = LeaseBoard(config.cache.lease_path, config.max_blocks)
        self._cache_era = board.begin_era(config.replica, self.rank)
        pools = config.cache.pools[self.rank :: config.num_workers]  # of this rank of each replica
        if config.cache.transport == NIXL:
            from actorllm.actors.tiers.nixl_memory import NixlMemory  # imports NIXL

            self._peers = NixlMemory(pools, board, self.runner.block_regions)
            return
        if path := self._own_pool(config):
            self.runner.share_cache(path)
        self._peers = PeerMemory(pools, board, self.runner.block_regions)

    def _own_pool(self, config: EngineConfig) -> str:
        return config.cache.pools[config.replica * config.num_workers + self.rank]

    def _open_tiers(self, config: EngineConfig) -> list[SlotFile]:
        """None where this worker computes other bits than the one whose place it takes: the files of the model were changed."""
        if self._is_replacement and self._tier(config)[0] != config.cache.tier_fingerprint:
            logger.warning(
                "the files of the model have changed since the engine was started; its KV tiers are not used"
            )
            return []
        return open_tiers(config.cache, self.rank, config.num_workers)

    def on_link(self, link: Link) -> None:
        self._scheduler = link
        if (
            self._mover is not None
        ):  # jobs of another scheduler, whose blocks this one gives to others before its first plan
            self._mover.drop()

    async def on_stop(self) -> None:
        self._calls = None
        if self._receiver is not None:
            self._receiver.close()
        if self._mover is not None:
            self._mover.close()
        if hasattr(self, "runner"):
            self.runner.close()

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case StepPlan():
                self.plans.append((link, message))
            case LateInputs() if not self._samples:
                pass  # they are for the last stage
            case LateInputs():
                self.late_inputs[link, message.step] = message
            case _:
                super().on_message(link, message)

    async def run(self) -> None:
        if self.runner.launches_ahead:
            self._pipeline = Pipeline(self)
            await self._pipeline.run()
            return
        while self.is_running:
            if await self.turn() and self._scheduler.is_open:
                self._scheduler.finish()  # the next plan is there already: take it without waiting for its doorbell
                if self.plans:
                    self.wake()  # then the loop turns once, so that a stop is heard, and does not sleep
            await self.wait()

    async def turn(self) -> bool:
        """Execute the next plan. False: there is none."""
        if not self.plans:
            return False
        link, plan = self.plans.popleft()
        if link is not self.owner:
            self.take_over(link)
        if link.is_open or not self.is_alone:
            await self._step(link, plan)
            if self.unsent is not None:
                await self.send_unsent()
        else:
            self._num_orphaned += 1
        return True

    def take_over(self, link: Link) -> None:
        """A plan comes over this link: what another one's requests left is forgotten."""
        if self.owner is not None and link is not self.owner:
            self._forget_requests()
        self.owner = link

    def _forget_requests(self) -> None:
        """They were those of a scheduler that is gone."""
        if self._mover is not None:
            self._take_time(self._mover.quiesce)
        self.runner.forget_requests()
        self.late_inputs = {key: late for key, late in self.late_inputs.items() if key[0].is_open}

    async def _step(self, link: Link, plan: StepPlan) -> None:
        if self.heartbeat is None:
            await self._compute(link, plan)
            return
        num_tokens = self.count_tokens(plan)
        # Of a pipeline, a stage also waits for those before it: if one of them is stuck, that one is to be found first.
        budget_s = self._budget.of(num_tokens)
        self.heartbeat.begin(plan.step, budget_s * (1 + self._stage))
        started = now()
        try:
            await self._compute(link, plan)
        finally:
            self.heartbeat.end()
        self._budget.observe(num_tokens, now() - started, budget_s)

    def count_tokens(self, plan: StepPlan) -> int:
        """Of the step of this plan, the next one."""
        lane = plan.lane.item(0) if plan.lane.size else 0
        if plan.decode_slots is not None:
            self._num_decode[lane] = plan.decode_slots.size
        return self._num_decode.get(lane, 0) * (1 + plan.max_drafts) + (
            int(plan.prefill_counts.sum()) if plan.prefill_counts.size else 0
        )

    def budget_of(self, num_tokens: int) -> float:
        """How long a step of so many tokens may take, in seconds."""
        return self._budget.of(num_tokens)

    def count_step(self, num_tokens: int, seconds: float) -> None:
        """A step is done that was launched ahead."""
        self._num_steps += 1
        self._busy_s += seconds
        self._budget.observe(num_tokens, seconds, self._budget.of(num_tokens))

    def drop_plans_of(self, link: Link) -> None:
        """Of a scheduler that is gone, and of a step that it cannot go on with."""
        mine = deque(entry for entry in self.plans if entry[0] is not link)
        self._num_orphaned += 1 + len(self.plans) - len(mine)
        self.plans = mine

    def count_orphan(self) -> None:
        """A step of a scheduler that is gone; it is not computed."""
        self._num_orphaned += 1

    def failure_of(self, link: Link, plan: StepPlan, error: Exception) -> StepFailed:
        """What to report of a step that raised; clears what it has left behind."""
        logger.exception("step %d failed", plan.step, exc_info=error)
        self._num_failed += 1
        self.late_inputs.pop((link, plan.step), None)
        failure = StepFailed(
            step=plan.step,
            error=f"{type(error).__name__}: {error}",
            is_out_of_memory=self.runner.is_memory_shortage(error),
        )
        error.__traceback__ = None  # its frames hold the tensors of the step
        self.runner.discard()
        return failure

    async def _compute(self, link: Link, plan: StepPlan) -> None:
        try:
            handle = self.runner.execute(plan)
            late = await self._late_inputs(link, plan.step) if plan.late_slots.size and self._samples else None
            result = self.runner.sample(handle, late)
        except PeerLostError:  # what this step waits for will never come, here and at every other rank
            self.drop_plans_of(link)
            return
        except Exception as error:  # of a step: the scheduler is told which, and finds the request at fault
            if self.runner.is_torn:  # the other ranks wait in a collective that this one will not enter
                await anyio.sleep(TORN_PAUSE_S)
                raise
            failure = self.failure_of(link, plan, error)
            self.check_itself(plan.step, failure.error)
            self.report(link, failure)
            return
        if result.came_to_nothing:
            self.check_itself(plan.step, "nothing in it was finite")
        self._num_steps += 1
        self._busy_s += result.ended - result.started
        if not self._reports:
            result = StepResult(step=plan.step, started=result.started, ended=result.ended)
        self.report(link, result)

    def check_itself(self, step: int, error: str) -> None:
        """After a step that failed. Raises EngineError when no other works either."""
        own = self._why_unable()
        if own is not None:
            raise EngineError(
                f"no step works any more, whatever the request: step {step} failed ({error}), and so did one without any "
                f"request ({type(own).__name__}: {own})"
            ) from own

    def _why_unable(self) -> Exception | None:
        """Why not even a step of its own works. A want of memory says nothing about that: it may pass."""
        self._num_checks += 1
        try:
            self.runner.check_itself()
        except Exception as error:  # of a step for no request: it is the finding
            if self.runner.is_torn or not self.runner.is_memory_shortage(error):
                return error
            logger.warning("there is no memory for the worker to find out whether it works: %s", error)
        return None

    def report(self, link: Link, message: StepResult | StepFailed) -> None:
        """Tell the scheduler of a step. What there is no room for is `unsent` after that."""
        if not link.is_open:
            self._num_orphaned += 1
            return
        try:
            link.send_nowait(message)
        except WouldBlock:
            self.unsent = link, message
        except ValueError as error:  # it is longer than any message may be
            logger.error("the result of step %d cannot be sent: %s", message.step, error)
            self._num_failed += 1
            self.report(link, StepFailed(step=message.step, error=f"its result cannot be sent: {error}"))

    async def send_unsent(self) -> None:
        """Wait until there is room for what is unsent, and send it. The heartbeat must show no step meanwhile: the loop turns."""
        while self.unsent is not None:
            (link, message), self.unsent = self.unsent, None
            try:
                await link.wait_flushed()
            except TransportError:
                logger.debug("step %d is not reported: %s is gone", message.step, link.peer)
            self.report(link, message)

    def _tell_drafts(self, drafted: Drafted) -> None:
        """The forward is about to begin: the masks of its drafts are made meanwhile."""
        assert self.owner is not None
        try:
            self.owner.send_nowait(drafted)
        except TransportError:
            logger.debug("the drafts of step %d are not told: %s is gone", drafted.step, self.owner.peer)

    async def _late_inputs(self, link: Link, step: int) -> LateInputs | None:
        """What sampling of this step still needs; the forward has been launched and runs meanwhile.

        None: it will never come, and the other stages are in later steps already. Nothing of these counts; all finish them.
        """
        if (link, step) not in self.late_inputs and link.is_open:
            link.finish()  # they may be there already: take them without waiting for their doorbell
        while (link, step) not in self.late_inputs:
            if not link.is_open and self._has_stages:
                return None
            if not link.is_open:
                raise PeerLostError(f"the late inputs of step {step} were not sent")
            if self.heartbeat is not None:
                self.heartbeat.end()  # the loop turns
            await self.wait()
        if self.heartbeat is not None:
            self.heartbeat.begin(step, self._budget.of(sum(self._num_decode.values())))
        return self.late_inputs.pop((link, step))

    def on_peer_lost(self, link: Link) -> None:
        self.wake()

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        match verb:
            # What keeps the loop from turning is announced to the watchdog; what is read or moved aside is awaited.
            case "start_profile":
                return self._take_time(self._start_profile, arguments.get("prefix", ""))
            case "stop_profile":
                return self._take_time(self.runner.stop_profile, arguments["folder"], self._profile_prefix)
            case "limit_threads":
                self.runner.limit_threads(arguments["num_threads"])
                return True
            case "load_adapter":
                return self._load_adapter(Adapter(arguments["digest"], arguments["path"]), arguments["slot"])
            case "add_adapter" | "pin_adapter":
                return self._keep_adapter(Adapter(arguments["digest"], arguments["path"]), verb == "pin_adapter")
            case "remove_adapter":
                return self._adapters.forget(arguments["digest"])
            case "list_adapters":
                return self._adapters.digests
            case "stage_weights":
                return self._stage_weights(WeightSource.from_tree(arguments["source"]))
            case "discard_weights":
                self._staged = None
                return True
            case "commit_weights":
                return self._commit_weights(WeightSource.from_tree(arguments["source"]))
            case "transfer_weights":
                if self._receiver is None:
                    self._receiver = WeightReceiver(self.runner.config, self.rank, self.runner)
                return self._receiver.answer(**arguments, has_loop=self.waker() is not None)
            case "sleep":
                return self._take_time(self._sleep, arguments["level"])
            case "wake_up":
                return self._wake_up(arguments["tags"])
            case "asleep":
                return sorted(self._asleep)
            case "load_blocks" | "store_blocks":
                return self._move_blocks(verb, keys_of(arguments["data"].tobytes()), arguments["blocks"])
            case "pull_blocks":
                return self._pull_blocks(
                    arguments["data"].tobytes(), **{n: arguments[n] for n in ("lease", "first", "blocks")}
                )
            case "cache_era":
                return self._cache_era
            case "call_worker":
                calls = self._make_calls() if self._calls is None else self._calls
                return self._take_time(partial(calls.answer, **arguments), budget_s=LONGEST_CALL_S)
        return super().answer(verb, arguments)

    @property
    def _adapters(self) -> Adapters:
        adapters = self.runner.adapters
        if adapters is None:
            raise InvalidParameterError("this worker takes no adapters; build the engine with enable_lora=True")
        return adapters

    async def _load_adapter(self, adapter: Adapter, slot: int) -> bool:
        """Let a slot hold this adapter."""
        adapters = self._adapters
        if not adapters.want(slot, adapter.digest):
            fill = partial(adapters.fill, slot, adapter.digest, await self._tensors_of(adapter))
            if adapters.slots.fills_beside_steps:
                await self._read_aside(fill)
            else:
                self._take_time(fill)
        return True

    async def _keep_adapter(self, adapter: Adapter, is_pinned: bool) -> bool:
        tensors = await self._tensors_of(adapter)
        if not self._adapters.keep(adapter.digest, tensors, is_pinned):
            raise InvalidParameterError(
                f"the workers keep max_cpu_loras={self._adapters.max_kept} adapters, and all of them are pinned: remove one with "
                f"remove_lora, or build the engine with a larger max_cpu_loras"
            )
        return True

    async def _tensors_of(self, adapter: Adapter) -> Tensors:
        """Kept from before, or read on a thread beside the steps."""
        adapters = self._adapters
        found = adapters.get(adapter.digest)
        if found is None:
            found = await self._read_aside(partial(adapters.read, adapter))
            adapters.keep(adapter.digest, found)
        return found

    async def _read_aside(self, read: Callable[[], T]) -> T:
        """The result of a function on a thread beside the steps. Raises what it raises."""
        done = anyio.Event()
        outcome: list[tuple[T | None, Exception | None]] = []

        def reading() -> tuple[T | None, Exception | None]:
            try:
                return read(), None
            except Exception as error:  # it is the answer to the scheduler, and the worker goes on
                error.__traceback__ = None
                return None, error

        def take(found: tuple[T | None, Exception | None]) -> None:
            outcome.append(found)
            done.set()

        self.work_aside(reading, take)
        if not outcome:  # where there is no loop, it is there already
            await done.wait()
        ((found, error),) = outcome
        if error is not None:
            raise error
        return cast(T, found)

    async def _stage_weights(self, source: WeightSource) -> bool:
        """Read and check a version, and keep it beside the one that counts."""
        self._staged = None  # of an update that was given up: one is kept at a time
        self._staged = source, await self._read_aside(partial(self.runner.stage_weights, source))
        return True

    async def _commit_weights(self, source: WeightSource) -> bool:
        """Compute every later step with this version. What is not staged here is read first: the scheduler waits for it."""
        if source.identity != self._weights.identity:
            if self._staged is None or self._staged[0].identity != source.identity:
                await self._stage_weights(source)
            assert self._staged is not None
            self._take_time(self.runner.commit_weights, self._staged[1])
            self._weights = source
            self._asleep.discard("weights")
            if self._calls is not None:
                self._calls.note_committed(source.overlays)
        self._staged = None
        return True

    async def _move_blocks(self, verb: str, keys: NDArray[np.uint64], blocks: list[int]) -> list[float]:
        """How many of these blocks were moved, and the seconds that it took, beside the steps."""
        if self._mover is None:
            raise InvalidParameterError("this worker has no KV tiers")
        move = self._mover.load if verb == "load_blocks" else self._mover.store
        return list(await self._read_aside(partial(move, self._mover.era, keys, blocks)))

    async def _pull_blocks(self, digest: bytes, lease: list[int], first: int, blocks: list[int]) -> list[float]:
        """As `_move_blocks`, from the memory of another replica (`PeerMemory.pull`)."""
        if self._mover is None or self._peers is None:
            raise InvalidParameterError("this worker belongs to no engine with roles")
        copy = partial(self._peers.pull, lease, digest, first, blocks)
        return list(await self._read_aside(partial(self._mover.pull, self._mover.era, copy)))

    def _sleep(self, level: int) -> int:
        """Give memory back; how many bytes this process holds less. Asked again, it gives back what was taken since."""
        if self._mover is not None:
            self._mover.quiesce()
        before, has_weights = self.runner.resident_bytes(), "weights" not in self._asleep
        self._asleep = set(SLEEPING_PARTS)  # what fails half-way is woken as a whole
        if has_weights:
            self.runner.release_weights(self._weights, keeps_pages=level == 1)
        self.runner.release_cache()
        self._staged = None
        return max(0, before - self.runner.resident_bytes())

    async def _wake_up(self, tags: list[str]) -> list[str]:
        """Take memory again. Returns what is asleep after that."""
        if "weights" in tags and "weights" in self._asleep:
            source = self._weights
            staged = await self._read_aside(partial(self.runner.stage_waking, source))
            if "weights" in self._asleep and source is self._weights:  # else an update has come before
                self._take_time(self.runner.commit_weights, staged)
                self._asleep.discard("weights")
        if "kv_cache" in tags and "kv_cache" in self._asleep:
            self._take_time(self.runner.restore_cache)
            self._asleep.discard("kv_cache")
        return sorted(self._asleep)

    def _make_calls(self) -> WorkerCalls:
        from actorllm.model.rank_worker import make_rank_worker

        self._calls = WorkerCalls(make_rank_worker(self.runner))
        return self._calls

    def _start_profile(self, prefix: str) -> bool:
        self.runner.start_profile()
        self._profile_prefix = prefix
        return True

    def _take_time(self, function: Callable[..., Any], *arguments: Any, budget_s: float = NEW_BUDGET_S) -> Any:
        """A control that keeps the loop from turning for longer than anything but a step may."""
        if self.heartbeat is None:
            return function(*arguments)
        self.heartbeat.begin(WITHOUT_NUMBER, budget_s)
        try:
            return function(*arguments)
        finally:
            self.heartbeat.end()
            if self._pipeline is not None:
                self._pipeline.show()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "num_steps": self._num_steps,
            "num_failed_steps": self._num_failed,
            "num_checks": self._num_checks,
            "num_orphaned_steps": self._num_orphaned,
            "busy_s": round(self._busy_s, 6),
            **({} if self._pipeline is None else self._pipeline.statistics()),
            **(self.runner.statistics() if hasattr(self, "runner") else {}),
        }
