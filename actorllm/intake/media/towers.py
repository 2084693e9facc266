"""What encodes items for a model: the tower of one that takes images or audio, or the encoder beside a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

    from actorllm.config import ModelConfig
    from actorllm.messages import U8


class Tower(Protocol):
    """Where items are encoded."""

    def encode(self, arrays: dict[str, Any]) -> U8:
        """The rows of one item, in the bytes of the model's dtype."""

    def close(self) -> None:
        """Give back what it holds."""


def new_tower(model: ModelConfig) -> Tower:
    """With the weights of this model. Imports torch and transformers. Raises ModelError."""
    if model.encoder_decoder is not None:
        from actorllm.model.encoder_decoder.encoder_tower import EncoderTower

        return EncoderTower(model)
    from actorllm.model.hf.tower import MediaTower

    return MediaTower(model)
