"""Forms as clients upload files in them (`multipart/form-data`, RFC 7578), within the bound on the body of a request.

Every field is text but the file, which stays bytes. Names of fields, their number and their lengths are bounded; nothing is written
to a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from actorllm.server.envelope import ApiError, shown

MAX_FIELDS = 64
MAX_TEXT = 1 << 16
"""Bytes of a field that is text."""
MAX_HEAD = 1 << 12
"""Bytes of what stands before the contents of a field."""
FILE = "file"

_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]{1,64})"', re.IGNORECASE)


@dataclass(slots=True)
class UploadForm:
    """What a client sent."""

    file: bytes | None = None
    fields: dict[str, list[str]] = field(default_factory=dict)
    """The values of each field by its name, without the brackets of a list."""


def read_form(content_type: str, body: bytes) -> UploadForm:
    """Raises ApiError for what is no such form.

    Arguments:
        content_type: the header of that name.
        body: of the request.
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise ApiError(400, f"the body must be multipart/form-data with a file, not {shown(content_type)}", FILE)
    mark = b"\r\n--" + (found.group(1) or found.group(2)).encode("latin-1")
    # A first part has no line before its mark.
    first, *parts = (b"\r\n" + body).split(mark, MAX_FIELDS + 2)
    if first.strip() or not parts or not parts[-1].startswith(b"--"):
        number = f"more than {MAX_FIELDS}" if len(parts) > MAX_FIELDS else "an unfinished one among its"
        raise ApiError(400, f"the form cannot be read: it has {number} fields", None)
    form = UploadForm()
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head) if separator and len(head) <= MAX_HEAD else None
        if name is None:
            raise ApiError(400, "the form cannot be read: a field of it has no name", None)
        _add(form, name.group(1).decode("utf-8", "replace"), content)
    return form


def _add(form: UploadForm, name: str, content: bytes) -> None:
    if name == FILE:
        if form.file is not None:
            raise ApiError(400, "the form has several files; send one at a time", FILE)
        form.file = content
        return
    if len(content) > MAX_TEXT:
        raise ApiError(400, f"{name} has {len(content)} bytes, and the limit is {MAX_TEXT}", name)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{name} must be text in UTF-8", name) from error
    form.fields.setdefault(name.removesuffix("[]"), []).append(text)
