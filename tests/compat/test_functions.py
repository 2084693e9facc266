"""What programs of vLLM import beside the engine does what it does there."""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from actorllm.compat.config import CompilationConfig, CompilationMode, SpeculativeConfig, StructuredOutputsConfig
from actorllm.compat.distributed import cleanup_dist_env_and_memory
from actorllm.compat.entrypoints.chat_utils import load_chat_template
from actorllm.compat.entrypoints.utils import with_cancellation
from actorllm.compat.platforms import current_platform
from actorllm.compat.tokenizers import get_tokenizer
from actorllm.compat.utils import Counter, get_open_port
from actorllm.compat.utils.async_utils import merge_async_iterators
from actorllm.compat.utils.system_utils import set_ulimit

from actorllm.compat import ModelRegistry, envs
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError


def test_configurations_are_arguments_of_the_engine() -> None:
    compilation = CompilationConfig(3)
    compilation.mode = CompilationMode.VLLM_COMPILE
    with pytest.warns(UserWarning, match="the kernels are those of the backend"):
        config = EngineConfig.from_arguments(
            "storyteller",
            compilation_config=compilation,
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
        )
    assert compilation == {"level": 3, "mode": 3}
    assert compilation.level == 3
    assert config.speculation is not None
    assert config.speculation.num_speculative_tokens == 2
    with pytest.raises(AttributeError, match="no 'pass_config'"):
        _ = compilation.pass_config
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        EngineConfig.from_arguments("storyteller", kv_transfer_config=SpeculativeConfig(kv_connector="x"))


def test_small_ones(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_open_port()))
    counter = Counter(3)
    assert [next(counter), next(counter)] == [3, 4]
    counter.reset()
    assert next(counter) == 0
    assert get_tokenizer("storyteller", trust_remote_code=True).encode("Once upon a time")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert load_chat_template(template) == load_chat_template("{{ messages }}", is_literal=True) == "{{ messages }}"
    assert load_chat_template(None) is None
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        load_chat_template(str(tmp_path / "none.jinja"))
    assert current_platform.is_cpu() != current_platform.is_cuda()
    cleanup_dist_env_and_memory(shutdown_ray=True)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_iterators_are_merged(anyio_backend: str) -> None:
    closed: list[int] = []
    turn = anyio.Event()

    async def numbers(number: int, *, waits: bool = False, fails: bool = False) -> AsyncIterator[int]:
        try:
            for one in range(3):
                if waits:
                    await turn.wait()
                yield one
            if fails:
                raise ValueError("so it was asked")
        finally:
            closed.append(number)

    found = []
    async for number, item in merge_async_iterators(numbers(0), numbers(1, waits=True)):
        found.append((number, item))
        if (0, 2) in found:
            turn.set()
    assert found[:3] == [(0, 0), (0, 1), (0, 2)]
    assert found[3:] == [(1, 0), (1, 1), (1, 2)]
    with pytest.raises(ValueError, match="so it was asked"):
        async for _ in merge_async_iterators(numbers(2, fails=True)):
            pass
    async with aclosing(merge_async_iterators(numbers(3), numbers(4, waits=True))) as merged:
        async for _ in merged:
            break
    assert sorted(closed) == [0, 1, 2, 3, 4]

    class Stream:
        """As `generate` returns them: closed by `aclose`, and no generator."""

        def __init__(self, number: int) -> None:
            self.number = number

        def __aiter__(self) -> AsyncIterator[int]:
            return self

        async def __anext__(self) -> int:
            return self.number

        async def aclose(self) -> None:
            closed.append(self.number)

    async with aclosing(merge_async_iterators(Stream(5), Stream(6))) as merged:
        async for _ in merged:
            break
    assert sorted(closed) == [0, 1, 2, 3, 4, 5, 6]
    assert [item async for item in merge_async_iterators()] == []


def test_variables_and_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V1", raising=False)
    assert (envs.VLLM_USE_V1, envs.VLLM_PORT) == (True, None)
    for name, text, value in (
        ("VLLM_USE_V1", "0", False),
        ("VLLM_PORT", "80", 80),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "DEBUG"),
        ("VLLM_PLUGINS", "a,b", ["a", "b"]),
    ):
        monkeypatch.setenv(name, text)
        assert getattr(envs, name) == value
    with pytest.raises(AttributeError, match="VLLM_NOT_THERE"):
        _ = envs.VLLM_NOT_THERE
    assert {"LlamaForCausalLM", "Qwen3Model"} <= ModelRegistry.get_supported_archs()
    with pytest.raises(ConfigError, match=r"register_model\('Mine'\).*transformers"):
        ModelRegistry.register_model("Mine", "mine.models:Mine")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_an_endpoint_is_cancelled_when_its_client_leaves(anyio_backend: str) -> None:
    class Asked:
        def __init__(self, *kinds: str) -> None:
            self.kinds = [*kinds]

        async def receive(self) -> dict[str, str]:
            if not self.kinds:
                await anyio.sleep_forever()
            return {"type": self.kinds.pop(0)}

    @with_cancellation
    async def endpoint(body: str, raw_request: Asked) -> str:
        if body == "wrong":
            raise ValueError(body)
        if body == "long":
            await anyio.sleep_forever()
        return body

    assert await endpoint("short", Asked()) == "short"
    assert await endpoint("long", raw_request=Asked("http.request", "http.disconnect")) is None
    with pytest.raises(ValueError, match="wrong"):
        await endpoint("wrong", Asked())
    assert endpoint.__name__ == "endpoint"


def test_more_files_may_be_open_up_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        set_ulimit(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
        set_ulimit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600, "never fewer"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
