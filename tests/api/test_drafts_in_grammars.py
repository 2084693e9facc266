"""Drafts within grammars change no token, and what a grammar forces is drafted and not sampled (float32)."""

from __future__ import annotations

from typing import Any

import pytest

from actorllm import LLM, LLMEngine, SamplingParams
from actorllm.errors import RequestFailedError
from actorllm.model.cpu import runner
from actorllm.model.sampler import Sampler
from actorllm.types.structured_outputs import StructuredOutputsParams

ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_model_len": 320, "num_threads": 1}
CONST = "a long text that is the same in every answer"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "greenish"]},
        "text": {"const": CONST},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 1}, "maxItems": 6},
    },
    "required": ["name", "colour", "text", "sizes"],
    "additionalProperties": False,
}
REPEATED = StructuredOutputsParams(regex="(ab){30}")
OPTIONAL = StructuredOutputsParams(regex="(ab){3,9}c?")
KINDS: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "temperature": 1.0},
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "temperature": 0.0, "logprobs": 2},
    {"structured_outputs": REPEATED, "temperature": 0.0},
    {"structured_outputs": OPTIONAL, "temperature": 0.7, "ignore_eos": True},
    {"structured_outputs": OPTIONAL, "temperature": 1.0, "repetition_penalty": 1.3, "min_tokens": 12},
    {"structured_outputs": StructuredOutputsParams(choice=[CONST, CONST[:20] + "r"]), "n": 2, "temperature": 1.0},
    {"structured_outputs": REPEATED, "allowed_token_ids": list(range(4000)), "temperature": 0.0},
    {"structured_outputs": OPTIONAL, "bad_words": ["c"], "temperature": 0.0},
    {"structured_outputs": REPEATED, "stop": ["abab"], "temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
]
PROMPTS = ["One, two, one, two, one", "The fox and the hen. The fox and the"]


def params() -> list[SamplingParams]:
    return [SamplingParams(**({"max_tokens": 90, "seed": i} | kind)) for i, kind in enumerate(KINDS)]


def told(outputs: list[Any]) -> list[Any]:
    return [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, [list(p) for p in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]


def run(prompts: list[str], wanted: list[SamplingParams], **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    with LLM("storyteller", **(ARGUMENTS | arguments)) as llm:
        outputs = [llm.generate([prompt] * len(wanted), wanted, use_tqdm=False) for prompt in prompts]
        return [told(output) for output in outputs], llm.stats()["scheduler"]["scheduler"]


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    streams, _ = run(PROMPTS, params(), topology="inline")
    assert CONST in streams[0][0][1]
    assert {end[3] for end in streams[0]} == {"stop", "length"}
    return streams


@pytest.mark.parametrize(
    ("most", "arguments"),
    [
        (1, {"topology": "inline", "async_scheduling": False}),
        (3, {"topology": "inline", "max_num_seqs": 3}),
        (7, {"topology": "process"}),
        (7, {"topology": "inline", "kv_cache_memory_bytes": 4 * 2 * 2 * 64 * 4 * 400}),
    ],
    ids=["depth 1", "few rows", "process", "preempted"],
)
def test_streams_with_grammars_are_those_without_drafts(
    reference: list[Any], most: int, arguments: dict[str, Any]
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 100, most]]
    streams, statistics = run(PROMPTS, params(), speculative_config=drafts, **arguments)
    assert streams == reference
    assert statistics["speculation"]["num_accepted_tokens"] > 200
    assert (statistics["num_preemptions"] > 0) == ("kv_cache_memory_bytes" in arguments)


def test_what_a_grammar_forces_is_drafted_and_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the grammar: an n-gram drafter has nothing to copy here."""
    num_sampled = 0
    sample = Sampler.sample

    def counting(self: Any, logits: Any, columns: Any) -> Any:
        nonlocal num_sampled
        num_sampled += 1
        return sample(self, logits, columns)

    monkeypatch.setattr(Sampler, "sample", counting)

    def one(**arguments: Any) -> tuple[list[Any], dict[str, Any], int]:
        wanted = SamplingParams(max_tokens=90, temperature=1.0, seed=3, structured_outputs={"choice": [CONST]})
        with LLM("storyteller", topology="inline", **(ARGUMENTS | arguments)) as llm:
            at_start = num_sampled  # what drafts cost is measured there
            streams = told(llm.generate(PROMPTS[:1], wanted, use_tqdm=False))
            return streams, llm.stats()["scheduler"]["scheduler"], num_sampled - at_start

    plain, without, most_sampled = one()
    streams, statistics, sampled = one(
        speculative_config={"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5}
    )
    assert streams == plain
    assert streams[0][1] == CONST
    assert statistics["num_steps"] < 0.5 * without["num_steps"]
    speculation = statistics["speculation"]
    unchecked = speculation["num_draft_tokens"] - speculation["num_accepted_tokens"]
    assert unchecked <= speculation["num_drafts"], "what is forced is never wrong; the last waits for its mask"
    assert speculation["num_accepted_tokens"] >= 6
    # A first step may be computed before its grammar says that all is forced; its one row is sampled then.
    assert max(sampled, most_sampled) <= 1


def test_a_mask_of_another_position_is_found(reference: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    behind = runner.masks_behind
    monkeypatch.setattr(runner, "masks_behind", lambda late, number, size: behind(late, max(0, number - 1), size))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    try:
        streams, _ = run(PROMPTS[:1], params()[:5], topology="inline", speculative_config=drafts)
    except RequestFailedError as error:
        found = "is not in the grammar" in str(error)
    else:
        found = streams[0] != reference[0][:5]
    assert found


def test_an_engine_that_is_stepped_has_its_masks_in_time(reference: list[Any]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = LLMEngine("storyteller", topology="inline", speculative_config=drafts, **ARGUMENTS)
    for i, wanted in enumerate(params()[:3]):
        engine.add_request(str(i), PROMPTS[0], wanted)
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert told([ended[str(i)] for i in range(3)]) == reference[0][:3]
    engine.shutdown()
