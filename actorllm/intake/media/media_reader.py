"""`MediaReader`: a text with placeholders and its images, as token ids and the rows of the images.

The model's own processor repeats each placeholder for as many rows as its image has, and makes tensors of the images. The
encoder (`image_encoder`) makes rows of those. All runs on a lane of the intake: the request waits, and no step does. Called by
`intake.tokenization`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from actorllm.errors import CorruptModelError, InvalidPromptError
from actorllm.intake.media.image_encoder import ImageEncoder, ImageTensors, Waiting
from actorllm.intake.media.images import MAX_PIXELS, read_image
from actorllm.messages import I32, U8
from actorllm.messages.embeds import EMBEDDED, MAX_PROMPT_BYTES
from actorllm.types.media_rules import MediaRules

if TYPE_CHECKING:
    from PIL.Image import Image

    from actorllm.config import EngineConfig

MAX_TENSOR_BYTES = 256 << 20
"""Of the tensors of one prompt's images."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where the rows of an image are among the tokens of a prompt, from the first to the last."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt with images."""

    ids: I32
    """EMBEDDED where a row of an image counts."""
    shown_ids: list[int]
    """The same with the token of images there."""
    rows: U8
    """Of all images, in the bytes of the model's dtype."""
    images: tuple[PlacedImage, ...]


class MediaReader:
    """Reads prompts with images for one engine. The processor is loaded when first needed."""

    def __init__(self, config: EngineConfig, rules: MediaRules) -> None:
        self._model = config.model
        self._rules = rules
        self._lock = threading.Lock()
        """Processors and their tokenizers are not made for several threads."""
        self._processor: Any = None
        self.encoder = ImageEncoder(config)

    def read(
        self, text: str, images: Sequence[Any], adds_special: bool, most: int, workplace: Waiting | None
    ) -> MediaPrompt:
        """Of a text and the images of its placeholders, in their order. Raises InvalidPromptError.

        Arguments:
            text: with a placeholder for each image.
            images: as callers give them (`images.read_image`).
            adds_special: put the model's special tokens around the text.
            most: the most tokens that the prompt may have.
            workplace: where it is waited for the encoder; None: on this thread.
        """
        if len(images) > self._rules.max_images:
            raise InvalidPromptError(
                f"the prompt has {len(images)} images, and at most {self._rules.max_images} are taken; send fewer, or build "
                f"the engine with limit_mm_per_prompt={{'image': {len(images)}}}"
            )
        decoded: list[Image] = []
        num_pixels = 0
        for number, value in enumerate(images):
            image = read_image(value, f"image {number}")
            num_pixels += image.width * image.height
            if num_pixels > MAX_PIXELS:
                raise InvalidPromptError(
                    f"the images of the prompt have more than {MAX_PIXELS} pixels; send smaller ones"
                )
            decoded.append(image)
        ids, tensors = self._prepared(text, decoded, adds_special)
        if ids.size > most:
            raise InvalidPromptError(
                f"the prompt has {ids.size} tokens with those of its images, and at most {most} are taken: shorten it, or send "
                f"fewer images"
            )
        self._check_rows(int(np.count_nonzero(ids == self._rules.image_token_id)))
        rows = [self.encoder.encode(one, workplace) for one in tensors]
        return self._placed(ids, [one.digest for one in tensors], rows)

    def _prepared(self, text: str, images: list[Image], adds_special: bool) -> tuple[I32, list[ImageTensors]]:
        """What the model's processor makes of text and images."""
        with self._lock:
            processor = self._loaded()
            placeholder = str(processor.image_token)
            if text.count(placeholder) != len(images):
                raise InvalidPromptError(
                    f"the prompt has {text.count(placeholder)} placeholders {placeholder!r} for {len(images)} images; write one "
                    f"for each image"
                )
            options = self._rules.processor_kwargs
            try:
                made = processor(
                    text=[text], images=images, add_special_tokens=adds_special, return_tensors="np", **options
                )
                names = processor.image_processor.model_input_names
                prepared = [made] if len(images) == 1 else [self._of_one(processor, image) for image in images]
                tensors = [{name: np.ascontiguousarray(one[name]) for name in names if name in one} for one in prepared]
                ids = np.asarray(made["input_ids"], np.int32).reshape(-1)
            except Exception as error:  # of another library, about what a client has sent
                raise InvalidPromptError(f"the model's processor cannot take these images: {error!s:.200}") from error
        if sum(array.nbytes for one in tensors for array in one.values()) > MAX_TENSOR_BYTES:
            raise InvalidPromptError(
                f"the tensors of the images have more than {MAX_TENSOR_BYTES} bytes; send fewer images"
            )
        return ids, [ImageTensors(_digest(one), one) for one in tensors]

    def _of_one(self, processor: Any, image: Image) -> Any:
        """Each image for itself, so that its rows depend on no other."""
        return processor.image_processor(images=[image], return_tensors="np", **self._rules.processor_kwargs)

    def _placed(self, ids: I32, digests: list[str], rows: list[U8]) -> MediaPrompt:
        positions = np.flatnonzero(ids == self._rules.image_token_id)
        counts = [one.size // self._model.embedding_bytes for one in rows]
        if sum(counts) != positions.size:
            raise InvalidPromptError(
                f"the model makes {sum(counts)} rows of these images, and the prompt has room for {positions.size}: the processor "
                f"in {self._model.path} is that of another model"
            )
        borders = np.cumsum([0, *counts]).tolist()
        placed = tuple(
            PlacedImage(int(positions[first]), int(positions[last - 1]) + 1, digest)
            for first, last, digest in zip(borders[:-1], borders[1:], digests, strict=True)
        )
        shown_ids = ids.tolist()
        mixed = ids.copy()
        mixed[positions] = EMBEDDED
        return MediaPrompt(mixed, shown_ids, np.concatenate(rows), placed)

    def _check_rows(self, count: int) -> None:
        if count * self._model.embedding_bytes > MAX_PROMPT_BYTES:
            raise InvalidPromptError(
                f"the images of the prompt have {count} tokens, and {MAX_PROMPT_BYTES // self._model.embedding_bytes} are the most "
                f"that a request may carry; send fewer images"
            )

    def _loaded(self) -> Any:
        if self._processor is None:
            transformers: Any = importlib.import_module("transformers")  # it is not typed
            logging = transformers.utils.logging
            kept = logging.get_verbosity()
            logging.set_verbosity_error()
            try:
                self._processor = transformers.AutoProcessor.from_pretrained(
                    self._model.path, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # whatever another library raises for the files of a folder
                raise CorruptModelError(
                    f"{self._model.path}: the processor cannot be loaded: {error!s:.300}"
                ) from error
            finally:
                logging.set_verbosity(kept)
        return self._processor

    def forget(self) -> None:
        """Give back processor and encoder; they are loaded again when needed."""
        with self._lock:
            self._processor = None
        self.encoder.close()
        self.encoder = self.encoder.renewed()

    def close(self) -> None:
        """End the encoder. What waits for it fails."""
        self.encoder.close()


def _digest(tensors: dict[str, Any]) -> str:
    """Of what the tower gets: images that look alike to it are one."""
    made = sha256()
    for name, array in sorted(tensors.items()):
        made.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        made.update(array.data)
    return made.hexdigest()


def block_keys(images: Sequence[PlacedImage], num_blocks: int, block_size: int) -> dict[int, bytes]:
    """What the hash of a block covers beside its ids, for the blocks that images touch; -1: what is before the first block.

    A block's key names the images in it and in the next one, by digest and relative place. So the last full block of a prompt
    also tells of an image in the partial block behind it, and the hashes of output that the scheduler adds need no keys.
    Text before an image is shared up to the block before the image.
    """
    keys: dict[int, bytes] = {}
    for image in images:
        for block in range(image.start // block_size - 1, min((image.stop - 1) // block_size, num_blocks - 1) + 1):
            keys[block] = keys.get(block, b"") + f"{image.digest} {image.start - block * block_size}\0".encode()
    return keys
