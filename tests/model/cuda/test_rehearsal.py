"""Kernels are compiled before the weights are there, and what is compiled is what is launched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from actorllm.messages import POOLING_CODES
from actorllm.messages.logit_rules import SamplingRules, encode_rules
from actorllm.model.cuda import ops
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.decoder import DeviceDecoder
from actorllm.model.cuda.device import ALIGNMENT, Download, HostDownload
from actorllm.model.cuda.rehearsal import MetaDevice
from actorllm.model.cuda.runner import CudaRunner, HeadRunner
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.parallel import Ranks
from actorllm.model.speculation.head_shape import read_head
from actorllm_kernels import configs, gates
from actorllm_kernels.compiled import Compiled, facts
from actorllm_kernels.launches import Launch, recording
from tests.model.cuda.conftest import config_of
from tests.model.cuda.decoders import GEMMA2, GPT_OSS
from tests.model.cuda.mixtures import DEEPSEEK_V2, DEEPSEEK_V3
from tests.model.cuda.twins import TINY, DeviceDriver, prompt
from tests.model.driver import int32


class PretendedDevice(MetaDevice):
    """A GPU as far as launches can tell: they are noted, not run."""

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return HostDownload([np.ones(1, np.bool_)])


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", note)
    return names


Key = tuple[Any, ...]


def key_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Key:
    """What a kernel is compiled for: constants, types, and what Triton makes of integers and addresses."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    key: list[Any] = [kernel.__name__]
    for parameter in kernel.params:
        value = values.pop(parameter.name)
        if parameter.is_constexpr:
            key.append((parameter.name, value))
        elif isinstance(value, torch.Tensor):
            where = value.storage_offset() * value.element_size()
            key.append((parameter.name, value.dtype, where % ALIGNMENT == 0))
        elif isinstance(value, int):
            is_known = not parameter.do_not_specialize
            is_narrow = value < 1 << 31 or bool(parameter.annotation_type)
            key.append((parameter.name, is_narrow, is_known and value == 1, is_known and value % 16 == 0))
    return (*key, *sorted(values.items()))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """Of everything that is launched."""
    seen: set[Key] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.add(key_of(self, args, options))

    monkeypatch.setattr(JITFunction, "run", note)
    return seen


@pytest.mark.parametrize(
    ("max_num_seqs", "model", "architecture", "ranks"),
    [
        (3, {}, "sm_90", Ranks()),
        (100, {}, "sm_90", Ranks()),
        (600, {}, "sm_90", Ranks()),
        (40, {"architectures": ["LlamaForCausalLM"]}, "sm_80", Ranks()),
        (40, {"architectures": ["Olmo2ForCausalLM"]}, "sm_90", Ranks()),
        (40, {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 24}, "sm_90", Ranks()),
        (40, GEMMA2, "sm_90", Ranks()),
        (40, GPT_OSS, "sm_80", Ranks()),
        (40, DEEPSEEK_V2, "sm_90", Ranks()),
        (40, DEEPSEEK_V3, "sm_80", Ranks(0, 2)),
        (40, {"quantization_config": {"quant_method": "fp8"}}, "sm_90", Ranks()),
        (40, {"quantization": "int4"}, "sm_80", Ranks()),
        (3, {"quantization": "int8", "quantization_twin": True}, "sm_80", Ranks()),
        (40, {"quantization_config": {"quant_method": "fp8"}, "quantization_twin": True}, "sm_90", Ranks(1, 2)),
        (40, {}, "sm_90", Ranks(0, 2)),
        (40, {"vocab_size": 301, "intermediate_size": 97}, "sm_80", Ranks(1, 2)),
        (40, {"enforce_eager": True}, "sm_90", Ranks()),
    ],
)
def test_nothing_is_launched_that_was_not_rehearsed(
    folder: Callable[..., Path],
    keys: set[Key],
    max_num_seqs: int,
    model: dict[str, Any],
    architecture: str,
    ranks: Ranks,
) -> None:
    """Prompts of few and of many tokens, alone and beside decode rows, sampled in each way; with dependent launches."""
    path = folder(**{"max_position_embeddings": 512} | model)
    options = {name: model.get(name) for name in ("quantization", "quantization_twin")}
    options["enforce_eager"] = model.get("enforce_eager", False)
    config = config_of(path, dtype="bfloat16", block_size=64, max_num_seqs=max_num_seqs, **options)
    runner = CudaRunner(config, device=PretendedDevice(uses_pdl=True))
    runner.collectives = Collectives(ranks, is_silent=True)
    with configs.target(architecture), torch.inference_mode():
        runner.rehearse()
        rehearsed = set(keys)
        assert rehearsed
        runner.model = runner._without_weights()
        runner._allocate(700)
        driver = DeviceDriver(runner, num_blocks=700)
        lengths = (20, 90, 40, *(1 for _ in range(max_num_seqs - 3)))
        for slot, length in enumerate(lengths):
            driver.add(slot, prompt(length, slot), temperature=1.0, seed=slot)
        plans = [
            driver.plan({0: 20}, []),
            driver.plan({1: 90}, [0]),
            driver.plan({2: 12}, [0, 1]),
            driver.plan({2: 28}, None),
        ]
        driver.remove(0)
        driver.add(0, prompt(30, 7), temperature=1.0, seed=1, top_p=0.5)
        plans += [driver.plan({}, [2, 1]), driver.plan({0: 30}, None), driver.plan({}, [0, 2, 1])]
        driver.remove(0)
        driver.add(0, prompt(9, 8))
        integers, numbers = encode_rules([(0, 0, SamplingRules(allowed_ids=(5, 6), bias_ids=(5,), biases=(1.0,)))])
        plans += [driver.plan({0: 9}, [2, 1], new_rules=integers, new_rule_numbers=numbers), driver.plan({}, [0, 1, 2])]
        driver.remove(0)
        rows = [1, 2]
        for count in (13, 14, 70, 500):
            new = list(range(len(rows) + 1, min(len(rows) + 1 + count, max_num_seqs)))
            plans.append(driver.plan(dict.fromkeys(new, 1), rows))
            rows = rows + new
        plans.append(driver.plan({}, rows))
        for plan in plans:
            handle = runner.execute(plan)
            if handle.waits_for:
                runner.choose(handle)
        runner.check_itself()
        runner.warm_prefill()
    assert keys - rehearsed == set()
    assert any(("PDL", True) in key for key in rehearsed) == (architecture == "sm_90")
    assert any("quantized_gemm" in key[0] for key in rehearsed) == any("quantization" in field for field in model)
    assert any("quantize_rows" in key[0] for key in rehearsed) == ("quantization_twin" in model)
    attending = [key for key in rehearsed if key[0] in ("attn_decode_kernel", "latent_decode_kernel")]
    assert any(("ROWS", 16 if max_num_seqs == 3 else 64) in key for key in attending)


def test_a_model_that_pools_launches_what_was_rehearsed(folder: Callable[..., Path], keys: set[Key]) -> None:
    """It has no head for text, and no decode steps."""
    path = folder(architectures=["Qwen3ForSequenceClassification"], max_position_embeddings=512)
    config = config_of(path, dtype="bfloat16", block_size=64, max_num_seqs=40, runner="pooling")
    runner = CudaRunner(config, device=PretendedDevice(uses_pdl=True))
    with configs.target("sm_90"), torch.inference_mode():
        runner.rehearse()
        rehearsed = set(keys)
        runner.model = runner._without_weights()
        runner._allocate(100)
        driver = DeviceDriver(runner, num_blocks=100)
        for slot, length in enumerate((20, 90, 1)):
            driver.add(slot, prompt(length, slot), pooling=POOLING_CODES["mean"])
        for plan in (driver.plan({0: 20}, []), driver.plan({1: 60}, []), driver.plan({1: 30, 2: 1}, [])):
            runner.execute(plan)
        runner.check_itself()
    assert rehearsed
    assert keys - rehearsed == set()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_that_drafts_launches_what_was_rehearsed(
    folder: Callable[..., Path], tmp_path: Path, keys: set[Key], method: str
) -> None:
    """Its prompts, first passes with one token of a row and with several, and further passes."""
    own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    if method == "eagle3":
        own |= {"draft_vocab_size": 100, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(TINY | own))
    config = config_of(
        folder(max_position_embeddings=512),
        dtype="bfloat16",
        block_size=64,
        max_num_seqs=40,
        speculative_config={"method": method, "model": str(head), "num_speculative_tokens": 3},
    )
    device = PretendedDevice(uses_pdl=True)
    target = CudaRunner(config, device=device)
    target.model = target._without_weights()
    assert isinstance(target.model, DeviceDecoder)
    assert isinstance(target.model_config, DecoderConfig)
    shape = read_head(config, target.model_config)
    runner = HeadRunner(
        config, shape, target.model, lambda device: target._twin(device)._without_weights(), device=device
    )
    with configs.target("sm_90"), torch.inference_mode():
        runner.rehearse()
        rehearsed = set(keys)
        runner.model = runner._without_weights()
        runner._allocate(100)
        driver = DeviceDriver(runner, num_blocks=100)
        for slot, length in enumerate((20, 90, 1)):
            driver.add(slot, prompt(length, slot))
        runner.execute(driver.plan({0: 20}, []))
        ids = np.arange(89)
        states = torch.zeros(89, shape.state_size, dtype=torch.bfloat16, device="meta")
        runner.follow(int32([1]), int32([1]), int32([89]), ids, states)
        for plan in (driver.plan({1: 4}, [0]), driver.plan({1: 86, 2: 1}, [0]), driver.plan({}, [1, 0, 2])):
            runner.execute(plan)
    assert rehearsed
    assert keys - rehearsed == set()
    assert any(("SKIPPED", 1) in key for key in rehearsed)


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
            "gemv",
            "skinny_gemm",
            "qknorm_rope_kv",
            "attn_decode",
        ),
        *("attn_prefill", "activation_mul", "lm_head_sample", "sample_pick", "kv_clear", "edit_logits", "tile_maxima"),
        *("weigh", "collect", "cutoff", "draw_tiles"),
    }
    assert {name.removesuffix("_kernel") for name in names} == expected
    assert configs.architecture_of(torch.device("meta")) == "sm_90"


FIVE = ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-1.5B", "Qwen3-8B", "Llama-3.1-8B")


@pytest.mark.slow(reason="compiles all launches of five models")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", gates.ALL_TARGETS)
def test_all_launches_of_the_five_models_pass_the_gates(architecture: str) -> None:
    """What tests/kernels compiles of them stands for these."""
    table = configs.table_of(architecture)
    launches: dict[tuple[str, str], Launch] = {}
    for model in FIVE:
        config = config_of(model, dtype="bfloat16", block_size=64, max_num_seqs=256, max_model_len=4096)
        runner = CudaRunner(config, device=PretendedDevice(uses_pdl=True))
        with configs.target(table), torch.inference_mode(), recording() as rehearsed:
            runner.rehearse()
        launches |= {(one.kernel.__name__, str(one)): one for one in rehearsed}

    def used(numbered: tuple[int, Launch]) -> tuple[str, Compiled]:
        number, one = numbered
        suffix = "-pdl" if one.constants.get("PDL") else ""
        name = f"{one.kernel.__name__.removesuffix('_kernel')}-{number}{suffix}"
        return name, facts(one.compile(architecture), one.grid)

    assert len(launches) > 100
    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(used, enumerate(launches.values())))
    assert gates.violations({architecture: found}) == []


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
