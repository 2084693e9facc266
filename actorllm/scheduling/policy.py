"""Which requests run next: the two-level policy interface.

Level 1, `KeyPolicy`: say in which order requests are served, and the engine packs the steps (5 to 40 lines a policy).
Level 2, `PlanPolicy`: decide the whole step. Level 1 runs as the level-2 policy `KeyPlanner`.

A policy sees the scheduler through a `View`. It has columns by slot where access is hot (the decode), and `Sequence` objects
where it is rare (arrival, admission, preemption, end). A policy reads no clock but `view.now`, draws no random numbers of its
own and imports neither torch nor I/O. So the same object runs live, replayed and simulated. The scheduler checks every
decision: what does not fit is left out and counted, never carried out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, NO_I32
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.registry import Registry
from actorllm.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from actorllm.kvcache.manager import KVCacheManager
    from actorllm.scheduling.batch import Batch

SortKey = tuple[Any, ...]


class Budget(NamedTuple):
    """How much of the step a policy wants to use; the limits of the engine hold anyway."""

    tokens: int
    prefill_chunk: int | None = None
    """At most this many tokens of one prompt per step."""


class Admit(enum.Enum):
    """What to do with the request that is next in line."""

    ADMIT = enum.auto()
    WAIT = enum.auto()
    """Not now, and none behind it either."""
    SKIP = enum.auto()
    """Not now; look at the next one. A step looks at every request that is skipped: see SKIP_LINE."""
    SKIP_LINE = enum.auto()
    """Not now, and none behind it in its line (`KeyPolicy.line`) either; look at the next one of the other lines."""


class StepDone(NamedTuple):
    """What a policy learns from a finished step."""

    step: int
    slots: I32
    num_prefill_tokens: int
    launched: float
    started: float
    ended: float
    drafted: I32 = NO_I32
    """Drafts of each row that it checked; empty: none."""
    counts: I32 = NO_I32
    """Tokens that each row gave, those behind the end of a request included; empty: one each."""

    @property
    def num_drafted(self) -> int:
        """Drafts of all rows together, each of which costs about what a decode row does."""
        return int(self.drafted.sum()) if self.drafted.size else 0


@dataclass(slots=True)
class Decision:
    """One step, as a policy wants it. The scheduler works it off in this order."""

    preempt: list[Sequence] = field(default_factory=list)
    """Running requests that give their blocks back and are computed again later."""
    decode: NDArray[np.bool_] | None = None
    """Which of `view.decode_slots` get their token in this step; None: all of them."""
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    """Prompt chunks (request, tokens), of running or of waiting requests; the latter are admitted in this order."""
    wake_at: float = math.inf
    """Ask for another decision at this time even if nothing happens."""
    reject: list[tuple[Sequence, str]] = field(default_factory=list)
    """Waiting requests that end with this reason as `EngineOverloaded`. Only those that have never had a slot."""


class View(Protocol):
    """What a policy may look at. Nothing here is rebuilt per step, and nothing may be changed."""

    now: float
    """Seconds of the scheduler's clock."""
    batch: Batch
    """Columns by slot: num_prompt, num_known, num_computed ..."""
    kv: KVCacheManager
    """The KV cache: num_free, num_blocks by slot, block_size ..."""

    @property
    def limits(self) -> Limits:
        """Those that hold now."""
        ...

    @property
    def decode_slots(self) -> I32:
        """Slots that can get a token now."""
        ...

    @property
    def num_growing(self) -> int:
        """How many of them need a new block for it."""
        ...

    @property
    def prefilling(self) -> Collection[Sequence]:
        """Admitted requests whose prompt is not computed to the end, in order of admission."""
        ...

    @property
    def num_waiting(self) -> int:
        """How many of those that wait may get a slot."""
        ...

    @property
    def is_paused(self) -> bool:
        """Only requests that have had a slot before may get one, until generation is resumed."""
        ...

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting request may get a slot: not while the engine is paused, unless it has had one before.

        After a failed step, not while others are tried alone either.
        """
        ...

    def waiting(self) -> list[Sequence]:
        """Every request that waits for a slot, in order of arrival."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Steps launched whose results are not known yet."""
        ...

    def admission_blocks(self, sequence: Sequence) -> int:
        """Free blocks that a waiting request takes to be admitted: those of all its known tokens.

        Without cached ones that others hold already; cached ones without a holder count as free until the request takes them.
        """
        ...

    def remaining(self, sequence: Sequence) -> int:
        """Known tokens of a request whose KV is neither computed nor being computed nor, if it waits, cached."""
        ...

    def fork_room(self, sequence: Sequence) -> tuple[int, int]:
        """Slots and blocks for the siblings of a request that start when its prompt is computed."""
        ...

    def running(self) -> list[Sequence]:
        """Every request that holds a slot."""
        ...

    @property
    def growing_slots(self) -> I32:
        """Decode slots whose next token needs a new block."""
        ...


class PlanPolicy(Protocol):
    """Level 2: decides whole steps and hears of every event that its order depends on.

    A policy with an attribute `ignores_decode_steps` that is true says that in steps in which none waits or prefills all
    rows decode, and that it need hear nothing of such steps: a simulation may run many of them at once.
    """

    def plan(self, view: View) -> Decision: ...

    def victim(self, view: View) -> Sequence | None:
        """The request that gives its blocks back when the decode does not fit although the decision said so."""
        ...

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        """The request waits (first arrival, unblocked, or back after a preemption)."""

    def on_admit(self, sequence: Sequence, view: View) -> None:
        """The request got a slot."""

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        """The last decision admitted the request and it did not fit: it waits still."""

    def on_end(self, sequence: Sequence, view: View) -> None: ...

    def on_step(self, done: StepDone, view: View) -> None: ...

    # Requests that share the prompt of another (`scheduling.forks`). A class that lacks all three methods gets no forks: each
    # request waits, and is in its decisions. What is inherited here allows them.

    def ahead_of(self, sequence: Sequence, view: View) -> Iterable[Sequence]:
        """The waiting requests that come before this one, in any order: their slots and blocks are left to them."""
        return ()

    def may_fork(self, sequence: Sequence, view: View) -> bool:
        """Whether a request that has never waited gets a slot, because the prompt it shares ends in this step."""
        return True

    def on_fork(self, sequence: Sequence, view: View) -> None:
        """It got one. Otherwise it waits from now on (`on_arrival`)."""


class KeyPolicy:
    """Level 1: an order, and optionally limits. The base class is first come, first served without chunk limit."""

    name = "key"
    ignores_decode_steps: bool | None = None
    """Whether steps in which none waits or prefills need neither ask this policy anything nor tell it anything. None: if
    it overrides none of `decode_mask`, `wake_at` and `on_step`. Simulations run such steps many at a time."""
    strict = False
    """Whether prompts are packed into steps strictly in the order of their keys, as by Sarathi-Serve and by vLLM's default. Off
    (passing packing): short prompts may pass a long one, which keeps half of the tokens of a step (`step_packing.Room`)."""
    keys_grow = False
    """Whether the key of a waiting request never falls. Then it is made anew of a request that seems to be next, and of no
    other; `key_horizon` is not asked for the order."""

    def key(self, sequence: Sequence, view: View) -> SortKey:
        """Lower is sooner, for waiting and for prefilling requests. Ties go to the earlier arrival.

        Also asked of running requests, whose prompt has nothing left, unless `victim_key` is overridden.
        """
        return ()

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        """Until when `key` stays what it is; infinity: for ever."""
        return math.inf

    def group(self, sequence: Sequence, view: View) -> tuple[Hashable, SortKey] | None:
        """The group of a request, and its place there; None: it is in none.

        The waiting requests of a group keep the order of their places, whatever becomes of their keys. Asked once, when a
        request comes to wait. The order of the waiting then costs by the group and not by the request.
        """
        return None

    def line(self, sequence: Sequence, view: View) -> Hashable:
        """The line in which a request waits, for `Admit.SKIP_LINE`; None: the main one.

        Asked whenever a request comes to wait. Lines do not change the order. Every line with a request in it costs
        something in every step, so there should be tens of them at most.
        """
        return None

    def budget(self, view: View) -> Budget:
        return Budget(view.limits.max_tokens, view.limits.prefill_chunk)

    def decode_mask(self, view: View) -> NDArray[np.bool_] | None:
        """Which of `view.decode_slots` run in this step; None: all."""
        return None

    def admit(self, sequence: Sequence, view: View) -> Admit:
        return Admit.ADMIT

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        """The running request with the highest key loses its blocks first."""
        return (*self.key(sequence, view), sequence.arrival_index)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        """Whether a waiting request may displace a running one, when slots, blocks or tokens are out.

        Asked for the request that is next in line. If it is true of no running one, it is asked again in the next step if
        `key_horizon` is finite, and else once another request has been admitted. A displaced one keeps its tokens, waits
        again, and finds what it has computed in the prefix cache while that lasts. Must not be true of a pair both ways
        round, or they take turns.
        """
        return False

    def giving_way(self, sequence: Sequence, view: View) -> list[Sequence]:
        """The running requests of which `preempt_for` is true, in the order of `View.running`.

        Asked in each step of a full engine. A policy overrides it that can tell of many at once.
        """
        return [one for one in view.running() if self.preempt_for(sequence, one, view)]

    def wake_at(self, view: View) -> float:
        return math.inf

    def on_arrival(self, sequence: Sequence, view: View) -> None: ...

    def on_admit(self, sequence: Sequence, view: View) -> None: ...

    def on_held_back(self, sequence: Sequence, view: View) -> None:
        """It is next, and the admission policy does not let it start in this step."""

    def on_preempt(self, sequence: Sequence, view: View) -> None:
        """A preempted request waits again."""

    def on_end(self, sequence: Sequence, view: View) -> None: ...

    def on_step(self, done: StepDone, view: View) -> None: ...


REGISTRY = Registry(
    "scheduling policy",
    {
        "andes": "actorllm.scheduling.policies.andes:Andes",
        "apt-serve": "actorllm.scheduling.policies.apt_serve:AptServe",
        "cohost": "actorllm.scheduling.policies.cohost:Cohost",
        "edf": "actorllm.scheduling.policies.edf:Edf",
        "fairbatch": "actorllm.scheduling.policies.fairbatch:FairBatch",
        "fcfs": "actorllm.scheduling.policies.fcfs:Fcfs",
        "hrrn": "actorllm.scheduling.policies.hrrn:Hrrn",
        "priority": "actorllm.scheduling.policies.priority:Priority",
        "qoserve": "actorllm.scheduling.policies.qoserve:QoServe",
        "sarathi": "actorllm.scheduling.policies.sarathi:Sarathi",
        "slidingserve": "actorllm.scheduling.policies.slidingserve:SlidingServe",
        "srpf": "actorllm.scheduling.policies.srpf:Srpf",
        "uniboost": "actorllm.scheduling.policies.uniboost:UniBoost",
        "vtc": "actorllm.scheduling.policies.vtc:Vtc",
    },
)
POLICIES = REGISTRY.names
"""Policies by name. Any other is named as 'module:Class'."""


def register_policy(name: str, policy: str | type[Any]) -> None:
    """Give a policy a name: 'module:Class', or a class at the top of its module. Raises ConfigError if it is taken.

    A class of the program itself (`__main__`) can only be used where the scheduler runs in this process.
    """
    REGISTRY.register(name, policy)


def policy_path(name: str) -> str:
    """What another process knows a policy by: names that were registered mean nothing there."""
    return REGISTRY.path(name)
