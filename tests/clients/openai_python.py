"""openai for Python, synchronous and asynchronous."""

from __future__ import annotations

import openai
from checks import MESSAGES, MODEL, TEXT, URL, WEATHER, check, needs_path, needs_tools, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def completions() -> None:
    whole = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=8, temperature=0, logprobs=2, echo=True)
    assert whole.choices[0].text.startswith(TEXT)
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    several = client.completions.create(model=MODEL, prompt=[[5, 6], [7, 8]], max_tokens=4, n=2)
    assert sorted(choice.index for choice in several.choices) == [0, 1, 2, 3]
    arguments = {"model": MODEL, "prompt": TEXT, "max_tokens": 8, "seed": 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**arguments, stream=True, extra_body={"stream_options": options}))
    whole = client.completions.create(**arguments)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8


@check
def chat() -> None:
    arguments = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=2)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts
    assert len(whole.choices[0].logprobs.content) == 8
    parts = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    assert client.chat.completions.create(model=MODEL, messages=parts, max_tokens=2).choices
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=99, stop=" ") as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content


@check
async def many_at_once() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.completions.create(model=MODEL, prompt=TEXT, max_tokens=20, seed=seed) for seed in range(32))
        )
        assert len({answer.choices[0].text for answer in answers}) > 16
        stream = await many.completions.create(model=MODEL, prompt=TEXT, max_tokens=900, stream=True)
        async for _ in stream:
            break
        await stream.close()


@check
def errors() -> None:
    for error, arguments in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"prompt": [5] * 3000}),
    ):
        try:
            client.completions.create(**{"model": MODEL, "prompt": TEXT, **arguments})
        except error as caught:
            assert (caught.param, caught.code) == (next(iter(arguments)), str(caught.status_code)), caught
        else:
            raise AssertionError(arguments)


@check
def latency_fields() -> None:
    extra = {"slo": {"ttft": 5.0, "tpot": 1.0}, "return_metrics": True, "is_latency_sensitive": True}
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=4, extra_body=extra)
    assert answer.metrics["slo_met"] is True


@check
def tools() -> None:
    needs_tools()
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=300
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"


@check
def parsed_output() -> None:
    needs_tools()
    from typing import Literal

    from pydantic import BaseModel

    class Answer(BaseModel):
        city: Literal["Berlin", "Paris"]
        is_warm: bool

    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=300)
    assert answer.choices[0].message.parsed.city in ("Berlin", "Paris")


@check
def responses() -> None:
    needs_path("/v1/responses")
    answer = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=16)
    assert answer.output_text
    events = list(client.responses.create(model=MODEL, input=TEXT, max_output_tokens=16, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")


@check
def embeddings() -> None:
    needs_path("/v1/embeddings")
    try:
        answer = client.embeddings.create(model=MODEL, input=[TEXT, "a"])
    except openai.BadRequestError as error:
        assert "vectors" in str(error)  # this server makes text, and says so; the one of the next client makes vectors
    else:
        assert len(answer.data) == 2


run("openai")
