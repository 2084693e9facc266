"""`ServerState`: what the endpoints of one application share. It owns no engine: the code that made the engine ends it.

It knows the streams of every request under way, by the id that its client was told, and how many there are. Where the
server has several API processes, it knows what to ask the others (`Peers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from actorllm.api.async_llm import AsyncLLM
from actorllm.client.engine import Engine
from actorllm.client.stream import RequestStream
from actorllm.clock import now
from actorllm.errors import ConfigError, EngineDrainingError, InvalidParameterError
from actorllm.server.board import Board
from actorllm.server.bodies.reader import BodyReader
from actorllm.server.envelope import ApiError
from actorllm.server.responses.kept import KeptResponses
from actorllm.server.sampling import Defaults
from actorllm.server.served_models import ServedModels

if TYPE_CHECKING:
    from actorllm.server.tracing import Tracing

LAG_PERIOD_S = 0.1
"""How often it is looked whether the loop is late, while requests are under way."""


class Peers:
    """The other API processes of the server, as one of them sees them. Here there are none."""

    async def abort(self, names: Sequence[str] | None) -> int:
        """End requests there, too; returns how many were known."""
        return 0

    async def supervisor(self) -> dict[str, Any] | None:
        """What the supervisor of the engine counts, where that is another process's."""
        return None

    async def kept(self, **arguments: Any) -> dict[str, Any] | None:
        """What another of them says of a response that it keeps (`outliving.elsewhere`); None: none keeps it."""
        return None


class ServerState:
    def __init__(
        self,
        llm: AsyncLLM,
        models: ServedModels,
        defaults: Defaults,
        max_concurrent_requests: int | None,
        created: int,
        tool_call_parser: str | None = None,
    ) -> None:
        """created: when, in epoch seconds, which is what clients are told of the model. tool_call_parser: as in `create_app`."""
        self.llm = llm
        self.models = models
        self.loading_adapter = anyio.Lock()
        self.plugin_turn = anyio.CapacityLimiter(1)
        """Of requests that are data of a plug-in, which reads one at a time."""
        self.decoding_turn = anyio.CapacityLimiter(2)
        """Of recordings that are decoded."""
        self.aligning_turn = anyio.CapacityLimiter(4)
        """Of threads that wait for the times of words."""
        self.defaults = defaults
        self.created = created
        self.is_draining = False
        """Nothing new is taken: a load balancer that asks for the health hears it."""
        self.logs_requests = False
        self.has_vllm_metrics = True
        self.tracing: Tracing | None = None
        self.peers = Peers()
        self.has_peers = False
        """Another API process may answer the next request of a client."""
        self.responses = KeptResponses()
        self.detached: set[object] = set()
        """Tasks of streams that outlive their readers."""
        self.board = Board(1)
        self.bodies = BodyReader()
        self._tool_call_parser = tool_call_parser
        self._has_read_templates = False
        self._row = 0
        self._num_in_flight = 0
        self._busy = anyio.Event()
        self._max_concurrent_requests = max_concurrent_requests
        self._streams: dict[str, list[RequestStream]] = {}

    def read_templates(self) -> None:
        """Learn from the model's chat templates how it is shown tools and calls them. Reads files, when called first."""
        if self._has_read_templates:
            return
        self.defaults = self.defaults.with_templates(self.llm.config.model.tokenizer, self._tool_call_parser)
        self._has_read_templates = True

    async def know_templates(self) -> None:
        """As `read_templates`, away from the loop."""
        if not self._has_read_templates:
            await to_thread.run_sync(self.read_templates)

    def join(self, board: Board, row: int, peers: Peers) -> None:
        """Be one of several API processes. Called before the first request."""
        self.board, self._row, self.peers, self.has_peers = board, row, peers, True

    @property
    def num_in_flight(self) -> int:
        """Requests under way, of all API processes together."""
        return self.board.num_in_flight

    @property
    def engine(self) -> Engine:
        return self.llm._engine

    def decode(self, ids: list[int]) -> str:
        engine = self.engine
        return engine.prompts.tokenizer.decode(ids) if engine.config.model.tokenizer is not None else ""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of the engine's model, without its adapters."""
        return self.models.names

    def check_model(self, name: str | None, tag: str = "") -> str:
        """As `ServedModels.check`."""
        return self.models.check(name, tag)

    async def load_adapters(self) -> None:
        """Have the workers read the adapters that the server begins with. Raises ConfigError for one that does not fit."""
        for adapter in list(self.models.adapters.values()):
            try:
                await self.llm.add_lora(adapter)
            except InvalidParameterError as error:
                raise ConfigError(f"lora_modules: {adapter.lora_name!r}: {error}") from error

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """While the body of a request is read: it takes a place before that, so that what is not answered is not read either.

        Raises ApiError or EngineDrainingError when no request can be taken now, the latter also when the body is here.
        """
        self._check_open()
        limit = self._max_concurrent_requests
        if limit is not None and (number := self.num_in_flight) >= limit:
            raise ApiError(429, f"{number} requests are under way, and the limit is {limit}; try again later")
        self._count(1)
        try:
            yield
            self._check_open()
        finally:
            self._count(-1)

    def _check_open(self) -> None:
        if self.is_draining:
            raise EngineDrainingError("the server is about to end; send this request elsewhere")

    @contextlib.contextmanager
    def under_way(self, name: str, streams: Sequence[RequestStream]) -> Iterator[None]:
        """While a request is answered. Whatever is left of its streams then is aborted."""
        self._count(1)
        mine = self._streams.setdefault(name, [])
        mine += streams
        try:
            yield
        finally:
            for stream in streams:
                stream.abort()
            gone = set(map(id, streams))
            mine[:] = [stream for stream in mine if id(stream) not in gone]
            if not mine:
                self._streams.pop(name, None)
            self._count(-1)

    def _count(self, difference: int) -> None:
        self._num_in_flight += difference
        self.board.set_in_flight(self._row, self._num_in_flight)
        if difference > 0 and self._num_in_flight == 1:
            self._busy.set()

    async def watch_lag(self) -> None:
        """Note how late the loop comes to what is due, while requests are under way; else it sleeps. Never returns."""
        while True:
            if not self._num_in_flight:
                self._busy = anyio.Event()
                await self._busy.wait()
            due = now() + LAG_PERIOD_S
            await anyio.sleep(LAG_PERIOD_S)
            self.board.note_lag(self._row, max(0.0, now() - due))

    def names_by_number(self) -> dict[int, str]:
        """What the clients of requests under way call them, by the number that the engine has for each sequence."""
        return {
            rid: name for name, streams in self._streams.items() for stream in streams for rid in stream.mailbox.rids
        }

    def abort(self, names: Sequence[str] | None) -> int:
        """End requests by their ids, or all of them; each is answered with what there is. Returns how many were known."""
        chosen = list(self._streams) if names is None else [name for name in names if name in self._streams]
        for name in chosen:
            for stream in self._streams[name]:
                stream.abort()
        return len(chosen)
