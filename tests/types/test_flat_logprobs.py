"""`FlatLogprobs` reads as the lists that it stands for; and log-probabilities of ids that a request names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.errors import InvalidParameterError
from actorllm.messages.logprobs import FlatLogprobs, Logprob

POSITIONS: list[dict[int, Logprob] | None] = [
    None,
    {7: Logprob(-1.0, 2, "a"), 3: Logprob(-0.5, 1, "b")},
    {9: Logprob(-2.0, 1, None)},
    {4: Logprob(-0.1, 1, "c"), 8: Logprob(-3.0, 2, "d"), 9: Logprob(-4.0, 3, "e")},
]
READ = [{}, *POSITIONS[1:]]


def flat() -> FlatLogprobs:
    found = FlatLogprobs()
    for position in POSITIONS:
        found.append(position)
    return found


def test_it_reads_as_a_list() -> None:
    found = flat()
    assert len(found) == 4
    assert list(found) == READ == [found[i] for i in range(4)]
    assert found[-1] == READ[-1]
    assert (found.start_indices, found.end_indices) == ([0, 0, 2, 3], [0, 2, 3, 6])
    assert found.token_ids == [7, 3, 9, 4, 8, 9]
    assert (found.ranks[:3], found.decoded_tokens[:3]) == ([2, 1, 1], ["a", "b", None])
    for part in (slice(1, 3), slice(None), slice(2, 2), slice(None, None, 2), slice(None, None, -1), slice(-1, None)):
        assert list(found[part]) == READ[part], part
    with pytest.raises(IndexError):
        found[4]
    with pytest.raises(TypeError, match="not str"):
        found["a"]  # type: ignore[call-overload]


def test_a_beginning_stays_what_it_is_whatever_becomes_of_the_whole() -> None:
    whole = flat()
    seen, unseen, nothing = whole[:3], whole[:], whole[:0]
    assert seen.token_ids == [7, 3, 9]
    whole.append(POSITIONS[2])
    assert (len(whole), len(unseen), len(nothing)) == (5, 4, 0)
    assert [unseen[-1], unseen[0], list(unseen), list(nothing)] == [READ[3], READ[0], READ, []]
    assert list(unseen[:][:2][-1:]) == READ[1:2]
    for position in (4, -5):
        with pytest.raises(IndexError):
            unseen[position]
    for copied in (copy.copy(unseen), copy.deepcopy(unseen), pickle.loads(pickle.dumps(unseen))):
        assert list(copied) == READ
        assert copied == flat() == unseen
    unseen.append(POSITIONS[1])
    unseen.extend(unseen)
    assert list(unseen) == [*READ, READ[1]] * 2
    assert list(whole) == [*READ, READ[2]]
    nothing += POSITIONS[1:2]
    assert list(nothing) == READ[1:2]
    with pytest.raises(AttributeError, match="no attribute 'token_id'"):
        _ = unseen.token_id


def test_it_grows_at_its_end_only() -> None:
    found = flat()
    found += POSITIONS[1:2]
    found.extend(found)
    found.append_fast([5], [-1.5], [1], ["x"])
    assert list(found) == [*READ, READ[1], *READ, READ[1], {5: Logprob(-1.5, 1, "x")}]
    for change in (lambda: found.__setitem__(0, None), lambda: found.__delitem__(0), lambda: found.insert(0, None)):
        with pytest.raises(TypeError, match="grow at their end"):
            change()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1, block_size=16) as engine:
        yield engine


def params(**arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 6, "seed": 2, "ignore_eos": True} | arguments))


def test_outputs_hold_the_same_either_way(llm: LLM) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    (plain,) = llm.generate("Once upon a time", params(**asked), use_tqdm=False)
    (found,) = llm.generate("Once upon a time", params(**asked, flat_logprobs=True), use_tqdm=False)
    assert isinstance(found.outputs[0].logprobs, FlatLogprobs)
    assert isinstance(found.prompt_logprobs, FlatLogprobs)
    assert plain.prompt_logprobs is not None
    assert list(found.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert list(found.prompt_logprobs) == [{}, *plain.prompt_logprobs[1:]]
    assert found.outputs[0].cumulative_logprob == plain.outputs[0].cumulative_logprob
    (without,) = llm.generate("Once", params(flat_logprobs=True), use_tqdm=False)
    assert (without.outputs[0].logprobs, without.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("is_flat", [False, True])
async def test_outputs_that_are_kept_or_changed_leave_the_others_as_they_are(is_flat: bool) -> None:
    kept: list[tuple[Any, Any]] = []
    async with AsyncLLM(
        "storyteller",
        dtype="float32",
        topology="inline",
        num_threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    ) as llm:
        asked = params(logprobs=1, prompt_logprobs=1, flat_logprobs=is_flat, max_tokens=20)
        async for output in llm.generate(list(range(5, 45)), asked):
            found = output.outputs[0].logprobs
            assert found is not None
            kept.append((output, (list(output.outputs[0].token_ids), list(found), list(output.prompt_logprobs or ()))))
            if len(kept) == 3:
                found.extend(list(found))
    for i, (output, (token_ids, logprobs, prompt_logprobs)) in enumerate(kept):
        assert output.outputs[0].token_ids == token_ids
        assert list(output.outputs[0].logprobs) == logprobs * (2 if i == 2 else 1)
        assert list(output.prompt_logprobs) == prompt_logprobs
        assert logprobs == kept[-1][1][1][: len(logprobs)]
        assert len(logprobs) == len(token_ids)
    assert len(kept[-1][1][1]) == 20
    assert len(kept[-1][1][2]) == 40


async def test_streams_of_flat_logprobs() -> None:
    async with AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        outputs = {
            kind: [
                output
                async for output in llm.generate(
                    "Once", params(logprobs=1, prompt_logprobs=0, flat_logprobs=True, output_kind=kind)
                )
            ]
            for kind in RequestOutputKind
        }
    final = outputs[RequestOutputKind.FINAL_ONLY][0]
    expected = final.outputs[0].logprobs
    assert isinstance(expected, FlatLogprobs)
    assert len(expected) == 6
    for output in outputs[RequestOutputKind.CUMULATIVE]:
        assert output.outputs[0].logprobs == expected[: len(output.outputs[0].token_ids)]
    first, *others = outputs[RequestOutputKind.DELTA]
    assert first.prompt_logprobs == final.prompt_logprobs
    for output in others:
        assert isinstance(output.prompt_logprobs, FlatLogprobs), "flat, and empty: the first output had all of them"
        assert not output.prompt_logprobs
        first.add(output, aggregate=True)
    assert first.outputs[0].logprobs == expected


@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.5, "logit_bias": {5: 3.0}}], ids=["plain", "ruled"])
def test_logprobs_of_ids_that_are_named(llm: LLM, rules: dict[str, Any]) -> None:
    ids = [3000, 5, 259]
    prompts = ["Once upon a time", "There was", "A fox"]
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_logprobs=-1) as every:
        expected = every.generate(prompts, params(logprobs=-1, **rules), use_tqdm=False)
    some = [params(logprob_token_ids=ids, **rules), params(logprobs=2, **rules), params(**rules)]
    found = llm.generate(prompts, some, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    of_ids, of_top, of_none = (o.outputs[0] for o in found)
    assert of_ids.logprobs is not None
    assert of_top.logprobs is not None
    assert of_none.logprobs is None
    whole, likely = expected[0].outputs[0], expected[1].outputs[0]
    assert whole.logprobs is not None
    assert likely.logprobs is not None
    for token, entries, all_of_them in zip(of_ids.token_ids, of_ids.logprobs, whole.logprobs, strict=True):
        assert list(entries) == list(dict.fromkeys([token, *ids]))
        for i, entry in entries.items():
            assert entry.logprob == pytest.approx(all_of_them[i].logprob, abs=1e-5)
            assert entry.decoded_token == all_of_them[i].decoded_token
        if token not in ids:
            assert [entry.rank for entry in entries.values()] == [all_of_them[token].rank, 1, 2, 3]
    assert of_ids.cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)
    for entries, all_of_them in zip(of_top.logprobs, likely.logprobs, strict=True):
        assert list(entries) == list(all_of_them)[: len(entries)]


BAD = [
    ({"logprob_token_ids": list(range(129))}, "129 ids, and the limit is 128"),
    ({"logprob_token_ids": [5], "logprobs": 2}, "logprobs=2 beside 1"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids=-1"),
    ({"logprob_token_ids": 5}, "must be a list"),
    ({"logprob_token_ids": [4096]}, "logprob_token_ids: 4096 is outside the vocabulary of 4096"),
    ({"flat_logprobs": 1}, "flat_logprobs=1 must be True or False"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_what_cannot_be_asked_is_named(arguments: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        llm.generate("Once", params(**arguments), use_tqdm=False)


def test_no_ids_ask_for_nothing(llm: LLM) -> None:
    (output,) = llm.generate("Once", params(logprob_token_ids=[]), use_tqdm=False)
    assert output.outputs[0].logprobs is None
