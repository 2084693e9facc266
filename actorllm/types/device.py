"""Which device an engine runs on, as far as that can be known without torch.

`choose` turns the argument `device` into "cpu", "cuda" or the name of another backend (`model.backends`). It is called where the
configuration is made, in the application's process. So it asks files and never the driver: a process that has asked the driver
cannot be forked any more. What only the driver knows (compute capability, memory) the worker checks when it starts
(`model.cuda.device`). Standard library only.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorllm.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEVICES = ("auto", "cpu", "cuda")

GROUP = "actorllm.backends"
"""Of the entry points by which installed packages announce theirs."""

_DEV = Path("/dev")


def choose(device: Any) -> str:
    """ "auto" is "cuda" where torch is built for it and a GPU is visible. Raises ConfigError for "cuda" where not."""
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        names = (*DEVICES, *sorted(others()))
        if device in names:
            return str(device)
        known = nearest_name(device, names) if isinstance(device, str) else ""
        raise ConfigError(f"device={device!r} must be one of {', '.join(map(repr, names))}{known}")
    reason = why_not_cuda()
    if reason is None:
        return "cuda"
    if device == "cuda":
        raise ConfigError(f"device='cuda': {reason}, or use device='cpu'")
    return "cpu"


def others() -> dict[str, EntryPoint]:
    """The backends of installed packages, by name. None of them takes the place of ours."""
    from importlib.metadata import entry_points  # reads every package's folder: only for a name that is not ours

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in DEVICES}


def why_not_cuda() -> str | None:
    """What keeps a worker from running on a GPU here, and what to do about it; None: nothing that can be seen."""
    version, cuda = _torch_build()
    if cuda is None:
        return f"torch {version} is built without CUDA; install a build for CUDA (https://pytorch.org/get-started)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; name one"
    if not (any(_DEV.glob("nvidia[0-9]*")) or (_DEV / "dxg").exists()):
        return "no NVIDIA GPU is visible on this machine (/dev has none); install its driver"
    return None


def _torch_build() -> tuple[str, str | None]:
    """torch's version, and that of CUDA it is built for, read from its files: importing it takes a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    text = (Path(spec.origin).parent / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*'([^']*)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*'([^']*)'", text, re.M)
    return version.group(1) if version else "(unknown)", cuda.group(1) if cuda else None
