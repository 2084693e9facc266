"""Which network interface leads to another machine: gloo has to be told, where ranks are on several. Free of torch."""

from __future__ import annotations

import fcntl
import socket
import struct
from urllib.parse import urlsplit

SIOCGIFADDR = 0x8915
"""Of Linux: the address of an interface."""
PORT = 9
"""Any: nothing is sent."""


def host_and_port(url: str) -> tuple[str, int]:
    """Of "tcp://host:port"."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def interface_to(host: str) -> str | None:
    """The name of the interface whose address this machine has towards a host; None: it is not known, as of IPv6."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, PORT))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no such address
                    continue
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    except OSError:
        return None
    return None
