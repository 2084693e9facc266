"""A client that writes another tenant into every request, under vtc: the others keep their share, and what is kept is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.scheduling.policies.vtc import Vtc
from tests.hostile.bystander import bystander


def fake(tenant: str, slot: int) -> Any:
    return SimpleNamespace(tenant=tenant, policy_state={}, slot=slot, num_preemptions=0, num_prompt=5, num_remaining=5)


def test_a_hundred_thousand_tenants_leave_no_trace() -> None:
    """Two that are active all the time are served alike before and after."""
    policy, view = Vtc(), SimpleNamespace(limits=SimpleNamespace(max_seqs=4), now=0.0)
    a, b = fake("a", 0), fake("b", 1)
    for steady in (a, b):
        policy.on_arrival(steady, view)
    most = 0
    for number in range(100_000):
        sequence = fake(f"tenant {number}", 2 + number % 2)
        policy.on_arrival(sequence, view)
        assert policy.key(sequence, view) == min(policy.key(a, view), policy.key(b, view)), "it has no more than others"
        policy.on_admit(sequence, view)
        policy.on_end(sequence, view)
        most = max(most, policy.num_tenants)
        if number % 1000 == 0:
            policy.on_admit((a, b)[number // 1000 % 2], view)
    assert most <= policy.max_idle + 2 + 4 + 1
    assert policy._served.size <= 2 * most
    assert len(policy._active) <= most
    assert policy.key(a, view) == policy.key(b, view) == (250.0,)


async def test_a_flood_of_tenants_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vtc, "max_idle", 16)
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, scheduling_policy="vtc", max_num_seqs=4) as llm,
        bystander(llm, max_tokens=60) as steady,
    ):

        async def send(number: int) -> None:
            await llm.complete("x", SamplingParams(max_tokens=1, ignore_eos=True), tenant=f"tenant {number}")

        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(send, number)
            await steady.wait(1)
            assert await steady.tokens_until_first() < 60, "it came last, and its tenant had least"
