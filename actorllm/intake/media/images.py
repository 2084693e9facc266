"""Images as callers give them: PIL images, arrays and addresses, as RGB images of bounded size.

Bytes and pixels are bounded before anything is decoded. Only still images in a few formats are taken. Runs on a tokenizer
worker, as decoding takes milliseconds.
"""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from actorllm.errors import InvalidPromptError
from actorllm.intake.media.addresses import Allowed, content_of

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 32_000_000
"""Of one image, and of all images of a prompt together."""
MAX_RATIO = 200
"""Of the longer side of an image to the shorter one. Processors make the shorter one as long as their tower wants it."""
FORMATS = {b"\x89PNG\r\n": "Png", b"\xff\xd8\xff": "Jpeg", b"RIFF": "WebP", b"GIF8": "Gif", b"BM": "Bmp"}
"""How files begin, and what the classes of pillow that read them are called by."""


def read_image(value: Any, allowed: Allowed, place: str) -> Image:
    """An RGB image. Raises InvalidPromptError, which names the place.

    Arguments:
        value: a PIL image, a numpy array of uint8 [height, width, 3], or an address.
        allowed: addresses that are read.
        place: of the image in the prompt, for errors.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InvalidPromptError(f"{place}: images need pillow; pip install 'actorllm[media]'") from error
    if isinstance(value, str):
        image = _opened(content_of(value, allowed, place), place)
        is_file = True
    elif isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise InvalidPromptError(
                f"{place}: an array of {value.dtype} with shape {value.shape} must be uint8 [height, width, 3]"
            )
        _check_pixels(value.shape[1], value.shape[0], place)
        return Image.fromarray(value)
    elif isinstance(value, Image.Image):
        image, is_file = value, False
        _check_pixels(*image.size, place)
    else:
        raise InvalidPromptError(
            f"{place}: {type(value).__name__} is no image; give a PIL image, an array or an address"
        )
    try:
        if is_file:
            image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or "transparency" in image.info:  # becomes white, as in transformers and in vLLM
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # whatever the decoder of a format raises for what a client has sent
        raise InvalidPromptError(f"{place}: the image cannot be decoded ({error!s:.200})") from error


def _opened(content: bytes, place: str) -> Image:
    """An image whose header was read, and whose pixels were not.

    Not by `Image.open`, which warns of many pixels: they are counted here. To keep a warning from the application's log would
    change the filters of all threads of the process. Two that do so at once leave them changed for good.
    """
    from PIL import Image

    kind = next((kind for start, kind in FORMATS.items() if content.startswith(start)), None)
    try:
        if kind is None:
            raise ValueError("none of the formats begins so")
        opened = getattr(importlib.import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")
        # Of a photo with further pictures behind it (MPO), such as what it says of brightness, this is the first one.
        image: Image.Image = opened(io.BytesIO(content))
        is_animated = bool(getattr(image, "is_animated", False))
    except Image.DecompressionBombError as error:
        raise InvalidPromptError(
            f"{place}: the image has too many pixels, and {MAX_PIXELS} are the most; send a smaller one"
        ) from error
    except Exception as error:  # whatever the decoder of a format raises for what a client has sent
        raise InvalidPromptError(
            f"{place}: {len(content)} bytes are no image in one of the formats {', '.join(map(str.upper, FORMATS.values()))}"
        ) from error
    _check_pixels(*image.size, place)
    if is_animated:
        raise InvalidPromptError(f"{place}: the image has several frames; send one of them")
    return image


def _check_pixels(width: int, height: int, place: str) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise InvalidPromptError(
            f"{place}: the image has {width} x {height} pixels, and 1 to {MAX_PIXELS} are taken; send a smaller one"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidPromptError(
            f"{place}: the image has {width} x {height} pixels; a side may be {MAX_RATIO} times as long as the other; "
            f"send a part of it"
        )
