"""Falcon Mamba (arXiv:2410.05355): Mamba with norms, without weights, of what its second product makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families import mamba
from actorllm.model.families.decoder_config import DecoderConfig, number


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    return mamba.decoder_config(hf, norm_eps=number(hf, "mixer_rms_eps", 1e-6, least=0))
