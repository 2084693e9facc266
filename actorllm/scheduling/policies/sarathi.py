"""Sarathi-Serve (Agrawal et al., OSDI 2024): first come, first served, with chunked prefills and strict packing.

The paper: it "creates stall-free schedules that adds new requests in a batch without pausing ongoing decodes." Decode rows
come first, then prompts that have begun, then new ones; no prompt passes another. The chunk is what a step may hold
(`max_num_batched_tokens`, "@512").
"""

from __future__ import annotations

from actorllm.scheduling.policies.fcfs import Fcfs


class Sarathi(Fcfs):
    """The baseline of most papers. `Fcfs` differs from it by its packing alone."""

    name = "sarathi"
    strict = True
