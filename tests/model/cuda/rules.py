"""Columns of a plan for sampling rules."""

from __future__ import annotations

from typing import Any

from actorllm.messages.logit_rules import SamplingRules, encode_rules


def rules_of(slot: int, first: int = 0, **rules: Any) -> dict[str, Any]:
    """The fields of a plan with rules for one new slot."""
    integers, numbers = encode_rules([(slot, first, SamplingRules(**rules))])
    return {"new_rules": integers, "new_rule_numbers": numbers}
