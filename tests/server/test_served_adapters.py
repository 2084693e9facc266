"""Adapters behind the server: the model's name in a request chooses one, and names come and go while the server runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from actorllm import AsyncLLM, LoRARequest, PoolingParams, SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import ConfigError
from actorllm.server import adapter_routes, create_app
from actorllm.server.warmup import warm_up
from tests.model.adapters.lora_folders import write_adapter
from tests.server.conftest import client_of, events_of, is_idle, until

pytestmark = pytest.mark.anyio

LAYERS = {f"model.layers.{i}.self_attn.o_proj": (256, 256) for i in range(4)}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters a and b of the storyteller, and one of another model."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(root / name, LAYERS, seed=seed, size=2.0)
    write_adapter(root / "wide", {"model.layers.0.self_attn.o_proj": (512, 256)})
    return root


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        "storyteller", dtype="float32", topology="inline", num_threads=1, enable_lora=True, max_loras=2, max_cpu_loras=3
    )
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def expected(llm: AsyncLLM, folders: Path) -> dict[str, str]:
    """The text of each adapter, asked for without a server."""

    async def text_of(lora: LoRARequest | None) -> str:
        params = SamplingParams(**GREEDY)
        text = ""
        async for output in llm.generate(PROMPT, params, lora_request=lora):
            text = output.outputs[0].text
        return text

    async def all_texts() -> dict[str, str]:
        texts = {"storyteller": await text_of(None)}
        for number, name in enumerate("ab", 1001):
            texts[name] = await text_of(LoRARequest(name, number, str(folders / name)))
        return texts

    texts = anyio.run(all_texts)
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture
def updatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(adapter_routes.VARIABLE, "True")


async def complete(client: httpx.AsyncClient, model: str | None, **more: Any) -> str:
    response = await client.post("/v1/completions", json={"model": model, "prompt": PROMPT, **GREEDY, **more})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == (model or "storyteller")
    return str(response.json()["choices"][0]["text"])


async def load(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json=body)


async def unload(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json=body)


async def test_the_model_of_a_request_chooses_the_adapter(
    llm: AsyncLLM, folders: Path, expected: dict[str, str]
) -> None:
    modules = [f"a={folders / 'a'}", json.dumps({"name": "b", "path": str(folders / "b"), "base_model_name": "tale"})]
    app = create_app(llm, lora_modules=modules)
    await warm_up(app)
    assert {request.lora_int_id for request in app.state.server.models.adapters.values()} <= await llm.list_loras()
    async with client_of(app) as client:
        for name in ("a", None, "b", "storyteller"):
            assert await complete(client, name) == expected[name or "storyteller"]
        response = await client.post("/v1/completions", json={"model": "a", "prompt": PROMPT, "stream": True, **GREEDY})
        events = events_of(response)
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == expected["a"]
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("storyteller", None),
            ("a", "storyteller"),
            ("b", "tale"),
        ]
        assert cards[1]["root"] == str(folders / "a")
        assert (await client.get("/v1/models/a")).json() == cards[1]
        wrong = await client.post("/v1/completions", json={"model": "c", "prompt": PROMPT})
        assert wrong.status_code == 404
        assert "'c' does not exist" in wrong.json()["error"]["message"]


async def test_every_protocol_takes_the_name_of_an_adapter(
    llm: AsyncLLM, folders: Path, expected: dict[str, str]
) -> None:
    ids = llm._engine.prompts.tokenize(PROMPT).ids.tolist()
    message = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
    chats: dict[str, str] = {}
    async with client_of(create_app(llm, lora_modules=[f"a={folders / 'a'}"])) as client:

        async def ask(path: str, name: str, body: dict[str, Any]) -> Any:
            response = await client.post(path, json={"model": name, **body})
            assert response.status_code == 200, (path, response.text)
            return response.json()

        for name in ("a", "storyteller"):
            tree = await ask("/v1/chat/completions", name, {**message, "ignore_eos": True})
            chats[name] = tree["choices"][0]["message"]["content"]
            tree = await ask(
                "/inference/v1/generate", name, {"token_ids": ids, "sampling_params": GREEDY, "output_mode": "text"}
            )
            assert tree["choices"][0]["text"] == expected[name]
            tree = await ask(
                "/v1/chat/completions/batch", name, {**message, "messages": [message["messages"]], "ignore_eos": True}
            )
            assert tree["choices"][0]["message"]["content"] == chats[name]
            options = {"temperature": 0, "num_predict": 12, "ignore_eos": True}
            for tag in ("", ":latest"):
                body = {"prompt": PROMPT, "raw": True, "stream": False, "options": options}
                tree = await ask("/api/generate", name + tag, body)
                assert tree["model"] == name + tag
                assert expected[name].startswith(tree["response"].rstrip())
            assert (await ask("/tokenize", name, {"prompt": PROMPT}))["tokens"] == ids
        assert chats["a"] != chats["storyteller"]
        for path, body in (
            ("/v1/messages", {**message, "max_tokens": 12}),
            ("/v1/responses", {"input": PROMPT, "temperature": 0, "max_output_tokens": 12}),
        ):
            trees = [await ask(path, name, body) for name in ("a", "storyteller")]
            items = [tree["content"] if "content" in tree else tree["output"][-1]["content"] for tree in trees]
            texts = {content[-1]["text"] for content in items}
            assert len(texts) == 2, path
        tags = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["storyteller:latest", "a:latest"]


async def test_vectors_are_those_of_the_adapter_that_the_model_names(folders: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "topology": "inline", "num_threads": 1, "enable_lora": True}
    async with AsyncLLM("storyteller", runner="pooling", **options) as pooling:
        vectors: dict[str, list[float]] = {}
        async with client_of(create_app(pooling, lora_modules=[f"a={folders / 'a'}"])) as client:
            for name in ("a", "storyteller"):
                response = await client.post("/v1/embeddings", json={"model": name, "input": PROMPT})
                assert response.status_code == 200, response.text
                vectors[name] = response.json()["data"][0]["embedding"]
        lora = LoRARequest("a", 1, str(folders / "a"))
        (output,) = [output async for output in pooling.encode(PROMPT, PoolingParams(), lora_request=lora)]
    assert vectors["a"] == pytest.approx(output.outputs.data.tolist(), abs=1e-6)
    assert vectors["storyteller"] != pytest.approx(vectors["a"], abs=1e-2)


@pytest.mark.usefixtures("updatable")
async def test_adapters_come_and_go(llm: AsyncLLM, folders: Path, expected: dict[str, str]) -> None:
    app = create_app(llm)
    async with client_of(app) as client:
        response = await load(client, lora_name="x", lora_path=str(folders / "a"))
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert await complete(client, "x") == expected["a"]
        response = await load(client, lora_name="x", lora_path=str(folders / "b"))
        assert response.status_code == 400
        assert "load_inplace" in response.json()["error"]["message"]
        assert await complete(client, "x") == expected["a"]
        response = await load(client, lora_name="x", lora_path=str(folders / "b"), load_inplace=True)
        assert response.status_code == 200
        assert await complete(client, "x") == expected["b"]
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["storyteller", "x"]
        number = app.state.server.models.adapters["x"].lora_int_id
        assert number in await llm.list_loras()
        response = await unload(client, lora_name="x")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert number not in await llm.list_loras()
        assert (await unload(client, lora_name="x")).status_code == 404
        body = {"model": "x", "prompt": PROMPT}
        assert (await client.post("/v1/completions", json=body)).status_code == 404
    await until(lambda: is_idle(llm))


@pytest.mark.usefixtures("updatable")
@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"lora_name": "x"}, 400, "'lora_path' must be provided"),
        ({"lora_path": "{folders}/a"}, 400, "Both 'lora_name'"),
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, 404, "No adapter found for '/no/such/folder'"),
        ({"lora_name": "x", "lora_path": "{folders}"}, 400, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": "{folders}/wide"}, 400, "o_proj"),
        ({"lora_name": "x" * 100_000, "lora_path": "{folders}/a"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "a" * 100_000}, 400, "lora_path"),
        ({"lora_name": ["x"], "lora_path": "{folders}/a"}, 400, "lora_name"),
        ({"lora_name": "storyteller", "lora_path": "{folders}/a"}, 400, "is that of the model itself"),
    ],
)
async def test_what_cannot_be_loaded(
    llm: AsyncLLM, folders: Path, body: dict[str, Any], status: int, told: str
) -> None:
    path = body.get("lora_path")
    filled = {**body, "lora_path": path.replace("{folders}", str(folders))} if path else body
    app = create_app(llm)
    async with client_of(app) as client:
        response = await load(client, **filled)
        assert response.status_code == status, response.text
        assert told in response.json()["error"]["message"]
        assert not app.state.server.models.adapters
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200


async def test_names_are_fixed_unless_the_environment_says_otherwise(llm: AsyncLLM, folders: Path) -> None:
    async with client_of(create_app(llm)) as client:
        assert (await load(client, lora_name="x", lora_path=str(folders / "a"))).status_code == 404
        assert (await unload(client, lora_name="x")).status_code == 404


@pytest.mark.usefixtures("updatable")
async def test_the_number_of_names_is_bounded(llm: AsyncLLM, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.server.served_models.MAX_ADAPTERS", 2)
    async with client_of(create_app(llm)) as client:
        for name in ("x", "y"):
            assert (await load(client, lora_name=name, lora_path=str(folders / "a"))).status_code == 200
        assert (await load(client, lora_name="z", lora_path=str(folders / "a"))).status_code == 400
        response = await load(client, lora_name="y", lora_path=str(folders / "b"), load_inplace=True)
        assert response.status_code == 200


@pytest.mark.usefixtures("updatable")
async def test_a_request_goes_on_when_its_adapter_is_unloaded(
    llm: AsyncLLM, folders: Path, expected: dict[str, str]
) -> None:
    async with client_of(create_app(llm)) as client, anyio.create_task_group() as group:
        await load(client, lora_name="x", lora_path=str(folders / "a"))
        texts: list[str] = []

        async def ask() -> None:
            texts.append(await complete(client, "x", max_tokens=200))

        group.start_soon(ask)

        async def has_begun() -> bool:
            return not await is_idle(llm)

        await until(has_begun)
        assert (await unload(client, lora_name="x")).status_code == 200
    assert texts[0].startswith(expected["a"])


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("a", "must be name=path, or JSON"),
        ('{"name": "a"}', "must be name=path, or JSON"),
        ('{"name": "a", "path": "p", "rank": 3}', "must be name=path, or JSON"),
        ("a=/no/such/folder", "is no folder"),
        ("=/no/such/folder", "lora_name=''"),
        ("storyteller={folders}/a", "is that of the model itself"),
        ({"name": 3, "path": "p"}, "lora_name=3"),
        (7, "must be name=path, or JSON"),
    ],
)
def test_a_wrong_module_is_told_before_anything_is_started(
    llm: AsyncLLM, folders: Path, module: Any, told: str
) -> None:
    if isinstance(module, str):
        module = module.replace("{folders}", str(folders))
    with pytest.raises(ConfigError, match="lora_modules: .*" + told):
        create_app(llm, lora_modules=[module])


async def test_an_adapter_of_another_model_ends_the_start(llm: AsyncLLM, folders: Path) -> None:
    app = create_app(llm, lora_modules=[f"wide={folders / 'wide'}"])
    with pytest.raises(ConfigError, match=r"lora_modules: 'wide': .*o_proj"):
        await warm_up(app)


def test_an_engine_without_adapters_has_no_names_of_them(folders: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        create_app(AsyncLLM("storyteller", topology="inline"), lora_modules=[f"a={folders / 'a'}"])


async def test_an_adapter_with_a_tokenizer_counts_by_it(llm: AsyncLLM, folders: Path, tmp_path: Path) -> None:
    """What a program counts or renders beforehand has the tokens that the request itself has."""
    folder = tmp_path / "own"
    shutil.copytree(folders / "a", folder)
    base = Path(BUNDLED_MODELS["storyteller"])
    shutil.copy(base / "tokenizer.json", folder)
    config = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}Bear:"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tree, "decoder": {"type": "Fuse"}}))  # writes "Ġ" as it is
    app = create_app(llm, lora_modules=[f"own={folder}"])
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    ids: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    async with client_of(app) as client:
        for model in ("storyteller", "own"):
            asked = {**body, "model": model}
            answer = (await client.post("/v1/chat/completions", json={**asked, "return_token_ids": True})).json()
            ids[model] = answer["prompt_token_ids"]
            tokenized = (await client.post("/tokenize", json={**asked, "max_tokens": None})).json()
            assert tokenized["tokens"] == ids[model]
            rendered = (await client.post("/v1/chat/completions/render", json=asked)).json()
            assert rendered["token_ids"] == ids[model]
            counted = (await client.post("/v1/messages/count_tokens", json=asked)).json()
            assert counted["input_tokens"] == len(ids[model])
            info = (await client.get("/tokenizer_info", params={"model": model})).json()
            assert (info["chat_template"] == template) is (model == "own")
            told = (await client.post("/detokenize", json={"model": model, "tokens": ids["storyteller"]})).json()
            texts[model] = told["prompt"]
        assert (await client.get("/tokenizer_info", params={"model": "other"})).status_code == 404
    assert ids["storyteller"] != ids["own"]
    assert PROMPT in texts["storyteller"]
    assert PROMPT.replace(" ", "Ġ") in texts["own"]
