"""Images as callers give them: PIL images, arrays, and `data:` addresses, as RGB images of bounded size.

Bytes and pixels are bounded before anything is decoded. Only still images in a few formats are taken. Runs on a lane of the
intake, as decoding takes milliseconds.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from actorllm.errors import InvalidPromptError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20
"""Of one image as a file."""
MAX_PIXELS = 32_000_000
"""Of one image, and of all images of a prompt together."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_image(value: Any, place: str) -> Image:
    """An RGB image. Raises InvalidPromptError, which names the place.

    Arguments:
        value: a PIL image, a numpy array of uint8 [height, width, 3], or a `data:` address.
        place: of the image in the prompt, for errors.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InvalidPromptError(f"{place}: images need pillow; pip install 'actorllm[media]'") from error
    if isinstance(value, str):
        image = _opened(_content_of(value, place), place)
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
            f"{place}: {type(value).__name__} is no image; give a PIL image, an array or a data: address"
        )
    try:
        if is_file:
            image = ImageOps.exif_transpose(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # whatever the decoder of a format raises for what a client has sent
        raise InvalidPromptError(f"{place}: the image cannot be decoded ({error!s:.200})") from error


def _content_of(address: str, place: str) -> bytes:
    """The bytes of a `data:` address."""
    if address[:5].lower() != "data:":
        raise InvalidPromptError(
            f"{place}: {address!r:.80} is an address that is not read; give the image as a data: address"
        )
    head, comma, content = address.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidPromptError(f"{place}: {address!r:.80} must be 'data:image/png;base64,' and the content")
    if len(content) > MAX_BYTES // 3 * 4:
        raise InvalidPromptError(f"{place}: the image has more than {MAX_BYTES} bytes; send a smaller one")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidPromptError(f"{place}: the content of the data: address is not base64 ({error})") from error


def _opened(content: bytes, place: str) -> Image:
    """An image whose header was read, and whose pixels were not."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels, which are counted below
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            is_animated = bool(getattr(image, "is_animated", False))
    except Image.DecompressionBombError as error:
        raise InvalidPromptError(
            f"{place}: the image has too many pixels, and {MAX_PIXELS} are the most; send a smaller one"
        ) from error
    except Exception as error:  # whatever the decoder of a format raises for what a client has sent
        raise InvalidPromptError(
            f"{place}: {len(content)} bytes are no image in one of the formats {', '.join(FORMATS)}"
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
