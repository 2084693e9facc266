"""`MediaReader`: a text with placeholders and its images or recordings, as token ids and the rows of these items.

The model's own processor repeats each placeholder for as many rows as its item has, and makes tensors of the items. The
encoder (`media_encoder`) makes rows of those. All runs on a tokenizer worker: the request waits, and no step does. Called by
`intake.tokenization`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from actorllm.errors import InvalidPromptError, without_frames
from actorllm.intake.media.addresses import Allowed
from actorllm.intake.media.audio import read_audio
from actorllm.intake.media.images import MAX_PIXELS, read_image
from actorllm.intake.media.media_encoder import MediaEncoder, MediaTensors, Waiting
from actorllm.intake.media.processor import load_processor
from actorllm.messages import I32, U8
from actorllm.messages.embeds import EMBEDDED, MAX_COLUMNS, MAX_PROMPT_BYTES, MAX_STEP_BYTES, WHOLE, grid_id
from actorllm.types.media_rules import MediaRules

if TYPE_CHECKING:
    from actorllm.config import EngineConfig

MAX_TENSOR_BYTES = 256 << 20
"""Of the tensors of one prompt's items."""
MAX_NAMED_BYTES = 256 << 20
"""Of the items that are kept by their uuid."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenMedia:
    """What a caller gave with a prompt."""

    items: Sequence[Any]
    """Images (`images.read_image`) or recordings (`audio.read_audio`); None: what was given with its uuid before."""
    uuids: Sequence[str | None]
    """By item, or nothing."""
    processor_kwargs: dict[str, Any]
    """Keyword arguments of the processor, beside those of the engine."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """Where the rows of an item are among the tokens of a prompt, from the first to the last."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt with items."""

    ids: I32
    """Below zero where a row of an item counts (`messages.embeds`)."""
    shown_ids: list[int]
    """The same with the token of items there."""
    rows: U8
    """Of all items, in the bytes of the model's dtype."""
    items: tuple[PlacedItem, ...]


class MediaReader:
    """Reads prompts with images or audio for one engine. The processor is loaded when first needed."""

    def __init__(self, config: EngineConfig, rules: MediaRules) -> None:
        self._config = config
        self._model = config.model
        self._rules = rules
        self._allowed = Allowed(rules.local_path, rules.domains)
        self._lock = threading.Lock()
        """Processors and their tokenizers are not made for several threads."""
        self._processor: Any = None
        self._named: OrderedDict[str, Any] = OrderedDict()
        """The latest items that were given with a uuid, decoded."""
        self._num_named_bytes = 0
        self.encoder = MediaEncoder(config)

    def read(
        self, text: str, given: GivenMedia, adds_special: bool, most: int, workplace: Waiting | None
    ) -> MediaPrompt:
        """Of a text and the items of its placeholders, in their order. Raises InvalidPromptError.

        Arguments:
            text: with a placeholder for each item.
            given: the items.
            adds_special: put the model's special tokens around the text.
            most: the most tokens that the prompt may have.
            workplace: where it is waited for hosts and for the encoder; None: on this thread.
        """
        kind, count = self._rules.modality, len(given.items)
        if count > self._rules.max_items:
            raise InvalidPromptError(
                f"the prompt has {count} items of {kind}, and at most {self._rules.max_items} are taken; send fewer, or build the "
                f"engine with limit_mm_per_prompt={{{kind!r}: {count}}}"
            )
        decoded = self._decoded(given, workplace)
        ids, tensors, grids = self._prepared(text, decoded, adds_special, given.processor_kwargs)
        if ids.size > most:
            raise InvalidPromptError(
                f"the prompt has {ids.size} tokens with those of its {kind}, and at most {most} are taken: shorten it, or send "
                f"fewer items"
            )
        self._check_rows(ids)
        rows = [self.encoder.encode(one, workplace) for one in tensors]
        return self._placed(ids, [one.digest for one in tensors], rows, grids)

    # Items ------------------------------------------------------------------------------------------------------------

    def _decoded(self, given: GivenMedia, workplace: Waiting | None) -> list[Any]:
        """The items, each decoded once its predecessors were counted."""
        decoded: list[Any] = []
        num_pixels = 0
        uuids = given.uuids or [None] * len(given.items)
        for number, (value, uuid) in enumerate(zip(given.items, uuids, strict=True)):
            place = f"{self._rules.modality} {number}"
            item = self._of_uuid(uuid, place) if value is None else self._read(value, place, workplace)
            if value is not None and uuid is not None:
                self._keep(uuid, item)
            if self._rules.modality == "image":
                num_pixels += item.width * item.height
                if num_pixels > MAX_PIXELS:
                    raise InvalidPromptError(
                        f"the images of the prompt have more than {MAX_PIXELS} pixels; send smaller ones"
                    )
            decoded.append(item)
        return decoded

    def _read(self, value: Any, place: str, workplace: Waiting | None) -> Any:
        if self._rules.modality == "image":
            read: Callable[[], Any] = lambda: read_image(value, self._allowed, place)  # noqa: E731
        else:
            extractor = self._loaded_processor().feature_extractor
            rate, seconds = int(extractor.sampling_rate), float(extractor.chunk_length)
            read = lambda: read_audio(value, rate, seconds, self._allowed, place)  # noqa: E731
        is_far = isinstance(value, str) and value[:4].lower() == "http"
        return read() if workplace is None or not is_far else workplace.wait(_in_background(read))

    def _of_uuid(self, uuid: str | None, place: str) -> Any:
        with self._lock:
            item = None if uuid is None else self._named.get(uuid)
            if item is None:
                raise InvalidPromptError(f"{place}: nothing is kept of uuid {uuid!r:.80}; send the item with it")
            assert uuid is not None
            self._named.move_to_end(uuid)
        return item

    def _keep(self, uuid: str, item: Any) -> None:
        with self._lock:
            before = self._named.pop(uuid, None)
            if before is not None:
                self._num_named_bytes -= _num_bytes(before)
            self._named[uuid] = item
            self._num_named_bytes += _num_bytes(item)
            while self._num_named_bytes > MAX_NAMED_BYTES:
                self._num_named_bytes -= _num_bytes(self._named.popitem(last=False)[1])

    # Tensors and ids --------------------------------------------------------------------------------------------------

    def _prepared(
        self, text: str, items: list[Any], adds_special: bool, options: dict[str, Any]
    ) -> tuple[I32, list[MediaTensors], list[int]]:
        """What the model's processor makes of text and items: ids, tensors, and by item the columns of its grid."""
        processor = self._loaded_processor()
        with self._lock:
            placeholder = str(_placeholder(processor))
            if text.count(placeholder) != len(items):
                raise InvalidPromptError(
                    f"the prompt has {text.count(placeholder)} placeholders {placeholder!r} for {len(items)} items; write one for "
                    f"each"
                )
            options = {**self._rules.processor_kwargs, **options}
            make = _of_images if self._rules.modality == "image" else _of_audio
            try:
                ids, arrays = make(processor, text, items, adds_special, options)
                merge = getattr(getattr(processor, "image_processor", None), "merge_size", 1)
                grids = [int(one["image_grid_thw"][0, 2]) // merge if "image_grid_thw" in one else 1 for one in arrays]
            except Exception as error:  # of another library, about what a client has sent
                raise InvalidPromptError(f"the model's processor cannot take these items: {error!s:.200}") from error
        if sum(array.nbytes for one in arrays for array in one.values()) > MAX_TENSOR_BYTES:
            raise InvalidPromptError(
                f"the tensors of the items have more than {MAX_TENSOR_BYTES} bytes; send fewer of them"
            )
        return ids, [MediaTensors(_digest(one), one) for one in arrays], grids

    def _placed(self, ids: I32, digests: list[str], rows: list[U8], grids: list[int]) -> MediaPrompt:
        positions = np.flatnonzero(ids == self._rules.token_id)
        counts = [one.size // self._model.embedding_bytes for one in rows]
        if sum(counts) != positions.size:
            raise InvalidPromptError(
                f"the model makes {sum(counts)} rows of these items, and the prompt has room for {positions.size}: the processor "
                f"in {self._model.path} is that of another model"
            )
        borders = np.cumsum([0, *counts]).tolist()
        placed = tuple(
            PlacedItem(int(positions[first]), int(positions[last - 1]) + 1, digest)
            for (first, last), digest in zip(pairwise(borders), digests, strict=True)
        )
        shown_ids = ids.tolist()
        mixed = ids.copy()
        mixed[positions] = WHOLE if self._rules.rows == "whole" else EMBEDDED
        if self._rules.rows == "grid":
            self._place_grids(mixed, placed, grids)
        return MediaPrompt(mixed, shown_ids, np.concatenate(rows), placed)

    def _place_grids(self, ids: I32, placed: tuple[PlacedItem, ...], grids: list[int]) -> None:
        for one, columns in zip(placed, grids, strict=True):
            if not 1 <= columns <= MAX_COLUMNS or (one.stop - one.start) % columns:
                raise InvalidPromptError(f"an image with {columns} columns of rows has no place; send a smaller one")
            ids[one.start : one.stop] = grid_id(columns)
        if any(before.stop == behind.start for before, behind in pairwise(placed)):
            raise InvalidPromptError(
                "two images stand side by side; write text between them, as the model's template does"
            )

    def _check_rows(self, ids: I32) -> None:
        is_row = ids == self._rules.token_id
        count = int(np.count_nonzero(is_row))
        if count * self._model.embedding_bytes > MAX_PROMPT_BYTES:
            raise InvalidPromptError(
                f"the items of the prompt have {count} tokens, and {MAX_PROMPT_BYTES // self._model.embedding_bytes} are the most "
                f"that a request may carry; send fewer items"
            )
        if self._rules.rows != "whole":
            return
        # A run goes through in one step, in which all other requests may have a token.
        scheduling = self._config.scheduler
        room = scheduling.max_num_batched_tokens - scheduling.max_num_seqs + 1
        most = min(room, MAX_STEP_BYTES // self._model.embedding_bytes)
        borders = np.flatnonzero(np.diff(is_row, prepend=False, append=False))
        longest = int((borders[1::2] - borders[::2]).max(initial=0))
        if longest > most:
            raise InvalidPromptError(
                f"an image of {longest} tokens goes through in one step, which has room for {most}; build the engine with a larger "
                f"max_num_batched_tokens, or a smaller max_num_seqs"
            )

    def _loaded_processor(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = load_processor(self._model.path)
            return self._processor

    def forget_items(self) -> None:
        """Keep no items by their uuids: each has to be sent once more."""
        with self._lock:
            self._named.clear()
            self._num_named_bytes = 0

    def forget(self) -> None:
        """Give back processor and encoder; they are loaded again when needed."""
        with self._lock:
            self._processor = None
        self.forget_items()
        self.encoder.close()
        self.encoder = self.encoder.renewed()

    def close(self) -> None:
        """End the encoder. What waits for it fails."""
        self.encoder.close()


def _placeholder(processor: Any) -> str:
    """What a text has where an item is."""
    names = ("boi_token", "image_token", "audio_token")  # Gemma 3 puts its image tokens behind the first
    return next(str(token) for name in names if (token := getattr(processor, name, None)) is not None)


def _of_images(
    processor: Any, text: str, images: list[Any], adds_special: bool, options: dict[str, Any]
) -> tuple[I32, list[dict[str, Any]]]:
    """Token ids, and by image the tensors that the tower gets."""
    made = processor(text=[text], images=images, add_special_tokens=adds_special, return_tensors=TENSORS, **options)
    names = processor.image_processor.model_input_names
    if len(images) == 1:
        each = [made]
    else:  # each for itself, so that its rows depend on no other; by the processor, which has defaults and options by kind
        alone = str(_placeholder(processor))
        each = [processor(text=[alone], images=[image], return_tensors=TENSORS, **options) for image in images]
    arrays = [
        {name: np.ascontiguousarray(one[name]) for name in names if name in one and name != "num_crops"} for one in each
    ]
    return np.asarray(made["input_ids"], np.int32).reshape(-1), arrays


def _of_audio(
    processor: Any, text: str, recordings: list[Any], adds_special: bool, options: dict[str, Any]
) -> tuple[I32, list[dict[str, Any]]]:
    """The same of recordings, which are padded to one length."""
    rate = processor.feature_extractor.sampling_rate
    made = processor(
        text=[text],
        audio=recordings,
        sampling_rate=rate,
        add_special_tokens=adds_special,
        return_tensors=TENSORS,
        **options,
    )
    names = ("input_features", "feature_attention_mask")
    arrays = [{name: np.ascontiguousarray(made[name][i : i + 1]) for name in names} for i in range(len(recordings))]
    return np.asarray(made["input_ids"], np.int32).reshape(-1), arrays


TENSORS = "pt"
"""Those of numpy are not made by all processors."""


def _in_background(read: Callable[[], Any]) -> Future[Any]:
    """On a thread of its own, which the bounds of `addresses` end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # whatever it is, it belongs to the request
            future.set_exception(without_frames(error))

    threading.Thread(target=run, name="actorllm:fetch", daemon=True).start()
    return future


def _num_bytes(item: Any) -> int:
    return item.nbytes if isinstance(item, np.ndarray) else 3 * item.width * item.height


def _digest(tensors: dict[str, Any]) -> str:
    """Of what the tower gets: images that look alike to it are one."""
    made = sha256()
    for name, array in sorted(tensors.items()):
        made.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        made.update(array.data)
    return made.hexdigest()


def block_keys(items: Sequence[PlacedItem], num_blocks: int, block_size: int) -> dict[int, bytes]:
    """What the hash of a block covers beside its ids, for the blocks that images touch; -1: what is before the first block.

    A block's key names the images in it and in the next one, by digest and relative place. So the last full block of a prompt
    also tells of an image in the partial block behind it, and the hashes of output that the scheduler adds need no keys.
    Text before an image is shared up to the block before the image.
    """
    keys: dict[int, bytes] = {}
    for item in items:
        for block in range(item.start // block_size - 1, min((item.stop - 1) // block_size, num_blocks - 1) + 1):
            keys[block] = keys.get(block, b"") + f"{item.digest} {item.start - block * block_size}\0".encode()
    return keys
