"""What is wrong with the options of `actorllm serve` is told before a model is loaded, in one line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM
from actorllm.cli import main, serve


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts of an engine, which fail here."""
    found: list[str] = []

    async def start(llm: AsyncLLM) -> None:
        found.append(llm.config.model.name)
        raise AssertionError("the engine is started")

    monkeypatch.setattr(AsyncLLM, "start", start)
    return found


def status_of(*options: str) -> Any:
    try:
        return main(["serve", "storyteller", *options])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "70000"], "port=70000 must be between 0 (any that is free) and 65535"),
        (["--host", "192.0.2.1"], "this machine has no such address"),
        (["--ssl-certfile", "/no"], "ssl_certfile='/no': TLS cannot be set up"),
        (["--ssl-cert-reqs", "7"], "ssl_cert_reqs=7 must be one of"),
        (["--uds", "/no/socket"], "its folder does not exist"),
        (["--uds", "/tmp/x", "--unix-socket-mode", "888"], "--unix-socket-mode 888 must be an octal number"),
        (["--uds", "/tmp/x", "--unix-socket-mode", "-1"], "--unix-socket-mode -1 must be an octal number"),
        (["--unix-socket-mode", "660"], "--unix-socket-mode 660 is for --unix-socket"),
        (["--uvicorn-log-level", "loud"], "log_level='loud' must be one of"),
    ],
)
def test_bad_options(
    options: list[str], told: str, number: str, starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("--api-processes", number, *options) == 2
    captured = capsys.readouterr().err
    assert told in captured
    assert "Traceback" not in captured
    assert not starts


@pytest.mark.parametrize("number", ["1", "2"])
def test_places_of_others(number: str, tmp_path: Path, starts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "socket"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(str(path))
        unix.listen()
        for options in (["--port", str(tcp.getsockname()[1])], ["--unix-socket", str(path)]):
            assert status_of("--api-processes", number, *options) == 2
            assert "Address already in use" in capsys.readouterr().err
    assert not starts


@pytest.mark.parametrize("number", ["1", "2"])
def test_an_engine_that_does_not_start_gives_the_place_back(number: str, tmp_path: Path, starts: list[str]) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        with pytest.raises(AssertionError, match="the engine is started"):
            status_of("--api-processes", number, "--unix-socket", str(path))
        assert not path.exists()
    assert starts == ["storyteller"] * 2


def test_a_key_of_the_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also vLLM's: a deployment that is moved here must not stand open."""
    for name in serve.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert serve.keys_of_environment() is None
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert serve.keys_of_environment() == ["theirs"]
    monkeypatch.setenv("ACTORLLM_API_KEY", "ours")
    assert serve.keys_of_environment() == ["ours"]
