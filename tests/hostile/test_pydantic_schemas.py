"""Every ordinary type of pydantic as a response_format: it is answered, or refused before the first token by a keyword's name."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import anyio
import httpx
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.hostile.bystander import bystander

pytestmark = pytest.mark.anyio


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Node(BaseModel):
    value: int
    next: Node | None = None


class Tree(BaseModel):
    children: list[Tree] = []


class Root(pydantic.RootModel[dict[str, int]]):
    pass


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Pair(NamedTuple):
    a: int
    b: str


TYPES: dict[str, Any] = {
    **{t.__name__: t for t in (int, float, str, bool, bytes, list, dict, Point, Pair, Node, Tree, Root, Color)},
    **{t.__name__: t for t in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal)},
    **{
        t.__name__: t
        for t in (ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, uuid.UUID, pathlib.Path)
    },
    **{
        name: getattr(pydantic, name)
        for name in (
            *("UUID4", "IPvAnyAddress", "AnyUrl", "HttpUrl", "PostgresDsn", "SecretStr", "SecretBytes", "FilePath"),
            *(
                "DirectoryPath",
                "NewPath",
                "Base64Bytes",
                "Base64Str",
                "Json",
                "PositiveInt",
                "FiniteFloat",
                "StrictStr",
            ),
            *("PastDate", "FutureDatetime", "AwareDatetime", "ByteSize"),
        )
    },
    "fraction": fractions.Fraction,
    "conint": pydantic.conint(ge=1, lt=100, multiple_of=7),
    "constr": pydantic.constr(min_length=2, max_length=5, pattern="^[a-z]+$"),
    "condecimal": pydantic.condecimal(max_digits=5, decimal_places=2, gt=0),
    "conlist": pydantic.conlist(int, min_length=1, max_length=2),
    "conset": pydantic.conset(int, min_length=1, max_length=3),
    "set": set[str],
    "frozenset": frozenset[int],
    "set of enum": set[Color],
    "literal": Literal["a", 1, None, True],
    "union": int | str | None,
    "optional": int | None,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "tuple": tuple[int, str],
    "tuple of any": tuple[int, ...],
    "dict": dict[str, int],
    "dict of int": dict[int, str],
    "multiple_of": Annotated[float, Field(multiple_of=0.25, gt=0, lt=2)],
    "pattern": re.Pattern,
    "deque": collections.deque[int],
    "sequence": Sequence[int],
    "nested": list[dict[str, list[tuple[int, str | None]]]],
    "any": Any,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=32)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def ask(client: httpx.AsyncClient, schema: dict[str, Any], **more: Any) -> httpx.Response:
    holder = {"name": "answer", "schema": schema, **more}
    body = {
        "prompt": "Once",
        "max_tokens": 6,
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": holder},
    }
    return await client.post("/v1/completions", json=body)


@contextlib.asynccontextmanager
async def client_beside_a_stream(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose engine has a bystander, which gets tokens while the block runs."""
    transport = httpx.ASGITransport(create_app(llm))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
        bystander(llm, max_tokens=40) as steady,
    ):
        before = steady.num_tokens
        yield client
        assert steady.num_tokens >= before + 2


async def test_every_type_is_answered(llm: AsyncLLM) -> None:
    failed: dict[str, str] = {}

    async def one(client: httpx.AsyncClient, name: str, kind: Any) -> None:
        model = pydantic.create_model("Answer", x=(kind, ...))
        response = await ask(client, model.model_json_schema(), strict=True)
        is_warned = "uniqueItems (at #/properties/x) is not held" in response.headers.get("x-actorllm-warning", "")
        if response.status_code != 200 or is_warned != ("set" in name):
            failed[name] = response.text
        alone = TypeAdapter(kind).json_schema()
        response = await ask(client, alone)
        if response.status_code != 200:
            failed[f"{name}, alone"] = response.text

    async with client_beside_a_stream(llm) as client, anyio.create_task_group() as tasks:
        for name, kind in TYPES.items():
            tasks.start_soon(one, client, name, kind)
    assert failed == {}


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"a": {"if": {"type": "string"}, "then": {}}}}, "if (at #/properties/a)"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "integer", "multipleOf": 1000003}, "multipleOf"),
        ({"type": "string", "pattern": "^(?=a).*$"}, "pattern"),
    ],
    ids=str,
)
async def test_what_cannot_be_held_is_refused_by_name_or_a_hint(
    llm: AsyncLLM, schema: dict[str, Any], name: str
) -> None:
    async with client_beside_a_stream(llm) as client:
        refused = await ask(client, schema, strict=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"
        assert (
            name.split()[0] in refused.json()["error"]["message"] or "look-around" in refused.json()["error"]["message"]
        )
        taken = await ask(client, schema, strict=False)
        assert taken.status_code == 200
        assert f"{name} " in taken.headers["x-actorllm-warning"] + " "


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}]
)
async def test_a_schema_that_is_only_itself_is_refused_in_words(llm: AsyncLLM, schema: dict[str, Any]) -> None:
    async with client_beside_a_stream(llm) as client:
        refused = await ask(client, schema)
        assert refused.status_code == 400
        assert "refers to itself and to nothing else" in refused.json()["error"]["message"]
        ordinary = {"type": "object", "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}}
        assert (await ask(client, ordinary)).status_code == 200
