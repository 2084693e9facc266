"""Greedy streams are the choices of transformers, as far as its logits tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actorllm import LLM, SamplingParams
from tests.model.hf.decoders import reference

MARGIN = 1e-4
"""Of logits: a choice that is nearer to the best one may be either."""


def check_choices(module: Any, prompts: list[Any], streams: list[list[int]]) -> None:
    """Each token of these greedy streams is what the module of transformers chooses after those before it."""
    for one, stream in zip(prompts, streams, strict=True):
        logits = reference(module, one["prompt_token_ids"] + stream)[-len(stream) - 1 : -1]
        chosen = logits.gather(1, logits.new_tensor([stream]).long().T)[:, 0]
        assert (chosen > logits.amax(1) - MARGIN).all()


def streams_alone(
    folder: Path,
    module: Any,
    prompts: list[Any],
    params: Sequence[SamplingParams],
    options: dict[str, Any],
    *,
    is_fresh: bool = False,
) -> list[list[int]]:
    """The streams of requests that are computed one by one and in one piece; the greedy ones are the module's choices.

    options: of the engine. is_fresh: each request has an engine of its own, which another one has left nothing in.
    """
    alone = options | {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False}
    size = 1 if is_fresh else len(prompts)
    streams: list[list[int]] = []
    for start in range(0, len(prompts), size):
        with LLM(str(folder), **alone) as llm:
            outputs = llm.generate(prompts[start : start + size], params[start : start + size], use_tqdm=False)
        streams += [list(output.outputs[0].token_ids) for output in outputs]
    greedy = [number for number, one in enumerate(params) if one.temperature == 0]
    assert greedy
    check_choices(module, [prompts[number] for number in greedy], [streams[number] for number in greedy])
    return streams
