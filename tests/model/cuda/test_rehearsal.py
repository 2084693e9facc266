"""Kernels are compiled before the weights are there, and what is compiled is what is launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from actorllm.model.cuda.rehearsal import MetaDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm_kernels import configs
from tests.model.cuda.conftest import config_of


class PretendedDevice(MetaDevice):
    """A GPU as far as launches can tell: they are noted, not run."""


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", note)
    return names


def test_every_kernel_of_a_step_is_rehearsed(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names = noted(monkeypatch)
    config = config_of(folder(max_position_embeddings=64), dtype="bfloat16", block_size=64, max_num_seqs=100)
    runner = CudaRunner(config, device=PretendedDevice(uses_pdl=True))
    with torch.inference_mode():
        runner.rehearse()
    expected = {
        *(
            "step_prep",
            "plan_decode",
            "embed",
            "rmsnorm",
            "skinny_gemm",
            "qknorm_rope_kv",
            "attn_decode",
            "attn_combine",
        ),
        *("attn_prefill", "activation_mul", "lm_head_sample", "sample_pick", "kv_clear", "edit_logits", "tile_maxima"),
        *("cutoff", "draw_tiles"),
    }
    assert {name.removesuffix("_kernel") for name in names} == expected
    assert configs.architecture_of(torch.device("meta")) == "sm_90"
