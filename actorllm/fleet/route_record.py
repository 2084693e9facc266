"""Recordings of a router: what it was shown and what it chose, and their exact replay.

With `record="run.rec"` a fleet writes the decisions of its router to "run-router.rec", a line of JSON for each, beside the
recordings of its replicas. `replay_routes` asks a new router the same questions in the same order. The decisions must be the same,
since routers have no clock and no other input.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from actorllm.actors.private_file import open_private
from actorllm.errors import ConfigError
from actorllm.scheduling.router import LinearSteps, ReplicaView, Routable, Router, make_router, number_of
from actorllm.types.objective import SLO

VERSION = 3
READABLE = (1, 2, VERSION)
"""Version 1 knows of no prefix caches, and 2 of no decisions that failed."""


def record_path(record: str | os.PathLike[str]) -> Path:
    """Where the decisions go, of what `record` names."""
    path = Path(record)
    return path.with_name(f"{path.stem}-router{path.suffix}")


class RecordedRouter:
    """A router that writes its decisions down. Raises OSError and ConfigError when the file cannot be written."""

    def __init__(self, router: Router, name: str, record: str | os.PathLike[str]) -> None:
        """name: by which `make_router` knows it. record: as the engine's argument."""
        self._router = router
        self._file: IO[bytes] = open_private(record_path(record))
        self._write({"version": VERSION, "router": name})

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        shown = [_view_to_tree(view, request) for view in views]
        seen = tuple(_with_found(view, tree["num_found"]) for view, tree in zip(views, shown, strict=True))
        asked = {"request": _request_to_tree(request), "views": shown}
        try:
            number = number_of(self._router.route(request, seen), seen)
        except (
            Exception
        ) as error:  # of the application's own code: the dispatcher tells of it, and a replay fails there, too
            self._write({**asked, "failed": repr(error)})
            raise
        self._write({**asked, "chosen": number})
        return number

    def forget(self, number: int) -> None:
        """A replica lost its cache."""
        forget = getattr(self._router, "forget", None)
        if forget is not None:
            forget(number)
            self._write({"forget": number})

    def close(self) -> None:
        """The last line is written. Idempotent."""
        self._file.close()

    def _write(self, tree: dict[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(orjson.dumps(tree) + b"\n")


class RouteReplay(NamedTuple):
    """What a replay found. A decision that failed is one that chose nothing."""

    num_decisions: int
    differing: list[int]
    """The decisions that were other ones, by their place in the recording."""


def replay_routes(path: str | os.PathLike[str]) -> RouteReplay:
    """Ask a new router of the same name what the recorded one was asked.

    A last line without an end is left out: its program was killed while it was written.

    Arguments:
        path: of a recording, as `record_path` names it.

    Raises:
        ConfigError: it is no recording, of another version, or of a router that cannot be made.
        OSError: it cannot be read.
    """
    differing: list[int] = []
    num_decisions = 0
    router: Router | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if router is not None and not line.endswith(b"\n"):
                break
            try:
                entry = orjson.loads(line)
                if router is None:
                    if entry["version"] not in READABLE:
                        raise ConfigError(
                            f"{path}: a recording of version {entry['version']!r:.20}; this reads {READABLE}"
                        )
                    router = make_router(entry["router"])
                elif "forget" in entry:
                    router.forget(entry["forget"])  # type: ignore[attr-defined]
                else:
                    views = tuple(_view_from_tree(view) for view in entry["views"])
                    request = _request_from_tree(entry["request"])
                    chosen = None if "failed" in entry else entry["chosen"]
                    if not any(view.number == chosen for view in views):  # earlier versions wrote what named none
                        chosen = None
                    try:
                        found = number_of(router.route(request, views), views)
                    except Exception:  # of the application's own code, as when it was recorded, or not
                        found = None
                    if found != chosen:
                        differing.append(num_decisions)
                    num_decisions += 1
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{path}, line {number}: no line of a recording of routes ({error!r:.200})"
                ) from error
    if router is None:
        raise ConfigError(f"{path} is empty: no recording of routes")
    return RouteReplay(num_decisions, differing)


def _request_to_tree(request: Routable) -> dict[str, Any]:
    return {
        **asdict(request),
        "block_hashes": request.block_hashes.hex(),
        "slo": None if request.slo is None else request.slo.to_fields(),
    }


def _request_from_tree(tree: dict[str, Any]) -> Routable:
    return Routable(
        **{**tree, "block_hashes": bytes.fromhex(tree["block_hashes"]), "slo": SLO.from_fields(tree["slo"])}
    )


VIEW_FIELDS = (
    *("number", "num_running", "num_waiting", "num_waiting_tokens", "num_context", "num_free_blocks"),
    *("block_size", "max_num_batched_tokens", "max_num_seqs", "is_on_trial", "seen"),
)


def _view_to_tree(view: ReplicaView, request: Routable) -> dict[str, Any]:
    steps = view.step_seconds
    tree = {name: getattr(view, name) for name in VIEW_FIELDS}
    tree["num_found"] = None if view.find is None else view.find(request.block_hashes)
    return {**tree, "step_seconds": steps.weights if isinstance(steps, LinearSteps) else None}


def _with_found(view: ReplicaView, num_found: int | None) -> ReplicaView:
    """As the recording has it: what a cache has may change while the router thinks."""
    return view if num_found is None else replace(view, find=lambda _: num_found)


def _view_from_tree(tree: dict[str, Any]) -> ReplicaView:
    weights, num_found = tree.pop("step_seconds"), tree.pop("num_found", None)
    view = ReplicaView(**tree, step_seconds=None if weights is None else LinearSteps(tuple(weights)))
    return _with_found(view, num_found)
