"""`ServerState`: what the endpoints of one application share. It owns no engine: who made that, ends it.

It knows the streams of every request under way, by the id that its client was told, and how many there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from actorllm.async_llm import AsyncLLM
from actorllm.engine import Engine
from actorllm.errors import EngineDrainingError
from actorllm.server.envelope import ApiError
from actorllm.server.sampling import Defaults
from actorllm.stream import RequestStream


class ServerState:
    def __init__(
        self,
        llm: AsyncLLM,
        model_names: Sequence[str],
        defaults: Defaults,
        max_concurrent_requests: int | None,
        created: int,
    ) -> None:
        """created: when, in epoch seconds, which is what clients are told of the model."""
        self.llm = llm
        self.model_names = tuple(model_names)
        self.defaults = defaults
        self.created = created
        self.num_in_flight = 0
        self.is_draining = False
        """Nothing new is taken: a load balancer that asks for the health hears it."""
        self._max_concurrent_requests = max_concurrent_requests
        self._streams: dict[str, list[RequestStream]] = {}

    @property
    def engine(self) -> Engine:
        return self.llm._engine

    def decode(self, ids: list[int]) -> str:
        engine = self.engine
        return engine.tokenizer.decode(ids) if engine.config.model.tokenizer is not None else ""

    def check_model(self, name: str | None) -> str:
        """What answers call the model: as the request did. Raises ApiError for another one."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"model={name!r:.120} does not exist; this server has {', '.join(map(repr, self.model_names))}",
                "model",
            )
        return name

    def check_room(self) -> None:
        """Raises ApiError or EngineDrainingError when no request can be taken now."""
        if self.is_draining:
            raise EngineDrainingError("the server is about to end; send this request elsewhere")
        limit = self._max_concurrent_requests
        if limit is not None and self.num_in_flight >= limit:
            raise ApiError(
                429, f"{self.num_in_flight} requests are under way, and the limit is {limit}; try again later"
            )

    @contextlib.contextmanager
    def under_way(self, name: str, streams: Sequence[RequestStream]) -> Iterator[None]:
        """While a request is answered. Whatever is left of its streams then is aborted."""
        self.num_in_flight += 1
        mine = self._streams.setdefault(name, [])
        mine += streams
        try:
            yield
        finally:
            for stream in streams:
                stream.abort()
                mine.remove(stream)
            if not mine:
                self._streams.pop(name, None)
            self.num_in_flight -= 1

    def abort(self, names: Sequence[str] | None) -> int:
        """End requests by their ids, or all of them; each is answered with what there is. Returns how many were known."""
        chosen = list(self._streams) if names is None else [name for name in names if name in self._streams]
        for name in chosen:
            for stream in self._streams[name]:
                stream.abort()
        return len(chosen)
