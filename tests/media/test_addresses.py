"""Where items may be: files and hosts are off unless allowed, and what is allowed leads nowhere else."""

from __future__ import annotations

import base64
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import ConfigError, InvalidPromptError
from actorllm.intake.media import addresses
from actorllm.intake.media.addresses import Allowed, content_of, is_public
from actorllm.types.media_rules import MediaRules

CONTENT = b"what is there"


def told(address: str, allowed: Allowed) -> str:
    with pytest.raises(InvalidPromptError, match=r"^image 3: ") as caught:
        content_of(address, allowed, "image 3")
    return str(caught.value)


def test_a_data_address_is_always_read() -> None:
    address = "data:image/png;base64," + base64.b64encode(CONTENT).decode()
    assert content_of(address, Allowed(), "image 0") == CONTENT


@pytest.mark.parametrize(
    "address", ["http://a.example/x", "https://a.example/x", "file:///etc/passwd", "ftp://x/y", "", "x"]
)
def test_all_else_is_off(address: str) -> None:
    assert "allowed_local_media_path" in told(address, Allowed())


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "open").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "open" / "a file").write_bytes(CONTENT)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "open" / "inner").symlink_to(tmp_path / "open" / "a file")
    (tmp_path / "open" / "loop").symlink_to(tmp_path / "open" / "loop")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path / "open"


def test_files_below_the_folder_are_read(folder: Path) -> None:
    allowed = Allowed(str(folder))
    for name in ("a%20file", "inner", "./a%20file", "../open/a%20file"):
        assert content_of(f"file://{folder}/{name}", allowed, "image 0") == CONTENT
    assert content_of(f"file://localhost{folder}/inner", allowed, "image 0") == CONTENT


@pytest.mark.parametrize("name", ["../secret", "%2e%2e/secret", "link", "missing", "pipe", ".", "loop", "a%00b"])
def test_what_lies_elsewhere_is_as_if_missing(folder: Path, name: str) -> None:
    assert "no file below" in told(f"file://{folder}/{name}", Allowed(str(folder)))


def test_a_file_has_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MAX_BYTES", 5)
    assert "more than" in told(f"file://{folder}/inner", Allowed(str(folder)))
    assert "names a host" in told(f"file://host{folder}/inner", Allowed(str(folder)))


# Hosts


class Pages(http.server.BaseHTTPRequestHandler):
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.headers["Host"].partition(":")[0], self.path))
        if self.path == "/good":
            self._send(200, CONTENT)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        else:
            self._send(404, b"")

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """On this machine; two hosts of the public network are said to be there, and a third one of a private network."""
    Pages.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hosts = {"a.example": "93.184.215.14", "b.example": "93.184.215.15", "inside.example": "10.0.0.1"}

    known = socket.getaddrinfo

    def look_up(host: str, port: int, *given: Any, **named: Any) -> list[Any]:
        if host == "127.0.0.1":
            return known(host, port, *given, **named)
        if host not in hosts:
            raise socket.gaierror("no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (hosts[host], port))]

    connect = socket.create_connection

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address[0].startswith("93.184.215.")  # which was looked at, and not looked up again
        return connect(("127.0.0.1", address[1]), timeout)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


HOSTS = Allowed(domains=("a.example", "b.example", "inside.example", "missing.example"))


def test_allowed_hosts_are_asked(server: int) -> None:
    assert content_of(f"http://A.example:{server}/good", HOSTS, "image 0") == CONTENT
    far = f"http://a.example:{server}/to/http://b.example:{server}/good"
    assert content_of(far, HOSTS, "image 0") == CONTENT
    assert Pages.asked[-1] == ("b.example", "/good")
    assert content_of(f"http://a.example:{server}/to//good", HOSTS, "image 0") == CONTENT


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("http://c.example:{0}/good", "'c.example' is not one of"),
        ("http://a.example.c.example:{0}/good", "is not one of"),
        ("http://127.0.0.1:{0}/good", "is not one of"),
        ("http://inside.example:{0}/good", "private network"),
        ("http://missing.example:{0}/good", "could not be asked"),
        ("http://me:word@a.example:{0}/good", "user name"),
        ("http://a.example:{0}/to/http://127.0.0.1:{0}/good", "is not one of"),
        ("http://a.example:{0}/to/http://inside.example:{0}/good", "private network"),
        ("http://a.example:{0}/to/file:///etc/passwd", "is not one of"),
        ("http://a.example:{0}/missing", "status 404"),
        ("http://a.example:{0}/short", "less than it said"),
        ("http://a.example:{0}/with space", "must be encoded"),
        ("http://a.example:x/good", "is no address"),
        ("http://[a.example/good", "is no address"),
        ("http://a.example@c.example:{0}/good", "is not one of"),
        ("http://c.example\\@a.example:{0}/good", ""),
    ],
)
def test_what_leads_elsewhere_is_refused(server: int, address: str, part: str) -> None:
    assert part in told(address.format(server), HOSTS)
    assert all(host != "127.0.0.1" and path != "/good" for host, path in Pages.asked)


def test_redirects_bytes_and_seconds_are_bounded(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = f"http://a.example:{server}" + "/to/" * 5 + "/good"
    assert "redirects" in told(chain, HOSTS)
    monkeypatch.setattr(addresses, "MAX_BYTES", 5)
    assert "more than 5 bytes" in told(f"http://a.example:{server}/good", HOSTS).replace(str(32 << 20), "5")
    monkeypatch.setattr(addresses, "FETCH_TIMEOUT_S", -1.0)
    assert "longer than" in told(f"http://a.example:{server}/good", HOSTS)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::a00:1",
    ],
)
def test_private_addresses_are_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e"])
def test_public_addresses_are_known(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"allowed_local_media_path": "/no/such/folder"}, "'/no/such/folder' must be a folder"),
        ({"allowed_media_domains": "a.example"}, "must be a list"),
        ({"allowed_media_domains": ["http://a.example"]}, "no host name"),
        ({"allowed_media_domains": ["*.example"]}, "no host name"),
        ({"allowed_media_domains": [7]}, "no host name"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], part: str) -> None:
    nothing = dict.fromkeys(
        ("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path", "allowed_media_domains")
    )
    with pytest.raises(ConfigError) as caught:
        MediaRules.read("LlamaForCausalLM", {}, nothing | arguments)
    assert part in str(caught.value)


def test_a_limit_may_be_given_as_vllm_has_it_with_sizes() -> None:
    given: dict[str, Any] = dict.fromkeys(("mm_processor_kwargs", "allowed_local_media_path", "allowed_media_domains"))
    for limit, count in (({"count": 2, "width": 512}, 2), ({"height": 512}, 8), (3, 3)):
        limits = {"image": limit, "video": 0}
        rules = MediaRules.read(
            "LlavaForConditionalGeneration", {"image_token_index": 4}, given | {"limit_mm_per_prompt": limits}
        )
        assert rules is not None
        assert rules.max_items == count
    for wrong in ({"count": "2"}, {"count": 2, "colour": 3}):
        with pytest.raises(ConfigError, match="must be a count"):
            MediaRules.read("LlavaForConditionalGeneration", {}, given | {"limit_mm_per_prompt": {"image": wrong}})
