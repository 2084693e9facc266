"""MiMo: Qwen2, with layers for further tokens that draft for it (`speculative_config`, method "mtp"; arXiv:2505.07608)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actorllm.model.families import qwen2
from actorllm.model.families.decoder_config import DecoderConfig, TensorNames


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    return replace(qwen2.decoder_config(hf), names=TensorNames(beside=("model.mtp_layers.",)))
