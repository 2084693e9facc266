"""`check_policy`: what every hook of a policy answers, tried on made-up requests, without an engine.

A stage is a scheduler that works off made-up requests first come, first served. The requests come with and without objectives,
tenants and priorities. They wait, prefill, run, are preempted, forked and aborted. The policy under check hears of all that
happens there. In every step it is asked whatever a scheduler might ask; none of its answers is carried out. Then another
scheduler works off the same requests under a fresh object of the policy. Pure, and for `actorllm policy check`; no engine calls
it.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from actorllm.errors import ConfigError
from actorllm.messages import StepResult, Submit, sequences_of
from actorllm.scheduling.admission_policy import (
    ADMISSIONS,
    AdmissionGate,
    AdmissionPolicy,
    _check_mask,
    _check_rejected,
)
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import REGISTRY, Admit, Budget, Decision, KeyPolicy, PlanPolicy, StepDone, View
from actorllm.scheduling.policy_fallback import _problem
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.types.options import texts_below_fields

SEQUENCE_ATTRIBUTES = (
    *(
        "slo",
        "priority",
        "tenant",
        "is_latency_sensitive",
        "type_info",
        "arrival",
        "arrival_index",
        "num_prompt",
        "known",
    ),
    *("limit", "state", "slot", "queued", "scheduled", "first_token", "last_token", "num_preemptions"),
    *("num_cached_tokens", "has_started", "submit", "policy_state"),
)
"""What a policy may read of a request; it may write in `policy_state`."""

STEP_S = 0.01
"""How long a step of the check takes."""
MAX_STEPS = 500
"""In which all requests of the check end under any policy that serves them."""
PREEMPTED_AT, ABORTED_AT = (6, 12), 4
"""Steps of the stage at which a running request is preempted, and a waiting one aborted."""

RUN = "a run"
"""What the second part of the check is called among the hooks."""


@dataclass(slots=True)
class Hook:
    """What came of one hook."""

    name: str
    is_overridden: bool = True
    num_calls: int = 0
    unit: str = "calls"
    failure: str | None = None

    @property
    def told(self) -> str:
        if self.failure is not None:
            return self.failure
        if not self.is_overridden:
            return "not overridden"
        return f"ok, {self.num_calls} {self.unit}" if self.num_calls else "not called"


@dataclass(frozen=True, slots=True)
class Check:
    """What came of a policy."""

    kind: str
    """KeyPolicy, PlanPolicy or AdmissionPolicy."""
    hooks: tuple[Hook, ...]

    @property
    def num_failures(self) -> int:
        return sum(hook.failure is not None for hook in self.hooks)


def check_policy(name: str) -> Check:
    """Of a policy or an admission policy by name, or as 'module:Class'. Raises ConfigError if it cannot be built."""
    build = ADMISSIONS.build if name in ADMISSIONS.names else REGISTRY.build
    subject = build(name)
    prober: Prober
    if isinstance(subject, KeyPolicy):
        prober = KeyProber(subject, KeyPolicy)
    elif isinstance(subject, AdmissionPolicy):
        prober = AdmissionProber(subject, AdmissionPolicy)
    elif callable(getattr(subject, "plan", None)):
        prober = PlanProber(subject, PlanPolicy)
    else:
        raise ConfigError(f"{name!r} is no KeyPolicy, no PlanPolicy and no AdmissionPolicy")
    work_off(prober)
    return Check(prober.base.__name__, (*prober.hooks.values(), _run(build(name), prober.kind)))


def _run(subject: Any, kind: type[Any]) -> Hook:
    """Requests under the policy itself."""
    hook = Hook(RUN, unit="steps")
    try:
        policy: PlanPolicy = subject
        if isinstance(subject, KeyPolicy):
            policy = KeyPlanner(subject)
        elif isinstance(subject, AdmissionPolicy):
            policy = AdmissionGate(load_policy("fcfs"), subject)
        scheduler = work_off(policy)
        hook.num_calls = scheduler.ledger.next_step - 1
        refused = scheduler.statistics().num_refused_decisions
        if refused:
            hook.failure = f"{refused} of its decisions could not be carried out"
    except CheckStalledError as error:
        hook.failure = str(error)
    except Exception as error:  # of a policy of the user's own: anything
        hook.failure = told(error, kind)
    return hook


# The made-up requests


def submits() -> list[tuple[int, Submit]]:
    """(the step before which it comes, a request)."""
    slos: list[list[float | None] | None] = [
        None,
        [0.2, 0.05, None, 0.0],
        [None, None, 1.0, 0.0],
        [None, 0.02, None, 0.0],
        [0.001, 0.001, 0.01, 0.001],
    ]
    found: list[tuple[int, Submit]] = []
    for rid in range(1, 15):
        size = (3, 9, 40, 17)[rid % 4]
        prompt = (np.arange(size) * (rid + 1) % 90).astype(np.int32)
        said: dict[str, Any] = {
            "slo": slos[rid % len(slos)],
            "tenant": (None, "a", "b")[rid % 3],
            "priority": (0, -2, 5)[rid % 3],
            "is_latency_sensitive": rid % 2 == 0,
            "type_info": (None, "chat")[rid % 2],
        }
        if rid == 3:
            said["siblings"] = np.array([103, 104], np.int32)
        step = 0 if rid <= 8 else rid
        submit = Submit(rid=rid, arrival=step * STEP_S, prompt=prompt, max_tokens=4 + rid, seed=rid, **said)
        found += [(step, one) for one in sequences_of(submit)]
    return found


class CheckStalledError(RuntimeError):
    """The policy keeps requests waiting for nothing."""


def work_off(policy: PlanPolicy) -> Scheduler:
    """A scheduler in which all the requests have ended under a policy. Raises what the policy raises."""
    scheduler = Scheduler(
        num_blocks=40,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        vocab_size=97,
        eos_token_ids=(96,),
        policy=policy,
        depth=1,
        enable_prefix_caching=False,
    )
    coming, now = submits(), 0.0
    for step in range(MAX_STEPS):
        while coming and coming[0][0] <= step:
            scheduler.submit(0, coming.pop(0)[1], now)
        if step == ABORTED_AT:
            scheduler.abort([sequence.key for sequence in scheduler.waiting()[-1:]], now)
        plan = scheduler.schedule(now)
        scheduler.take_rejected()
        if plan is not None:
            (record,) = scheduler.ledger
            tokens = np.full(len(record.rows), 1 + step % 90, np.int32)
            scheduler.update(StepResult(step=plan.step, tokens=tokens, started=now, ended=now + STEP_S), now + STEP_S)
        elif not coming and scheduler.is_idle:
            return scheduler
        elif not coming and scheduler.wake_at == math.inf:
            num = len(scheduler.running()) + scheduler.num_waiting
            raise CheckStalledError(f"it plans nothing for {num} requests that could run, and does not ask to be woken")
        now += STEP_S
    num = len(scheduler.running()) + scheduler.num_waiting
    raise CheckStalledError(f"{num} requests have not ended after {MAX_STEPS} steps")


# The hooks


def told(error: BaseException, kind: type[Any]) -> str:
    """An exception with the line of the policy's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # a class that was made without a file
        file = None
    own = [frame for frame in frames if frame.filename == file] or frames[-1:]
    where = "".join(f" ({frame.filename}, line {frame.lineno}: {frame.line})" for frame in own[-1:])
    return f"{type(error).__name__}: {error}{where}"


class Prober:
    """A PlanPolicy that serves first come, first served, and asks the policy under check what it would say.

    subject: the policy. base: its interface, whose public functions are the hooks.
    """

    def __init__(self, subject: Any, base: type[Any]) -> None:
        self.base = base
        self.kind = type(subject)
        self._subject = subject
        self._stage = load_policy("fcfs")
        names = [name for name, found in vars(base).items() if inspect.isfunction(found) and name[0] != "_"]
        self.hooks = {name: Hook(name, self._is_overridden(name)) for name in names}
        self._num_plans = 0

    def _is_overridden(self, name: str) -> bool:
        found = getattr(self.kind, name, None)
        return found is not None and found is not getattr(self.base, name)

    def ask(self, name: str, check: Callable[[Any], str | None] | None, *arguments: Any) -> Any:
        """What a hook answers; None when it failed, now or before. check: says why an answer is none."""
        hook = self.hooks[name]
        if hook.failure is not None or not hasattr(self._subject, name):
            return None
        hook.num_calls += 1
        try:
            answer = getattr(self._subject, name)(*arguments)
            problem = None if check is None else check(answer)
        except Exception as error:  # of a policy of the user's own: anything
            hook.failure = told(error, self.kind)
            return None
        if problem is not None:
            hook.failure = f"it returned {answer!r:.80}, {problem}"
            return None
        return answer

    def fail(self, name: str, failure: str) -> None:
        if self.hooks[name].failure is None:
            self.hooks[name].failure = failure

    def ask_all(self, view: View) -> None:
        """Everything that may be asked while a step is planned."""
        raise NotImplementedError

    # What the scheduler of the stage asks

    def plan(self, view: View) -> Decision:
        self._num_plans += 1
        self.ask_all(view)
        decision = self._stage.plan(view)
        if self._num_plans in PREEMPTED_AT and not decision.preempt:
            going_on = [s for s in view.running() if not any(s is other for other, _ in decision.prefill)]
            decision.preempt = going_on[-1:]
        return decision

    def victim(self, view: View) -> Sequence | None:
        return self._stage.victim(view)

    def ahead_of(self, sequence: Sequence, view: View) -> Iterable[Sequence]:
        return self._stage.ahead_of(sequence, view)

    def may_fork(self, sequence: Sequence, view: View) -> bool:
        return self._stage.may_fork(sequence, view)

    def on_fork(self, sequence: Sequence, view: View) -> None:
        self._stage.on_fork(sequence, view)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self.ask("on_arrival", None, sequence, view)
        self._stage.on_arrival(sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self.ask("on_admit", None, sequence, view)
        self._stage.on_admit(sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self._stage.on_refusal(sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self.ask("on_end", None, sequence, view)
        self._stage.on_end(sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        self.ask("on_step", None, done, view)
        self._stage.on_step(done, view)


class KeyProber(Prober):
    """For the first level."""

    def ask_all(self, view: View) -> None:
        waiting, running = list(view.waiting()), list(view.running())
        self.ask("decode_mask", lambda mask: _none_if(_check_mask, mask, view), view)
        self.ask("wake_at", _not_a_time, view)
        self.ask("budget", _no_budget, view)
        prefilling = list(view.prefilling)
        self._order("key", [*waiting, *prefilling], view)
        self._order("victim_key", running, view)
        for sequence in (*waiting, *prefilling):
            self.ask("key_horizon", _not_a_time, sequence, view)
        for sequence in waiting:
            self.ask("admit", _no_verdict, sequence, view)
            expected = []
            for victim in running:
                gives_way = self.ask("preempt_for", _not_a_bool, sequence, victim, view)
                if gives_way:
                    expected.append(victim)
                if gives_way and self._would_give_way(victim, sequence, view):
                    self.fail("preempt_for", "it is true of two requests both ways round: they would take turns")
            found = self.ask("giving_way", _no_requests, sequence, view)
            if found is not None and self.hooks["preempt_for"].failure is None and found != expected:
                self.fail("giving_way", "it names others than those of which preempt_for is true, or in another order")
        for sequence in waiting[:1]:
            self.ask("on_held_back", None, sequence, view)

    def _would_give_way(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        """Were the running one to wait and the waiting one to run."""
        try:
            return bool(self._subject.preempt_for(sequence, victim, view))
        except Exception:  # it is never asked so: it may look at what only a waiting request has
            return False

    def _order(self, name: str, sequences: Collection[Sequence], view: View) -> None:
        keys = [self.ask(name, _no_key, sequence, view) for sequence in sequences]
        try:
            sorted(key for key in keys if key is not None)
        except Exception as error:  # keys hold whatever the policy puts there
            self.fail(name, f"its keys cannot be compared: {type(error).__name__}: {error}")

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        """In the order of `KeyPlanner`, in which a request is asked for its place before it has arrived."""
        self.ask("key", _no_key, sequence, view)
        self.ask("line", _not_hashable, sequence, view)
        self.ask("group", _no_place, sequence, view)
        self.ask("on_preempt" if sequence.num_preemptions else "on_arrival", None, sequence, view)
        self._stage.on_arrival(sequence, view)

    def on_fork(self, sequence: Sequence, view: View) -> None:
        self.ask("on_arrival", None, sequence, view)
        self.ask("on_admit", None, sequence, view)
        self._stage.on_fork(sequence, view)


class PlanProber(Prober):
    """For the second level: of its decisions, admissions are refused and the rest is not carried out."""

    def _is_overridden(self, name: str) -> bool:
        return hasattr(self._subject, name)

    def ask_all(self, view: View) -> None:
        decision = self.ask("plan", _problem, view)
        if decision is not None:
            for sequence, _ in decision.prefill:
                if sequence.state is State.WAITING:
                    self.ask("on_refusal", None, sequence, view)
        self.ask("victim", _no_victim, view)
        for sequence in view.waiting():
            others = self.ask("ahead_of", None, sequence, view)
            try:
                wrong = [other for other in others or () if not isinstance(other, Sequence)]
            except Exception as error:  # it may be a generator of the policy's own
                self.fail("ahead_of", told(error, self.kind))
                continue
            if wrong:
                self.fail("ahead_of", f"it gives {wrong[0]!r:.80}, which is no request")

    def may_fork(self, sequence: Sequence, view: View) -> bool:
        self.ask("may_fork", _not_a_bool, sequence, view)
        return super().may_fork(sequence, view)

    def on_fork(self, sequence: Sequence, view: View) -> None:
        self.ask("on_fork", None, sequence, view)
        self._stage.on_fork(sequence, view)


class AdmissionProber(Prober):
    """For admission policies."""

    def ask_all(self, view: View) -> None:
        waiting, running = list(view.waiting()), list(view.running())
        if waiting:
            self.ask("reject", lambda rejected: _none_if(_check_rejected, rejected, view), view)
        self.ask("decode_mask", lambda mask: _none_if(_check_mask, mask, view), view)
        for sequence in waiting:
            for joining, leaving in (([], []), (waiting[:1], running[:1])):
                others = [other for other in joining if other is not sequence]
                self.ask("admit", _no_verdict, sequence, others, leaving, view)

    def on_fork(self, sequence: Sequence, view: View) -> None:
        self.ask("on_admit", None, sequence, view)
        self._stage.on_fork(sequence, view)


# What is wrong with an answer; None: nothing


def _none_if(check: Callable[[Any, View], Any], answer: Any, view: View) -> str | None:
    try:
        check(answer, view)
    except (TypeError, ValueError) as error:
        return f"which cannot be used: {error}"
    return None


def _no_key(answer: Any) -> str | None:
    return None if isinstance(answer, tuple) else "and a key is a tuple"


def _no_place(answer: Any) -> str | None:
    if answer is None or (
        isinstance(answer, tuple)
        and len(answer) == 2
        and isinstance(answer[0], Hashable)
        and isinstance(answer[1], tuple)
    ):
        return None
    return "and a group is None, or what the group is called and a tuple"


def _not_hashable(answer: Any) -> str | None:
    return None if isinstance(answer, Hashable) else "and a line is named by what can be a key of a dictionary"


def _not_a_time(answer: Any) -> str | None:
    is_time = isinstance(answer, Real) and not isinstance(answer, bool) and not math.isnan(answer)
    return None if is_time else "which is no time in seconds"


def _not_a_bool(answer: Any) -> str | None:
    return None if isinstance(answer, bool | np.bool_) else "which is neither True nor False"


def _no_budget(answer: Any) -> str | None:
    if not isinstance(answer, Budget):
        return "which is no Budget"
    sizes = (answer.tokens, answer.prefill_chunk)
    is_whole = all(isinstance(size, Integral) or size is None for size in sizes) and answer.tokens is not None
    return None if is_whole else "whose numbers of tokens are no integers"


def _no_verdict(answer: Any) -> str | None:
    choices = ", ".join(f"Admit.{verdict.name}" for verdict in Admit)
    return None if isinstance(answer, Admit) else f"and a verdict is one of {choices}"


def _no_requests(answer: Any) -> str | None:
    is_list = isinstance(answer, list) and all(isinstance(one, Sequence) for one in answer)
    return None if is_list else "which is no list of requests"


def _no_victim(answer: Any) -> str | None:
    return None if answer is None or isinstance(answer, Sequence) else "which is no request"


# What a policy may read


def readable() -> dict[str, list[tuple[str, str]]]:
    """By class, the attributes that a policy may read, each with what it is."""
    of_view = [name for name in (*View.__annotations__, *vars(View)) if name[0] != "_"]
    return {
        "Sequence": [(name, _text_of(Sequence, name)) for name in SEQUENCE_ATTRIBUTES],
        "View": [(name, _text_of(View, name)) for name in dict.fromkeys(of_view)],
    }


def _text_of(cls: Any, name: str) -> str:
    found = vars(cls).get(name)
    doc = inspect.getdoc(found.fget if isinstance(found, property) else found) if _is_documented(found) else None
    text = doc if doc is not None else texts_below_fields(cls).get(name, "")
    return text.split("\n\n")[0].replace("\n", " ")


def _is_documented(found: Any) -> bool:
    return isinstance(found, property) or inspect.isfunction(found)
