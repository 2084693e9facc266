"""First come, first served, with chunked prefill mixed into the decode (Sarathi-Serve, OSDI 2024)."""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy


class Fcfs(KeyPolicy):
    """Every key is equal, so the order of arrival decides; the latest arrival is preempted first."""

    name = "fcfs"
