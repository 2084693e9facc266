"""openai for Python against a server that makes vectors."""

from __future__ import annotations

import math

import openai
from checks import MODEL, TEXT, URL, check, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@check
def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=[TEXT, "a wolf"])
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens > 4
    for one in answer.data:  # in base64 on the wire: the client asks for that by itself
        assert math.isclose(sum(x * x for x in one.embedding), 1.0, rel_tol=1e-3)
    again = client.embeddings.create(model=MODEL, input=TEXT, encoding_format="float")
    assert all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(again.data[0].embedding, answer.data[0].embedding, strict=True)
    )


@check
def errors() -> None:
    try:
        client.embeddings.create(model=MODEL, input=[])
    except openai.BadRequestError as error:
        assert error.param == "input"
        return
    raise AssertionError("no error")


run("openai")
