"""A graph of a step on CPU tensors: what a capture would hold, in its order, and repeated in the same memory.

It is made of two kinds of nodes. Launches of ours (`ops`) are noted and not run. Operations of torch, as modules of
transformers make them, run once while they are recorded, because what comes next needs their results. They read whatever is in
their inputs then, and write to tensors of their own. Replayed, each writes its result where the recording had put it. So what
Python has computed by itself stays what it was, and a value cannot be read: as on a GPU. Used by `HostDevice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actorllm.model.cuda import ops

READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations that must know a value before they can go on."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""So must these, by a mask."""


@contextmanager
def recording() -> Iterator[list[Callable[[], None]]]:
    """The nodes of everything that is launched, each as a call that repeats it. Raises RuntimeError where a value is read."""
    with ops.record() as nodes, _Recorder(nodes):
        yield nodes


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds torch's operations to the nodes."""

    def __init__(self, nodes: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_masked = name in INDEXED and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
        if name in READS or is_masked:
            raise RuntimeError(f"{func} reads a value, which is not permitted while launches are captured")
        out = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in inputs}
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        new = [x.untyped_storage().data_ptr() not in known for x in results]
        if func._schema.is_mutable or any(new):  # else it is a view
            self._nodes.append(partial(_repeat, func, args, kwargs, results, new))
        return out


def _repeat(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor], new: list[bool]
) -> None:
    again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    for result, is_new, value in zip(results, new, again, strict=True):
        if is_new:
            result.copy_(value)
