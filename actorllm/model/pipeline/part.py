"""`LayerPart`: which layers of a decoder a stage has, and which tensors beside them. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from actorllm.model.families.decoder_config import DecoderConfig, TensorNames

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Consecutive layers. The first part has the embeddings, the last one the norm and the head as well."""

    first_layer: int = 0
    num_layers: int | None = None
    """None: all of them."""
    is_first: bool = True
    is_last: bool = True

    @classmethod
    def of(cls, layers: tuple[int, ...], stage: int) -> LayerPart:
        """layers: of each stage; of none for a model that is whole."""
        if not layers:
            return cls()
        return cls(sum(layers[:stage]), layers[stage], stage == 0, stage == len(layers) - 1)

    def shape_of(self, whole: DecoderConfig) -> DecoderConfig:
        """The shape of the layers of this part."""
        if self.num_layers is None:
            return whole
        mine = slice(self.first_layer, self.first_layer + self.num_layers)
        experts = whole.experts
        return replace(
            whole,
            num_layers=self.num_layers,
            windows=whole.windows[mine],
            rotated=whole.rotated[mine],
            experts=None if experts is None else replace(experts, layers=experts.layers[mine]),
            has_head=whole.has_head and self.is_last,
        )

    def lacks(self, name: str, names: TensorNames) -> bool:
        """Whether a tensor of the model is of another part. names: of the family."""
        if self.num_layers is None:
            return False
        name = name.removeprefix(f"{names.model}.")  # which files without a head may leave out
        if found := _LAYER.match(name):
            return not self.first_layer <= int(found[1]) < self.first_layer + self.num_layers
        return name.startswith((f"{names.embedding}.", f"{names.final_norm}.", f"{names.head}."))


WHOLE = LayerPart()
