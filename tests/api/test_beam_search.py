"""Beam search: against every possible continuation of a small scripted model, and through the front doors."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)
from actorllm.api import beam_search as module
from actorllm.api.beam_search import BeamSearch, BeamSearchSequence
from actorllm.errors import EngineOverloaded, InvalidParameterError, InvalidPromptError, RequestFailedError
from actorllm.intake import tokenization

EOS = 0
SPECIAL = "<|endoftext|>"
"""The text of the storyteller's."""
VOCAB_SIZE = 5


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Logprob:
    logprob: float


class Scripted:
    """A model whose next token depends on the last two; greedy is not the best way through it."""

    def __init__(self, seed: int = 7) -> None:
        logits = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)) * 2
        self.logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def next(self, tokens: Sequence[int]) -> list[float]:
        before, last = ([0, *tokens])[-2:]
        row: list[float] = self.logprobs[before % VOCAB_SIZE, last % VOCAB_SIZE].tolist()
        return row

    def answer(self, tokens: Sequence[int], num_logprobs: int) -> RequestOutput:
        row = self.next(tokens)
        top = sorted(range(VOCAB_SIZE), key=lambda token: -row[token])[:num_logprobs]
        logprobs = [{token: Logprob(row[token]) for token in reversed(top)}]
        completion = CompletionOutput(0, "", [top[0]], logprobs=logprobs, finish_reason="length")
        return RequestOutput("r", None, list(tokens), outputs=[completion], finished=True)

    def search(self, prompt: list[int], params: BeamSearchParams, max_model_len: int = 100) -> list[BeamSearchSequence]:
        search = BeamSearch(prompt, params, [EOS], max_model_len)
        while not search.is_over:
            search.advance([self.answer(beam.tokens, 2 * params.beam_width) for beam in search.beams])
        return search.best()

    def all_continuations(self, prompt: list[int], length: int) -> Iterator[tuple[list[int], float]]:
        """Every sequence of up to `length` tokens that ends with EOS or at the limit, with its log probability."""
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=length):
            ended = tokens.index(EOS) + 1 if EOS in tokens else length
            if any(tokens[ended:]):
                continue  # counted once, with zeros behind its end
            total = sum(self.next([*prompt, *tokens[:i]])[tokens[i]] for i in range(ended))
            yield [*prompt, *tokens[:ended]], total


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_a_wide_beam_finds_the_best_of_all(length_penalty: float) -> None:
    model, prompt = Scripted(), [2, 4]
    params = BeamSearchParams(beam_width=VOCAB_SIZE**4, max_tokens=4, length_penalty=length_penalty)

    def score(tokens: list[int], total: float) -> float:
        return total / float((len(tokens) - (tokens[-1] == EOS)) ** length_penalty)

    expected = sorted(model.all_continuations(prompt, 4), key=lambda found: -score(*found))
    found = model.search(prompt, params)
    assert [sequence.tokens for sequence in found[:20]] == [tokens for tokens, _ in expected[:20]]
    assert [sequence.cum_logprob for sequence in found[:20]] == pytest.approx([total for _, total in expected[:20]])


def test_a_beam_of_one_is_greedy_and_a_wider_one_finds_better() -> None:
    model = Scripted()
    greedy = model.search([2], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    tokens = [2]
    for _ in range(6):
        row = model.next(tokens)
        tokens.append(row.index(max(row)))
    assert [sequence.tokens for sequence in greedy] == [tokens]
    wide = model.search([2], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    assert len(wide) == 4
    assert wide[0].cum_logprob > greedy[0].cum_logprob
    assert [sequence.cum_logprob for sequence in wide] == sorted((s.cum_logprob for s in wide), reverse=True)


def test_sequences_that_end_say_so_and_compete_with_the_rest() -> None:
    found = Scripted().search([1], BeamSearchParams(beam_width=3, max_tokens=5))
    for sequence in found:
        assert (EOS in sequence.tokens) == (sequence.tokens[-1] == EOS) == (sequence.finish_reason == "stop")
        assert sequence.stop_reason == (EOS if sequence.finish_reason == "stop" else None)
        assert len(sequence.logprobs) == len(sequence.tokens) - 1
    assert {sequence.finish_reason for sequence in found} == {"stop", "length"}
    ignoring = Scripted().search([1], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert all(len(sequence.tokens) == 6 for sequence in ignoring)


def test_it_ends_at_the_longest_sequence_of_the_model() -> None:
    found = Scripted().search([1, 2], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True), max_model_len=6)
    assert [len(sequence.tokens) for sequence in found] == [6, 6]


def test_the_sampled_token_beside_the_top_ones_is_no_candidate() -> None:
    model, search = Scripted(), BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=1), [], 9)
    search.advance([model.answer([1], VOCAB_SIZE)])
    row = model.next([1])
    assert search.best()[0].tokens == [1, row.index(max(row))]
    assert len(search.beams) == 1


def test_an_answer_without_log_probabilities_is_an_error() -> None:
    search = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=1), [], 9)
    completion = CompletionOutput(0, "", [], finish_reason="abort")
    with pytest.raises(RequestFailedError, match="'abort' and without log probabilities"):
        search.advance([RequestOutput("r", None, [1], outputs=[completion])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be >= 1"),
        ({"beam_width": 2.0}, "beam_width=2.0 must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 2.1}, "temperature=2.1"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs=.* leave it at None"),
        ({"watermarking": True}, "watermarking=True"),
        ({"beam_with": 3}, "BeamSearchParams has no parameter 'beam_with'; did you mean 'beam_width'"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | arguments))


def test_parameters_have_the_order_of_vllm() -> None:
    params = BeamSearchParams(2, 3, True, 0.5, 1.5, True, None, False, None)
    assert params == BeamSearchParams(
        beam_width=2,
        max_tokens=3,
        ignore_eos=True,
        temperature=0.5,
        length_penalty=1.5,
        include_stop_str_in_output=True,
        structured_outputs=None,
        skip_special_tokens=False,
        watermarking=None,
    )


# Through the front doors ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """The answers of every front door come from the scripted model, whatever the engine can do."""
    model = Scripted()
    params = SamplingParams(max_tokens=1, temperature=0)
    for name in ("actorllm.api.llm.step_params", "actorllm.api.async_llm.step_params"):
        monkeypatch.setattr(name, lambda _: params)

    def generate(llm: LLM, prompts: list[TokensPrompt], *_: Any, **__: Any) -> list[RequestOutput]:
        return [model.answer(prompt["prompt_token_ids"], 6) for prompt in prompts]

    async def stream(prompt: TokensPrompt) -> Any:
        yield model.answer(prompt["prompt_token_ids"], 6)

    monkeypatch.setattr(LLM, "generate", generate)
    monkeypatch.setattr(AsyncLLM, "generate", lambda self, prompt, *_, **__: stream(prompt))
    return model


PARAMS = BeamSearchParams(beam_width=3, max_tokens=4)


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_llm_searches_from_every_prompt(llm: LLM, scripted: Scripted, limit: int | None) -> None:
    prompts: Any = [[1, 2], "Once", {"prompt_token_ids": [3]}]
    outputs = llm.beam_search(prompts, PARAMS, concurrency_limit=limit)
    assert len(outputs) == 3
    for prompt, output in zip(([1, 2], llm._engine.prompts.tokenize("Once").ids.tolist(), [3]), outputs, strict=True):
        expected = scripted.search(prompt, PARAMS)
        assert [sequence.tokens for sequence in output.sequences] == [sequence.tokens for sequence in expected]
        assert [sequence.cum_logprob for sequence in output.sequences] == [s.cum_logprob for s in expected]
        for sequence in output.sequences:
            assert sequence.text == llm._engine.prompts.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    (with_special,) = llm.beam_search([[0, 2]], BeamSearchParams(3, 4, skip_special_tokens=False))
    assert with_special.sequences[0].text == llm._engine.prompts.tokenizer.decode(with_special.sequences[0].tokens)
    assert with_special.sequences[0].text.startswith(SPECIAL)
    (without,) = llm.beam_search([[0, 2]], BeamSearchParams(3, 4))
    assert SPECIAL not in without.sequences[0].text


async def test_async_llm_gives_one_output_without_the_prompt(async_llm: AsyncLLM, scripted: Scripted) -> None:
    for keeps_end in (False, True):
        params = BeamSearchParams(beam_width=3, max_tokens=4, include_stop_str_in_output=keeps_end)
        (output,) = [output async for output in async_llm.beam_search([1], "mine", params)]
        expected = scripted.search([1], params)
        assert (output.request_id, output.prompt_token_ids, output.finished) == ("mine", [1], True)
        for index, (completion, sequence) in enumerate(zip(output.outputs, expected, strict=True)):
            new = sequence.tokens[1:]
            without_end = new[:-1] if sequence.finish_reason == "stop" else new
            assert completion.index == index
            assert completion.token_ids == (new if keeps_end else without_end)
            assert completion.text == async_llm._engine.prompts.tokenizer.decode(without_end, skip_special_tokens=True)
            assert completion.finish_reason == sequence.finish_reason
            assert completion.cumulative_logprob == sequence.cum_logprob
    (output,) = [output async for output in async_llm.beam_search("Once", params=PARAMS)]
    assert output.prompt == "Once"
    assert output.request_id


async def test_bad_searches_are_refused(llm: LLM, async_llm: AsyncLLM, scripted: Scripted) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: llm.beam_search("Once", SamplingParams()),  # type: ignore[arg-type]
        lambda: llm.beam_search("Once", PARAMS, concurrency_limit=0),
        lambda: llm.beam_search({"prompt_token_ids": []}, PARAMS),
    ]
    for call, error in zip(calls, (InvalidParameterError, InvalidParameterError, InvalidPromptError), strict=True):
        with pytest.raises(error):
            call()
    with pytest.raises(InvalidParameterError, match="BeamSearchParams, not NoneType"):
        await anext(async_llm.beam_search("Once"))
    with pytest.raises(InvalidPromptError):
        await anext(async_llm.beam_search({"prompt_token_ids": []}, params=PARAMS))


async def test_the_tokenizer_is_read_on_no_loop(
    async_llm: AsyncLLM, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the prompt is token ids, so that nothing has needed it before."""
    threads: list[threading.Thread] = []
    read = tokenization.Tokenizer

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*arguments)

    async_llm._engine.prompts.forget()
    monkeypatch.setattr(tokenization, "Tokenizer", recorded)
    assert [output.finished async for output in async_llm.beam_search([1], params=PARAMS)] == [True]
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("way", ["refused", "cancelled"])
async def test_the_beams_beside_one_that_ends_early_end_too(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also while its error is kept, which keeps the frames that it came through."""
    begun: list[Any] = []
    has_begun = anyio.Event()
    generate = AsyncLLM.generate

    def begin(llm: AsyncLLM, prompt: Any, params: SamplingParams, **extras: Any) -> Any:
        if len(begun) == 3:
            has_begun.set()
            if way == "refused":
                raise EngineOverloaded("full")
        if begun:  # of the second round; these end by themselves much later
            params = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        begun.append(generate(llm, prompt, params, **extras))
        return begun[-1]

    async def search() -> None:
        async for _ in async_llm.beam_search("Once", params=BeamSearchParams(beam_width=4, max_tokens=2)):
            raise AssertionError

    monkeypatch.setattr(AsyncLLM, "generate", begin)
    if way == "refused":
        with pytest.raises(EngineOverloaded) as kept:
            await search()
        assert kept.value.__traceback__ is not None
    else:
        task = asyncio.create_task(search())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [stream.mailbox.is_aborted for stream in begun[1:]] == [True] * (len(begun) - 1)
    assert len(begun) > 2


async def test_a_beam_of_one_is_greedy_for_real(llm: LLM, async_llm: AsyncLLM) -> None:
    (greedy,) = llm.generate("Once", SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
    params = BeamSearchParams(beam_width=1, max_tokens=6)
    (found,) = llm.beam_search("Once", params)
    assert found.sequences[0].tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    (output,) = [output async for output in async_llm.beam_search("Once", params=params)]
    assert output.outputs[0].token_ids == greedy.outputs[0].token_ids
    (wide,) = llm.beam_search("Once", BeamSearchParams(beam_width=4, max_tokens=6))
    assert wide.sequences[0].cum_logprob >= found.sequences[0].cum_logprob - 1e-4
    assert len({tuple(sequence.tokens) for sequence in wide.sequences}) == 4


def test_only_the_end_of_the_tokenizer_ends_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what else the model's generation_config ends requests with."""
    model, tokenizer = llm.config.model, llm._engine.prompts.tokenizer
    assert module.end_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    monkeypatch.setattr(tokenizer, "eos_token_id", None)
    assert module.end_ids(model, tokenizer) == ()
    with LLM("storyteller", topology="inline", num_threads=1, skip_tokenizer_init=True) as without:
        (output,) = without.beam_search([[1, 2]], BeamSearchParams(2, 3))
        assert {sequence.text for sequence in output.sequences} == {None}
    assert module.end_ids(model, None) == model.eos_token_ids


def test_a_step_asks_for_twice_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(module, "SamplingParams", lambda **arguments: asked.update(arguments))
    module.step_params(BeamSearchParams(beam_width=5, max_tokens=2))
    assert (asked["logprobs"], asked["max_tokens"], asked["temperature"]) == (10, 1, 0.0)
