"""`Transport`, the seam of all ways that new weights take; and `RankJob`, what ranks are asked to do for some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actorllm.client.weight_updates import NEW_MEMORY, NewWeights
from actorllm.errors import EngineError, InvalidParameterError, shown
from actorllm.model import memory

if TYPE_CHECKING:
    from actorllm.client.weight_memory import WeightMemory
    from actorllm.model.updates.tensor_files import Layout, TensorFile

MAX_TENSORS = 200_000
"""Of a part."""
MAX_TENSOR_BYTES = 1 << 50
DESCRIBED = ("names", "dtype_names", "shapes")
"""What vLLM's trainers say of tensors that they send."""


@dataclass(slots=True)
class RankJob:
    """Tensors that ranks bring into memory which the engine has laid out (`actors.weight_receiver`)."""

    what: str
    """`receive`, `fetch` or `open`."""
    file: TensorFile
    """What they fill."""
    by_device: Sequence[Mapping[str, Any]] | None = None
    """Of `open`: for each tensor its handles, by the GPU."""
    offer: TensorOffer | None = None
    """Of `fetch`: this program has the tensors, and sends them."""
    shared: Sequence[Any] = ()
    """Of `open`: what has to live until the ranks are through."""

    def close(self) -> None:
        """Nothing was brought."""
        self.file.close()


class TensorOffer(Protocol):
    """Tensors of this program, for the ranks that come for them."""

    def open(self, num_ranks: int) -> dict[str, Any]:
        """Be there for so many ranks. Returns where they find it. Raises EngineError: there is no port."""
        ...

    def send(self, is_given_up: Callable[[], bool]) -> None:
        """Returns when the ranks have everything. is_given_up: no rank comes any more. Raises EngineError."""
        ...


class Transport(Protocol):
    """A way of new weights. Whatever is wrong with what a caller gives raises InvalidParameterError, naming it."""

    def setup(self, info: Mapping[str, Any]) -> dict[str, Any] | None:
        """Of `init_weight_transfer_engine`: where the ranks meet a trainer; None: nothing is set up. info: without "backend"."""
        ...

    def part(self, info: Mapping[str, Any], kept: WeightMemory | None) -> NewWeights | RankJob:
        """Of `update_weights`: what a part brings. kept: what tensors are copied to."""
        ...

    def whole(self, tensors: object, kept: WeightMemory | None) -> NewWeights | RankJob:
        """Of `update_weights_from_tensors`: tensors that this program has."""
        ...


def described(info: Mapping[str, Any]) -> list[Layout]:
    """The tensors that names, dtype_names and shapes of an update_info say. Raises InvalidParameterError, naming what is wrong."""
    from actorllm.model.updates.tensor_files import DTYPES, Layout, checked_name

    types = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPES.items()}
    for key in DESCRIBED:
        if not isinstance(info.get(key), list | tuple) or not 0 < len(info[key]) <= MAX_TENSORS:
            raise InvalidParameterError(
                f"update_info: {key}={shown(info.get(key))} must be a list of 1 to {MAX_TENSORS} values"
            )
    # One of each for every tensor, in the order in which they come.
    sizes = {len(info[key]) for key in DESCRIBED}
    if len(sizes) > 1:
        told = ", ".join(f"{len(info[key])} {key}" for key in DESCRIBED)
        raise InvalidParameterError(f"update_info has {told}; give one of each for every tensor")
    found: dict[str, Layout] = {}
    for given, dtype, shape in zip(*(info[key] for key in DESCRIBED), strict=True):
        name = checked_name(given)
        kind = types.get(str(dtype).removeprefix("torch."))
        if kind is None:
            raise InvalidParameterError(
                f"update_info: tensor {name!r:.200} is {shown(dtype)}; give one of {', '.join(types)}"
            )
        is_shape = isinstance(shape, list | tuple) and all(type(one) is int and one >= 0 for one in shape)
        if not is_shape or _num_numbers(shape) > MAX_TENSOR_BYTES:
            raise InvalidParameterError(
                f"update_info: tensor {name!r:.200} has shape {shown(shape)}; give a list of integers"
            )
        if name in found:
            raise InvalidParameterError(f"update_info names tensor {name!r:.200} twice; give it once")
        found[name] = Layout(name, kind, tuple(shape))
    return list(found.values())


def laid_out(layout: list[Layout], kept: WeightMemory | None) -> TensorFile:
    """Memory for tensors that ranks bring. Raises EngineError: there is too little."""
    from actorllm.model.updates.tensor_files import TensorFile

    needed = sum(one.num_bytes for one in layout)
    available = memory.available_bytes()
    if needed > available and kept is not None:
        needed -= kept.room_for(needed)
        available = memory.available_bytes()
    if needed > available:
        raise EngineError(
            f"update_info: the tensors have {needed} bytes, of which {available} are available; bring them in several parts"
        )
    try:
        return TensorFile.laid_out(layout, NEW_MEMORY if kept is None else kept.new)
    except OSError as error:
        raise EngineError(f"there is no memory for the new weights, and nothing was changed: {error}") from error


def only(name: str, info: Mapping[str, Any], known: tuple[str, ...], transport: str) -> None:
    """Raises InvalidParameterError for a key that this transport does not know."""
    if others := sorted(map(str, info.keys() - set(known))):
        said = ", ".join(known) or "nothing"
        raise InvalidParameterError(f"{name} has {shown(others[0])}, and backend={transport!r} takes {said}")


def _num_numbers(shape: object) -> int:
    found = 1
    for one in shape if isinstance(shape, list | tuple) else ():
        found *= max(one, 1)
        if found > MAX_TENSOR_BYTES:
            break
    return found
