"""`Wiring`: the links of a running tree, made and made again.

Owns which links there are and of which generation. A link is made when all its ends are configured. Of two ends that
start at the same time, the later one therefore makes it. Every making is a new generation with rings of its own, for all
its ends; nothing of an old one is used again. Used by the supervisor, on the engine's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from actorllm.actors.link import connect_in_memory
from actorllm.actors.topology import LinkSpec
from actorllm.errors import ActorLLMError
from actorllm.ring.channel import LinkEnds, create_link
from actorllm.supervision.children import Child, LocalChild


class Wiring:
    """children: the ends, by name; kept up to date by its owner."""

    def __init__(self, children: Mapping[str, Child], links: Iterable[LinkSpec] = ()) -> None:
        self._children = children
        self._links = {link.name: link for link in links}
        self._generations: dict[str, int] = {}
        self._lost: set[str] = set()
        """Links of which an end has died since they were made."""

    @property
    def generations(self) -> dict[str, int]:
        """Of the links that were made so far."""
        return dict(self._generations)

    def is_current(self, name: str, generation: int) -> bool:
        """Whether a link of this generation was made last, and its ends live as far as is known."""
        return self._generations.get(name) == generation and name not in self._lost

    def add(self, link: LinkSpec) -> None:
        """One more, made now if its ends are there. Raises SharedMemoryError or OSError."""
        self._links[link.name] = link
        self._make_if_ready(link)

    def connect(self, *names: str, without: Iterable[str] = ()) -> None:
        """Make every link of these actors whose ends are all there, but for those of others; all or none.

        Raises as `add`.
        """
        others = set(without)
        self._make_if_ready(*(link for link in self._of(names) if not others & set(link.ends)))

    def peers_of(self, names: Iterable[str]) -> set[str]:
        """The actors at the other ends of their links."""
        wanted = set(names)
        return {end for link in self._of(wanted) for end in link.ends} - wanted

    def lose(self, names: Iterable[str], error: ActorLLMError) -> None:
        """These actors are dead: the other ends of their links hear it."""
        gone = set(names)
        for link in self._of(gone):
            self._lost.add(link.name)
            self._tell(link, error, except_for=gone)

    def forget(self, name: str, error: ActorLLMError) -> None:
        """As `lose`, and there will be no such actor again."""
        for link in self._of((name,)):
            self._tell(link, error, except_for={name})
            del self._links[link.name]
            self._generations.pop(link.name, None)
            self._lost.discard(link.name)

    def drop(self, name: str, generation: int, error: ActorLLMError) -> None:
        """A link is corrupt: all its ends hear it, unless it has been replaced."""
        link = self._links.get(name)
        if link is not None and self._generations.get(name) == generation:
            self._tell(link, error, except_for=set())

    def _of(self, names: Iterable[str]) -> list[LinkSpec]:
        wanted = set(names)
        return [link for link in self._links.values() if wanted & set(link.ends)]

    def _tell(self, link: LinkSpec, error: ActorLLMError, except_for: set[str]) -> None:
        generation = self._generations.get(link.name)
        if generation is None:
            return
        # Of a broadcast the hub loses the whole; spokes are no peers of each other.
        ends = link.ends if not except_for or link.hub in except_for else (link.hub,)
        for end in ends:
            child = None if end in except_for else self._children.get(end)
            if child is not None and child.is_linkable:  # one that is started again does not know the link yet
                child.lose(link.name, generation, error)

    def _make_if_ready(self, *links: LinkSpec) -> None:
        """All of those whose ends are there (the last end to start makes the others), or none when one cannot be made."""
        ready = [link for link in links if all(self._children[name].is_linkable for name in link.ends)]
        made: list[LinkEnds | None] = []
        try:
            made.extend(self._rings(link) for link in ready)
        except BaseException:
            for rings in filter(None, made):
                for ring_end in (rings.hub, *rings.spokes):
                    ring_end.close()
            raise
        for link, ends in zip(ready, made, strict=True):
            self._install(link, ends)

    def _rings(self, link: LinkSpec) -> LinkEnds | None:
        """Of its next generation. None: it needs none."""
        if all(isinstance(self._children[name], LocalChild) for name in link.ends):
            return None
        generation = self._generations.get(link.name, 0) + 1
        return create_link(link.capacity_down, link.capacity_up, len(link.spokes), generation)

    def _install(self, link: LinkSpec, made: LinkEnds | None) -> None:
        children = [self._children[name] for name in link.ends]
        generation = self._generations[link.name] = self._generations.get(link.name, 0) + 1
        self._lost.discard(link.name)
        infos = link.infos({child.spec.name: child.spec.rank for child in children}, generation)
        if made is None:
            for child, end in zip(children, connect_in_memory(infos), strict=True):
                assert isinstance(child, LocalChild)
                child.install(end)
            return
        ring_ends = deque((made.hub, *made.spokes))
        try:
            for child, info in zip(children, infos, strict=True):
                child.install_ring(info, ring_ends.popleft())
        finally:
            for ring_end in ring_ends:
                ring_end.close()
