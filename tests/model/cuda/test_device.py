"""What can be held of a GPU's device without one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from actorllm.model.cuda.device import CudaDownload


def test_who_waits_for_a_download_does_not_hold_it() -> None:
    waited = []
    copies = [torch.zeros(2)]
    download = CudaDownload(copies, SimpleNamespace(synchronize=lambda: waited.append(1)))
    wait, copy = download.waiter(), weakref.ref(copies[0])
    copies.clear()
    del download
    assert copy() is None
    wait()
    assert waited == [1]
