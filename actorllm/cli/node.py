"""`actorllm node`: replicas on this machine for engines on others (docs/nodes.md)."""

from __future__ import annotations

import logging
import math
import signal
import ssl
import sys
from pathlib import Path


def node(
    *,
    listen: str,
    key_file: Path,
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
    node_timeout_s: float = 3.0,
    once: bool = False,
) -> None:
    """Start replicas on this machine for engines that run on others, which name it in `nodes`. SIGTERM moves their requests first.

    Parameters
    ----------
    listen
        One address of this machine and a port, as HOST:PORT, that the engines can reach and others cannot.
    key_file
        The key that engines have to know (their node_key_file), of mode 0600: (umask 077; openssl rand -hex 32 > FILE)
    tls_certificate
        A certificate for HOST, in PEM: engines come by TLS, and have node_ca_file.
    tls_key
        Its private key; left out, it is in the same file.
    node_timeout_s
        Seconds after which an engine from which nothing comes is gone, and its replicas end.
    once
        End when the last engine has left, in place of waiting for the next one.
    """
    import anyio

    from actorllm.actors.engine_thread import run_loop
    from actorllm.config import MIN_NODE_TIMEOUT_S
    from actorllm.errors import ConfigError
    from actorllm.fleet.nodes.agent import NodeAgent
    from actorllm.fleet.nodes.handshake import read_key
    from actorllm.fleet.nodes.hosts import NodeAddress, read_address
    from actorllm.fleet.nodes.time_slice import ask_for_short_slices

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if not MIN_NODE_TIMEOUT_S <= node_timeout_s < math.inf:
        raise ConfigError(f"node_timeout_s={node_timeout_s!r} must be at least {MIN_NODE_TIMEOUT_S:g} seconds")
    address, key, tls = read_address(listen, "listen"), read_key(key_file), None
    if tls_certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            tls.load_cert_chain(tls_certificate, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_certificate={str(tls_certificate)!r} cannot be used: {error}") from error
    agent = NodeAgent(key, tls=tls, timeout_s=node_timeout_s, is_owned=once)

    def tell(bound: NodeAddress) -> None:
        print(f"listening on {bound}", flush=True)

    async def main() -> None:
        ask_for_short_slices()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow_signals)
            await agent.run(address, tell)
            tasks.cancel_scope.cancel()

    async def follow_signals() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                agent.leave()

    run_loop(main)
