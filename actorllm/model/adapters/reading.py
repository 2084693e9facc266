"""The tensors of an adapter, read from its folder and checked against the model: what does not fit is refused by its name.

The file is read once and held against the digest that the request came with. So what is computed is what the request named,
also when the folder is being written to. Called on a thread beside the steps of a worker.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from actorllm.errors import InvalidParameterError
from actorllm.model.adapters import AdaptedLayer, LowRank
from actorllm.types.adapter_folder import (
    MAX_WEIGHTS_BYTES,
    WEIGHTS_FILE,
    Adapter,
    AdapterSettings,
    check_files,
    check_rank,
    digest_of,
    read_config,
)

NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
PLACE = re.compile(r"(?:(?:model|language_model|backbone)\.)*(layers\..+)")
"""Of a layer: what stands before it depends on the class that was trained. A tower for images has other names there."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.inference_mode()
def read_adapter(
    adapter: Adapter, targets: Mapping[str, AdaptedLayer], max_rank: int, dtype: torch.dtype
) -> dict[str, LowRank]:
    """The tensors by the name of their target. Raises InvalidParameterError.

    targets: by name, all that the model has. dtype: what the tensors become.
    """
    folder = Path(adapter.path)
    check_files(folder)
    try:
        config = read_config(folder)
        with open(folder / WEIGHTS_FILE, "rb") as file:
            data = file.read(MAX_WEIGHTS_BYTES)
    except OSError as error:
        raise InvalidParameterError(f"the adapter {adapter.path} cannot be read: {error}") from error
    if digest_of(config, io.BytesIO(data)) != adapter.digest:
        raise InvalidParameterError(f"the adapter {adapter.path} was changed since the request came; send it again")
    settings = AdapterSettings.from_json(config, adapter.path)
    check_rank(settings, adapter.path, max_rank)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidParameterError(f"{folder / WEIGHTS_FILE} is no safetensors file: {error!s:.200}") from error
    del data
    names, pairs = _by_target(adapter.path, tensors, targets)
    if not pairs:
        raise InvalidParameterError(f"{adapter.path}: {WEIGHTS_FILE} holds no tensors of an adapter")
    return {
        name: _pair(
            adapter.path, targets[name], pair, settings.rank_of(names[name]), settings.scale_of(names[name]), dtype
        )
        for name, pair in pairs.items()
    }


def _by_target(
    path: str, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, AdaptedLayer]
) -> tuple[dict[str, str], dict[str, dict[str, torch.Tensor]]]:
    """By the name of the target: what the adapter calls it, whose patterns are of such names, and the tensors of A and B."""
    places = {place: target for name, target in targets.items() if (place := _place(name)) is not None}
    names: dict[str, str] = {}
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        target = None
        if match is not None:
            given = match[1]
            target = targets.get(given) or targets.get(f"model.{given}") or places.get(_place(given) or "")
        if match is None or target is None:
            kinds = ", ".join(dict.fromkeys(known.rpartition(".")[2] for known in targets))
            raise InvalidParameterError(
                f"{path}: the tensor {name!r:.200} adapts nothing that can be adapted in this model; adapt {kinds}"
            )
        pair = pairs.setdefault(target.name, {})
        if match[2] in pair:
            raise InvalidParameterError(
                f"{path}: {name!r:.200} is there a second time, under another name; leave one out"
            )
        pair[match[2]] = tensor
        names[target.name] = match[1]
    return names, pairs


def _place(name: str) -> str | None:
    """Of a layer of the text model, whatever that is called; None: it is none."""
    match = PLACE.fullmatch(name)
    return None if match is None else match[1]


def _pair(
    path: str, target: AdaptedLayer, pair: Mapping[str, torch.Tensor], rank: int, scale: float, dtype: torch.dtype
) -> LowRank:
    shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
    for letter, shape in shapes.items():
        tensor = pair.get(letter)
        found = "not there" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in DTYPES:
            raise InvalidParameterError(
                f"{path}: lora_{letter} of {target.name} is {found}, and must be floats of 16, 32 or 64 bits "
                f"{shape} for this model and rank; is it an adapter of another model?"
            )
        # A product with them is masked for rows of other adapters, and 0 * inf would reach those rows.
        if not torch.isfinite(tensor).all():
            raise InvalidParameterError(f"{path}: lora_{letter} of {target.name} has values that are not finite")
    a = pair["A"][:, target.columns].to(dtype).contiguous()
    b = pair["B"].float()[target.rows].mul_(scale).T.to(dtype).contiguous()
    if not torch.isfinite(a).all() or not torch.isfinite(b).all():
        raise InvalidParameterError(f"{path}: the values of {target.name} are larger than {dtype} can hold")
    return a, b
