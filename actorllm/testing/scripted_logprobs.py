"""Log-probabilities of scripted tokens. The script says them of its tokens; every other token is next to impossible.

Called by the scripted worker, for the requests that ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from actorllm.messages import StepPlan
from actorllm.messages.logit_rules import SamplingRules, decode_rules
from actorllm.messages.logprobs import LogprobSpan

OTHERS = -100.0
"""Of every token that the script does not choose."""


def rules_by_slot(plan: StepPlan) -> dict[int, tuple[int, SamplingRules]]:
    """Of the new slots that ask: the first position of the prompt that is asked for, and what is asked."""
    if not plan.new_rules.size:
        return {}
    return {slot: (first, rules) for slot, first, rules in decode_rules(plan.new_rules, plan.new_rule_numbers)}


def span_of(
    row: int, tokens: Sequence[int], values: Sequence[float], num_top: int, ids: Sequence[int] = (), position: int = 0
) -> LogprobSpan:
    """Each token with its log-probability, and the num_top most likely tokens, or these ids."""
    all_ids, all_values = [], []
    for token, value in zip(tokens, values, strict=True):
        told = ids or [token, *_others(token, num_top - 1)][:num_top]
        all_ids.append([token, *told])
        all_values.append([value, *(value if one == token else OTHERS for one in told)])
    return LogprobSpan(
        row, position, np.array(all_ids, np.int32), np.array(all_values, np.float32), np.ones(len(all_ids), np.int32)
    )


def _others(token: int, count: int) -> Iterator[int]:
    return (one for one in range(count + 1) if one != token)
