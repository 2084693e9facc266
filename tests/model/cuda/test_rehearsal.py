"""Kernels are compiled before the weights are there, and what is compiled is what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from actorllm.model.cuda import ops
from actorllm.model.cuda.device import ALIGNMENT
from actorllm.model.cuda.rehearsal import MetaDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.rules import SamplingRules, encode_rules
from actorllm_kernels import configs
from tests.model.cuda.conftest import config_of
from tests.model.cuda.twins import DeviceDriver, prompt


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


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors_of(getattr(value, one.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)


def test_no_step_asks_for_kernels_that_were_not_rehearsed(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]
) -> None:
    """Triton compiles anew for tensors that do not begin at a multiple of 16 bytes; those of the rehearsal do."""
    driver = DeviceDriver(make_runner(folder(), max_num_seqs=5), num_blocks=24)
    for slot, length in ((0, 5), (3, 70), (4, 9)):
        driver.add(slot, prompt(length, slot), temperature=1.0, seed=slot, top_p=0.9)
    plans = [driver.plan({0: 5, 3: 33}, [])]
    rules = encode_rules([(2, 0, SamplingRules(repetition_penalty=1.5, num_logprobs=3, allowed_ids=(5, 6)))])
    driver.add(2, prompt(7, 2))
    more = {"new_rules": rules[0], "new_rule_numbers": rules[1]}
    plans += [driver.plan({3: 37, 2: 7}, [0], **more), driver.plan({4: 9}, [0, 3, 2]), driver.plan({}, [0, 3, 2, 4])]
    with ops.record() as launches:
        for plan in plans:
            handle = driver.runner.execute(plan)
            if handle.waits_for:
                driver.runner.choose(handle)
    assert len(launches) > 100
    for launch in launches:
        if launch.func.__module__ == ops.__name__:
            continue  # a product of torch's
        for tensor in tensors_of((*launch.args, *launch.keywords.values())):
            where = tensor.storage_offset() * tensor.element_size()
            assert where % ALIGNMENT == 0, f"{launch.func.__name__}: {tuple(tensor.shape)} at {where}"
