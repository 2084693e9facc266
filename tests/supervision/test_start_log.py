"""What the log says of the start of an engine, for those who want it."""

from __future__ import annotations

import logging
import threading

import pytest

from actorllm import AsyncLLM, EngineArgs, LLMEngine
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.supervision import start_log
from actorllm.supervision.start_log import StartLog

LOGGER = start_log.__name__


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig.from_arguments("storyteller", dtype="bfloat16")


async def test_a_start_is_told_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    arguments = {"topology": "inline", "num_threads": 1, "max_num_seqs": 3, "kv_cache_memory_bytes": 64 << 20}
    async with AsyncLLM("storyteller", **arguments) as llm:
        model, cache = llm.config.model, llm.config.cache
        assert cache.num_blocks is not None
        first, last = lines(caplog)
        assert first.startswith(f"loading {model.name} ({model.architecture}, {model.dtype}, ")
        assert first.endswith(f"MiB of weights) from {model.path}, for {llm.config.device}")
        assert last.startswith("loaded storyteller in ")
        assert "KV cache of 64.0 MiB for" in last
        assert f"{cache.num_blocks * cache.block_size:,} tokens" in last
        assert "MiB of weights in every step" in last
        assert last.endswith(f"context of {model.max_model_len:,} tokens, up to 3 sequences at a time")
        await llm.start()
        assert len(lines(caplog)) == 2


def test_so_it_is_without_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = LLMEngine.from_engine_args(EngineArgs("storyteller", topology="inline", num_threads=1))
    try:
        assert [line.split()[0] for line in lines(caplog)] == ["loading", "loaded"]
    finally:
        engine.shutdown()


def test_a_start_that_goes_on_is_told_again(
    config: EngineConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(start_log, "PERIOD_S", 0.001)
    is_told = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("still loading storyteller after "):
                is_told.set()

    handler = Handler()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        with pytest.raises(ConfigError):
            _start_in_vain(config, is_told)
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    assert not any(line.startswith("loaded") for line in lines(caplog))
    assert "actorllm:start" not in [thread.name for thread in threading.enumerate()]


def _start_in_vain(config: EngineConfig, is_told: threading.Event) -> None:
    with StartLog(lambda config, facts: config).around(config):
        assert is_told.wait(30)
        raise ConfigError("it does not start")


def test_nobody_who_does_not_listen_pays(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    with StartLog(lambda config, facts: config).around(config):
        assert "actorllm:start" not in [thread.name for thread in threading.enumerate()]
    assert not lines(caplog)
