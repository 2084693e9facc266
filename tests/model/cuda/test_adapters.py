"""LoRA adapters on a device: its streams are those of the CPU worker, with adapters in every mix of rows (float32)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, LoRARequest, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.errors import InvalidParameterError, UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.runner import CudaRunner
from actorllm.types.device import rules_of
from actorllm.types.options import DEFAULTS
from tests.model.adapters.lora_folders import write_adapter
from tests.model.cuda.adapted import LORA, fill, follow_adapters, layers_of, put
from tests.model.cuda.host_engine import ARGUMENTS, load
from tests.model.cuda.twins import TINY, Twins, prompt


@pytest.mark.parametrize(
    "family",
    [{}, {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, {"architectures": ["Olmo2ForCausalLM"]}],
    ids=["qwen3", "llama-tied", "olmo2"],
)
def test_streams_are_those_of_the_cpu_worker(
    family: dict[str, Any], tmp_path: Path, make_twins: Callable[..., Twins]
) -> None:
    twins = make_twins(family, **LORA)
    fill(twins, tmp_path, **family)
    follow_adapters(twins)


def test_a_recorded_step_serves_whatever_adapters_come_later(tmp_path: Path, make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(**LORA)
    while twins.runner.record_next():  # before a slot holds anything
        pass
    fill(twins, tmp_path)
    follow_adapters(twins)
    write_adapter(tmp_path / "new", layers_of(TINY), seed=5, size=1.0)
    for runner in (twins.cpu_runner, twins.runner):
        put(runner, 1, tmp_path / "new")
    twins.add(4, prompt(30, 3), adapter_id=1)
    twins.step({4: 30}, decode=[0])
    twins.step(decode=[0, 4])
    assert twins.runner.graphs.num_launched == 0
    assert twins.runner.graphs.num_replays > 10


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "launched"])
def test_a_step_without_adapters_launches_what_an_engine_without_them_does(
    is_recorded: bool, tmp_path: Path, make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of decode rows; a step with one adapted row beside others launches the products of adapters."""
    launched: list[str] = []

    def noted(name: str, on_host: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            launched.append(name)
            on_host(*args, **kwargs)

        return run

    for name, operation in ops.OPERATIONS.items():
        monkeypatch.setattr(operation, "on_host", noted(name, operation.on_host))

    def steps(twins: Twins, **parameters: Any) -> list[str]:
        twins.add(0, prompt(80, 1), **parameters)
        twins.add(1, prompt(20, 2))
        launched.clear()
        twins.step({0: 80, 1: 20})
        twins.step(decode=[0, 1])
        return launched.copy()

    options: dict[str, Any] = {"enforce_eager": not is_recorded}
    plain, adapted, with_one = make_twins(**options), make_twins(**options, **LORA), make_twins(**options, **LORA)
    for twins in (plain, adapted, with_one) if is_recorded else ():
        while twins.runner.record_next():
            pass
    fill(with_one, tmp_path)
    expected = steps(plain)
    assert steps(adapted) == expected
    assert "lora_shrink" not in expected
    assert steps(with_one, adapter_id=1).count("lora_expand") == 2 * 4 * TINY["num_hidden_layers"]


def test_adapters_beside_quantized_weights(
    folder: Callable[..., Path], tmp_path: Path, make_quantized: Callable[..., Twins]
) -> None:
    twins = make_quantized(folder(), quantization="int4", **LORA)
    fill(twins, tmp_path)
    follow_adapters(twins)


def test_an_engine_on_the_device_gives_the_texts_of_one_on_the_cpu(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three adapters for two slots: requests wait for each other, and steps are launched ahead."""
    path = folder()
    requests: list[LoRARequest | None] = [None]
    for number in (1, 2, 3):
        write_adapter(tmp_path / str(number), layers_of(TINY), seed=number, size=1.0)
        requests.append(LoRARequest(str(number), number, str(tmp_path / str(number))))
    prompts = [{"prompt_token_ids": prompt(30, i)} for i in range(8)]
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True, detokenize=False)

    def streams() -> list[Any]:
        with LLM(path, enable_lora=True, max_loras=2, max_cpu_loras=3, **ARGUMENTS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests * 2)
            return [output.outputs[0].token_ids for output in outputs]

    expected = streams()
    monkeypatch.setattr(WorkerActor, "_load", load)
    assert streams() == expected
    assert len({tuple(stream) for stream in expected}) == len(expected)


def test_what_has_no_adapters_on_the_device_is_refused_by_name(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]
) -> None:
    rules, options = rules_of("cuda"), dict(DEFAULTS) | {"device": "cuda", "enable_lora": True}
    assert rules.why_not(options, pools=False) is None
    refused = rules.why_not(options | {"model_impl": "transformers"}, pools=False)
    assert refused is not None
    assert "enable_lora=True" in refused
    with pytest.raises(UnsupportedModelError, match=r"enable_lora=True: on CUDA, Qwen3ForCausalLM runs through transf"):
        make_runner(folder(model_type="qwen3"), model_impl="transformers", **LORA)


def test_an_adapter_of_another_model_is_refused(
    folder: Callable[..., Path], tmp_path: Path, make_runner: Callable[..., CudaRunner]
) -> None:
    runner = make_runner(folder(), **LORA)
    write_adapter(tmp_path / "other", {"model.layers.0.mlp.down_proj": (64, 95)})
    with pytest.raises(InvalidParameterError, match=r"lora_A of model\.layers\.0\.mlp\.down_proj"):
        put(runner, 1, tmp_path / "other")
