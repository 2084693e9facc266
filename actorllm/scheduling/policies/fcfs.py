"""First come, first served, with chunked prefill mixed into the decode.

The mixture is that of Sarathi-Serve (OSDI 2024), the packing is not: here short prompts may pass a long one within a step. With
`strict = True` none does, as in Sarathi-Serve and in vLLM by default.
"""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy


class Fcfs(KeyPolicy):
    """Every key is equal, so the order of arrival decides; the latest arrival is preempted first."""

    name = "fcfs"
