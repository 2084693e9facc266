"""A server has its place, or says why not, before anything is loaded; nobody connects before somebody answers."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import ConfigError
from actorllm.server.listener import Bound, Listener
from tests.server.certificates import certified


@contextlib.contextmanager
def closing(bound: Bound) -> Iterator[Bound]:
    try:
        yield bound
    finally:
        bound.close()


def free_port(family: int = socket.AF_INET) -> int:
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"port": 70000}, r"port=70000 must be between 0 .* and 65535"),
        ({"port": -1}, r"port=-1 must be between 0"),
        ({"unix_socket": ""}, "must be a path"),
        ({"unix_socket_mode": 0o1000}, r"unix_socket_mode=0o1000 must be between"),
        ({"log_level": "inf"}, r"log_level='inf' must be one of .*info"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout=nan"),
        ({"host": "192.0.2.1"}, r"http://192.0.2.1:8000: .*no such address"),
        ({"host": "no.such.host.invalid"}, r"http://no.such.host.invalid:8000"),
        ({"host": "x" * 80}, "cannot listen on"),
        ({"unix_socket": "/tmp/" + "x" * 200}, r"205 bytes, and the most is 107"),
        ({"unix_socket": "/no/such/folder/socket"}, "its folder does not exist"),
        ({"unix_socket": "/tmp"}, "in use .what is there is no socket"),
    ],
)
def test_what_cannot_be_is_told_with_its_value(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Listener(**options).bind()


def test_certificates_are_tried(tmp_path: Path) -> None:
    key, certificate = certified(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = certified(tmp_path / "other")
    encrypted, nothing = tmp_path / "encrypted.pem", tmp_path / "empty.pem"
    encrypt = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(encrypt, check=True, capture_output=True)
    nothing.touch()
    good = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    assert Listener(**good, ssl_ca_certs=str(certificate), ssl_cert_reqs=2).tls()["ssl_cert_reqs"] == 2
    assert Listener().tls() == {}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "ssl_keyfile": str(other)}, "the key is not that of the certificate"),
        ({**good, "ssl_keyfile": str(tmp_path / "no")}, r"ssl_keyfile='.*/no': TLS cannot be set up .*No such file"),
        ({**good, "ssl_certfile": str(tmp_path)}, r"ssl_certfile=.*TLS cannot be set up .*directory"),
        ({**good, "ssl_certfile": str(nothing)}, "in the PEM format"),
        ({**good, "ssl_keyfile": str(encrypted)}, "encrypted"),
        ({**good, "ssl_ca_certs": str(nothing)}, "ssl_ca_certs=.*in the PEM format"),
        ({**good, "ssl_cert_reqs": 3}, r"ssl_cert_reqs=3 must be one of 0"),
        ({**good, "ssl_cert_reqs": 2}, "ssl_cert_reqs=2 needs ssl_ca_certs"),
        ({"ssl_keyfile": str(key)}, "TLS needs ssl_certfile"),
        ({"ssl_cert_reqs": 1}, "TLS needs ssl_certfile"),
    ]
    for options, told in wrong:
        with pytest.raises(ConfigError, match=told):
            Listener(**options).tls()


def connect(bound: Bound) -> socket.socket:
    (first, *_) = bound.sockets
    made = socket.socket(first.family)
    try:
        made.connect(first.getsockname())
    except BaseException:
        made.close()
        raise
    return made


@pytest.mark.parametrize("port", [0, None])
def test_connections_are_refused_until_it_listens(port: int | None) -> None:
    listener = Listener(port=free_port() if port is None else port)
    with closing(listener.bind()) as bound:
        taken = Listener(port=bound.sockets[0].getsockname()[1])
        for place in (taken, Listener(host="0.0.0.0", port=taken.port)):
            with pytest.raises(ConfigError, match=r"in use .another program has it"):
                place.bind()
        with pytest.raises(ConnectionRefusedError):
            connect(bound)
        bound.listen()
        with connect(bound):
            accepted, _ = bound.sockets[0].accept()
            accepted.close()  # first, so that the connection lingers here
        with pytest.raises(ConfigError, match="in use"):
            taken.bind()
    with closing(taken.bind()) as again:
        again.listen()
        connect(again).close()


def at_once(number: int, run: Callable[[], Bound]) -> tuple[list[Bound], list[ConfigError]]:
    """What so many threads get that begin together."""
    barrier = threading.Barrier(number)
    made: list[Bound] = []
    refused: list[ConfigError] = []

    def one() -> None:
        barrier.wait()
        try:
            made.append(run())
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made, refused


@pytest.mark.parametrize("is_unix", [False, True])
def test_of_several_that_begin_at_once_one_has_the_place(is_unix: bool, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(20):
        if is_unix:
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(str(path))  # of a server that was killed
            listener = Listener(unix_socket=str(path))
        else:
            listener = Listener(port=free_port())
        made, refused = at_once(6, listener.bind)
        try:
            assert (len(made), len(refused)) == (1, 5)
            made[0].listen()
            connect(made[0]).close()
        finally:
            for bound in made:
                bound.close()
    assert not path.exists()


@pytest.mark.parametrize("host", ["localhost", "", "0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("port", [0, None])
def test_hosts_by_name(host: str, port: int | None) -> None:
    with closing(Listener(host=host, port=free_port() if port is None else port).bind()) as bound:
        bound.listen()
        ports = {each.getsockname()[1] for each in bound.sockets}
        assert len(ports) == 1
        socket.create_connection(("127.0.0.1", *ports)).close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_addresses_of_ipv6(host: str) -> None:
    listener = Listener(host=host, port=0)
    with closing(listener.bind()) as bound:
        bound.listen()
        port = bound.sockets[0].getsockname()[1]
        assert listener.place(bound) == f"http://[{host.strip('[]')}]:{port}"
        socket.create_connection(("::1", port)).close()
        if host == "::":
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize("umask", [0, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_unix_socket_has_its_mode_before_anybody_can_connect(mode: int, umask: int, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    old = os.umask(umask)
    try:
        options = {} if mode == 0o600 else {"unix_socket_mode": mode}
        bound = Listener(unix_socket=str(path), **options).bind()
    finally:
        os.umask(old)
    with closing(bound):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        with pytest.raises(ConnectionRefusedError):
            connect(bound)
        with pytest.raises(ConfigError, match="in use"):  # it does not listen yet, and is no stale one
            Listener(unix_socket=str(path)).bind()
        bound.listen()
        connect(bound).close()
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not path.exists()


def test_a_path_that_has_become_another_ones_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with closing(Listener(unix_socket=str(path)).bind()) as first:
        path.unlink()
        with closing(Listener(unix_socket=str(path)).bind()) as second:
            second.listen()
            first.close()
            connect(second).close()
    assert not path.exists()
