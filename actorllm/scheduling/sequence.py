"""`Sequence`: one request as the scheduler sees it, from arrival to end.

What changes every step lives in columns by slot (`batch.Batch`). A Sequence holds what changes rarely: identity, the submitted
parameters, state, and what has to outlive the slot over a preemption.

    BLOCKED ──unblock──> WAITING ──admit──> RUNNING ──> FINISHED
                            ^                  │
                            └── last step that named it done ── PREEMPTED <── preempt

    FOLLOWING ──leader's prompt ends──> RUNNING, as a fork; or WAITING (see `forks`)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from actorllm.kvcache.prefix_index import BlockRun
from actorllm.messages import I32, Submit, no_i32
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.repetition import RepetitionWatch
from actorllm.types.objective import SLO
from actorllm.types.outputs import FinishReason

Key = tuple[int, int]
"""(frontend, rid): unique among the requests alive."""
RequestKey = tuple[int, int]
"""A request with all its sequences: the key of the first one, which may have ended."""


def request_of(key: Key, submit: Submit) -> RequestKey:
    """The request that a sequence belongs to."""
    return key if submit.fork_of is None else (key[0], submit.fork_of)


NO_SECONDS = (0.0, 0.0, 0.0)


class State(enum.Enum):
    BLOCKED = "blocked"
    FOLLOWING = "following"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


WAITING, RUNNING, FINISHED = State.WAITING, State.RUNNING, State.FINISHED
"""Where each request passes. Python finds a member of an enum by a search for its name, at each use."""


class CountsRequests(Protocol):
    """A part of the scheduler that keeps count of what some requests ask for."""

    def discard(self, sequence: Sequence) -> None:
        """A request that it counts has ended."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its state. Policies read it; only the scheduler writes it (except `policy_state`).

    What the caller said of it: `priority`, `slo`, `is_latency_sensitive`, `tenant`, `type_info`, `arrival`, and everything else in
    `submit`, as it travelled.
    """

    key: Key
    submit: Submit
    """The request as it travelled."""
    arrival_index: int
    """Position in the order of arrival: the final tie-break of every policy, which makes runs repeatable."""
    known: I32
    """Token ids known when it was last admitted or preempted: prompt, emitted prefix, and what was sampled since."""
    limit: int
    """Total tokens (prompt and output) at which it ends with reason 'length'."""
    stop_ids: frozenset[int]
    """Ids that end it, the model's end-of-text ids included unless ignored."""
    silent_ids: frozenset[int]
    """Those of them that are no stop_reason: the primary end of text."""
    state: State = State.WAITING
    """Where it stands: see the module docstring."""
    finish_reason: FinishReason | None = None
    """Once it has ended."""
    slot: int = -1
    """Its place in the columns of `View.batch`; -1: it has none."""
    queued: float = 0.0
    """When the scheduler heard of it."""
    scheduled: float | None = None
    """When the first step that it was in was planned."""
    first_token: float | None = None
    """When it came, be it from a scheduler before this one (`Submit.first_token`)."""
    last_token: float | None = None
    """When its last token came, once it has ended."""
    num_preemptions: int = 0
    """How often it has given its blocks back."""
    num_cached_tokens: int = 0
    """Known tokens that were found in the prefix cache when it was first admitted. Of a fork: those its leader found."""
    num_wasted_tokens: int = 0
    num_draft_tokens: int = 0
    """Drafts of it that were checked, before it last left a slot."""
    num_accepted_tokens: int = 0
    """Those of them that were right."""
    accepted_per_position: tuple[int, ...] = ()
    """The same for each position behind its last token; empty: it has left no slot of an engine with drafts."""
    num_recoveries: int = 0
    """How often the workers died with a step of it in flight."""
    interrupted: float = 0.0
    """When they did so last."""
    recovery_s: float = 0.0
    """What it waited in all for the next token after that."""
    seconds: tuple[float, float, float] = NO_SECONDS
    """Planning, forward and execution of the steps that it was in, as far as it has left its slot: see `telemetry.step_seconds`."""
    seconds_before: tuple[float, float, float] | None = None
    """The sums over all steps before its first one."""
    hashes: bytes = b""
    """Of its first full blocks, as many as are hashed."""
    first_hash: bytes = b""
    """The first of these."""
    hits: I32 = field(default_factory=no_i32)
    """While it waits: the cached blocks that it would begin with. While it runs: those that it began with."""
    num_remaining: int = 0
    """While it waits: its known tokens without the hits."""
    num_needed_blocks: int = 0
    """While it waits: how many blocks its admission takes, the hits among them."""
    looked_up: int = -1
    """The version of the prefix index that these three are of."""
    num_done: int = 0
    """Of the tokens it was admitted with: those whose KV was there, or is reported as computed."""
    num_published: int = 0
    """Its first blocks that are in the prefix index, or were found there."""
    run: BlockRun | None = None
    """The last run in the prefix index of the blocks that it published."""
    can_publish: bool = False
    """Its blocks may be found by others: they are hashed, and were not computed before a reset."""
    rules: SamplingRules | None = None
    watch: RepetitionWatch | None = None
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities were given out; they are not computed again."""
    last_step: int = 0
    """After preemption: the last step in flight that names it; it is not admitted again before that one is done."""
    num_failures: int = 0
    """Steps that failed with it among others, since its last token."""
    num_nonfinite: int = 0
    """Values of its states or logits that were NaN or infinite."""
    counted_by: Iterable[CountsRequests] = ()
    """Those of the scheduler's parts that are told of its end: most requests have nothing that they count."""
    adapter_slot: int = 0
    """Where the workers hold its adapter, once it has been let in (`residency`); 0: it has none."""
    policy_state: dict[str, object] = field(default_factory=dict)
    """A policy's own notes on it."""
    attachment: Any = None
    """Whatever the caller of the scheduler keeps with the request (its text); the scheduler never looks at it."""
    grammar: Any = None
    """The same, of a request whose output must match one: where it stands in it."""
    _slo: SLO | None = field(default=None, init=False, repr=False)
    """Once it was asked for."""

    @property
    def request(self) -> RequestKey:
        """The request that it is a sequence of."""
        return request_of(self.key, self.submit)

    @property
    def slo(self) -> SLO | None:
        """What the request was promised; None: nothing."""
        if self._slo is None and self.submit.slo is not None:
            self._slo = SLO.from_fields(self.submit.slo)
        return self._slo

    @property
    def priority(self) -> int:
        """Lower is sooner; 0 unless the caller said something else."""
        return self.submit.priority

    @property
    def tenant(self) -> str | None:
        """The party that the request is served for; None: no particular one."""
        return self.submit.tenant

    @property
    def is_latency_sensitive(self) -> bool:
        """The caller said that every pause of it counts."""
        return self.submit.is_latency_sensitive

    @property
    def type_info(self) -> str | None:
        """Its kind, as the caller calls it; None: none."""
        return self.submit.type_info

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return self.submit.prompt.size

    @property
    def is_whole(self) -> bool:
        """Whether all its known tokens must go through in one step: a prompt that refuses chunking, at first."""
        return not self.submit.is_chunkable and self.known.size == self.submit.prompt.size

    @property
    def has_started(self) -> bool:
        """Whether it has had a slot, perhaps of a scheduler that is gone."""
        return self.num_preemptions > 0 or self.submit.has_started or self.slot >= 0

    @property
    def has_token_since_submitted(self) -> bool:
        """Whether it had a token of this scheduler. Asked while it does not run."""
        return self.known.size > self.submit.prompt.size + self.submit.output.size

    @property
    def may_read_cache(self) -> bool:
        """Whether it may begin with what others have computed. Of cached tokens there are no logits."""
        submit = self.submit
        if submit.skip_reading_prefix_cache or (not submit.is_chunkable and self.is_whole):
            return False
        return self.rules is None or not self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        rules = self.rules
        return rules is not None and rules.num_prompt_logprobs >= 0 and self.num_prompt_logprobs < self.num_prompt - 1

    @property
    def is_taken(self) -> bool:
        """Whether nothing refuses it any more: it had a slot, or a scheduler had it that died. That it had a slot there is
        known only of a request that had a token."""
        return self.scheduled is not None or self.submit.is_resumed or self.submit.output.size > 0

    @property
    def arrival(self) -> float:
        """When it came, in seconds of the clock of `View.now`."""
        return self.submit.arrival
