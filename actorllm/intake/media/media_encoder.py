"""`MediaEncoder`: the encoder actor. It makes rows of images beside the steps of the engine, and keeps those of the latest.

One thread takes the images one after the other. With topology="process" the tower is in a process of its own. The thread starts it
with the first image, watches it, and starts it again when it ends or takes too long. An image is tried MAX_TRIES times; then
the requests with it fail, and no other. With topology="inline" the thread itself computes.

Images are told apart by their digest: of several requests with one image, one encodes it. An image that no request wants any
more is not encoded.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from actorllm.clock import now
from actorllm.errors import ActorLLMError, EngineShutdownError, InvalidPromptError, RequestFailedError, without_frames
from actorllm.intake.intake_process import IntakeProcess, ProcessEndedError
from actorllm.intake.media import encoder_program
from actorllm.intake.media.towers import Tower, new_tower
from actorllm.messages import U8

if TYPE_CHECKING:
    from actorllm.config import EngineConfig

logger = logging.getLogger(__name__)

MAX_CACHE_BYTES = 256 << 20
"""Of the rows that are kept."""
MAX_TRIES = 3
"""Deaths of the process at one image, until the requests with it fail."""
LOAD_TIMEOUT_S = 600.0
ENCODE_TIMEOUT_S = 120.0
MAX_ROW_BYTES = 1 << 30
"""Most that the process may answer."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaTensors:
    """What the tower gets of one image: arrays by the names of its arguments."""

    digest: str
    arrays: dict[str, Any]


class Waiting(Protocol):
    """Where it is waited for rows, a `tokenization.Workplace`."""

    def wait(self, future: Future[U8]) -> U8:
        """The result of another thread. Raises what it raised, or that nothing waits for it any more."""


@dataclass(eq=False, slots=True)
class Encoding:
    """One image that requests wait for."""

    image: MediaTensors
    future: Future[U8] = field(default_factory=Future)
    num_waiting: int = 0


class MediaEncoder:
    """See the module docstring. All methods may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._encodings: dict[str, Encoding] = {}
        """By digest, those that wait or are computed."""
        self._rows: OrderedDict[str, U8] = OrderedDict()
        """The latest, by digest."""
        self._num_bytes = 0
        self._queue: queue.SimpleQueue[Encoding | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._tower: Tower | None = None
        self._is_closed = False
        self._counts = dict.fromkeys(("encoded", "hits", "dropped", "failed", "restarts"), 0)
        self._seconds = 0.0

    def renewed(self) -> MediaEncoder:
        """Another one that nothing has asked yet."""
        return MediaEncoder(self._config)

    def encode(self, image: MediaTensors, workplace: Waiting | None) -> U8:
        """The rows of an image, in the bytes of the model's dtype. Raises what makes its request fail.

        workplace: where it is waited for them; None: on this thread.
        """
        with self._lock:
            if self._is_closed:
                raise EngineShutdownError("the engine was shut down")
            if (rows := self._rows.get(image.digest)) is not None:
                self._rows.move_to_end(image.digest)
                self._counts["hits"] += 1
                return rows
            encoding = self._encodings.get(image.digest)
            if encoding is None:
                encoding = self._encodings[image.digest] = Encoding(image)
                self._ensure_thread()
                self._queue.put(encoding)
            else:
                self._counts["hits"] += 1
            encoding.num_waiting += 1
        try:
            return encoding.future.result() if workplace is None else workplace.wait(encoding.future)
        finally:
            with self._lock:
                encoding.num_waiting -= 1

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="actorllm:encoder", daemon=True)
            self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Counters, as JSON values."""
        with self._lock:
            tower = self._tower
            return {
                "num_waiting": len(self._encodings),
                "num_cached": len(self._rows),
                "cached_bytes": self._num_bytes,
                "process_pid": tower.pid if isinstance(tower, TowerProcess) else None,
                **{f"num_{name}": count for name, count in self._counts.items()},
                "encoded_s": self._seconds,
            }

    def forget(self) -> None:
        """Keep no rows of earlier items. Those that are being encoded are kept again."""
        with self._lock:
            forgotten, self._rows = self._rows, OrderedDict()
            self._num_bytes = 0
        del forgotten  # not under the lock, for which steps of an event loop may wait

    def close(self, timeout: float = 5.0) -> None:
        """Encode no more; what waits fails. The process is gone when this returns."""
        with self._lock:
            self._is_closed = True
            thread, tower = self._thread, self._tower
        if isinstance(tower, TowerProcess):
            tower.kill()
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        self._rows.clear()

    # On its thread

    def _run(self) -> None:
        try:
            while (encoding := self._queue.get()) is not None and not self._is_closed:
                self._do(encoding)
        finally:
            tower, self._tower = self._tower, None
            if tower is not None:
                tower.close()
            with self._lock:
                left = list(self._encodings.values())
                self._encodings.clear()
            for encoding in left:
                encoding.future.set_exception(EngineShutdownError("the engine was shut down"))

    def _do(self, encoding: Encoding) -> None:
        digest = encoding.image.digest
        with self._lock:
            if not encoding.num_waiting:
                del self._encodings[digest]
                self._counts["dropped"] += 1
                return
        began = now()
        rows: U8 | None = None
        failure: BaseException | None = None
        try:
            rows = self._computed(encoding.image)
        except BaseException as error:  # whatever it is, it belongs to the requests with this image
            failure = without_frames(error)
        with self._lock:
            del self._encodings[digest]
            self._counts["encoded" if failure is None else "failed"] += 1
            self._seconds += now() - began
            if rows is not None:
                self._keep(digest, rows)
        if rows is not None:
            encoding.future.set_result(rows)
        else:
            encoding.future.set_exception(failure)

    def _keep(self, digest: str, rows: U8) -> None:
        self._rows[digest] = rows
        self._num_bytes += rows.size
        while self._num_bytes > MAX_CACHE_BYTES:
            self._num_bytes -= self._rows.popitem(last=False)[1].size

    def _computed(self, image: MediaTensors) -> U8:
        for _ in range(MAX_TRIES):
            tower = self._loaded()
            try:
                return tower.encode(image.arrays)
            except TowerEndedError as error:
                self._tower = None
                tower.close()
                if self._is_closed:
                    raise EngineShutdownError("the engine was shut down") from error
                self._counts["restarts"] += 1
                logger.warning("the encoder %s; it is started again", error)
        raise InvalidPromptError(f"the encoder ended {MAX_TRIES} times while it encoded this item; send another one")

    def _loaded(self) -> Tower:
        if self._tower is None:
            if self._config.topology == "inline":
                self._tower = new_tower(self._config.model)
            else:
                tower = TowerProcess(self._config)
                with self._lock:
                    self._tower = tower
                    if self._is_closed:  # which looked for a process before
                        tower.kill()
        return self._tower


class TowerEndedError(Exception):
    """The process of the tower ended, or was ended."""


class TowerProcess:
    """The tower in a process of its own. The kernel kills it when the thread that made it ends."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            self._process = IntakeProcess(MAX_ROW_BYTES, encoder_program.__name__, LOAD_TIMEOUT_S)
        except OSError as error:
            raise RequestFailedError(f"no process can be started that encodes items: {error}") from error
        self._config = config.to_json().decode()

    @property
    def pid(self) -> int:
        return self._process.pid

    def encode(self, arrays: dict[str, Any]) -> U8:
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        try:
            answer = self._process.ask(
                ("encode", self._config, described),
                ENCODE_TIMEOUT_S,
                lambda: None,
                attachments=[memoryview(array).cast("B") for array in arrays.values()],
            )
        except ProcessEndedError as error:
            raise TowerEndedError(str(error)) from error
        except ActorLLMError as error:
            if self._process.is_killed:
                raise TowerEndedError(str(error)) from error
            raise
        return np.frombuffer(answer, np.uint8)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.close()
