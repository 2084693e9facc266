"""The GPU's runner on CPU tensors: kernels in Triton's interpreter, graphs as lists of launches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actorllm.config import EngineConfig, ModelConfig
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda import sleeping_weights, virtual_memory
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear import Form
from actorllm.model.quantization import form_of
from tests.model.cuda.dequantized import Dequantized
from tests.model.cuda.host_memory import PIECE, HostMemory
from tests.model.cuda.twins import TINY, Twins


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """The folder of a tiny model without weights, for load_format='dummy'."""

    def make(**differences: Any) -> Path:
        path = tmp_path / "tiny"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(TINY | differences))
        return path

    return make


@pytest.fixture
def make_runner() -> Callable[..., CudaRunner]:
    def make(path: Path, **arguments: Any) -> CudaRunner:
        runner = CudaRunner(config_of(path, block_size=64, **arguments), show_progress=False, device=HostDevice())
        runner.load()
        runner.allocate(24)
        return runner

    return make


@pytest.fixture
def make_twins(folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]) -> Callable[..., Twins]:
    """The same requests on both runners."""

    def make(differences: dict[str, Any] | None = None, **arguments: Any) -> Twins:
        path = folder(**(differences or {}))
        cpu = CpuRunner(config_of(path, block_size=16, **arguments), show_progress=False)
        cpu.load()
        cpu.allocate(96)
        return Twins(cpu, make_runner(path, **arguments))

    return make


@pytest.fixture
def make_quantized(make_runner: Callable[..., CudaRunner], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Twins]:
    """The same requests on the device with a quantized model, and on the CPU with its weights dequantized."""

    def oracle(model: ModelConfig, **_: bool) -> Form:
        return Dequantized(form_of(model, keeps_floats=True))

    def make(path: Path, **arguments: Any) -> Twins:
        for module in ("actorllm.model.cpu.runner", "actorllm.model.hf.transformers_backend"):
            monkeypatch.setattr(f"{module}.form_of", oracle)
        cpu = CpuRunner(config_of(path, block_size=16, **arguments), show_progress=False)
        cpu.load()
        cpu.allocate(96)
        return Twins(cpu, make_runner(path, **arguments))

    return make


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMemory]:
    """That of emulated devices which can give it back, in small pieces. Nothing is held before, nor afterwards."""
    for module in (virtual_memory, sleeping_weights):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    memory = HostMemory()
    assert (memory.held, memory.num_ranges) == (0, 0)
    yield memory
    memory.limit(None)
    memory.support(True)
    memory.fail("")
    gc.collect()
    assert (memory.held, memory.num_ranges) == (0, 0)


def config_of(path: Path | str, **arguments: Any) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "num_threads": 1,
        "max_num_seqs": 8,
        "device": "cpu",
    }
    return EngineConfig.from_arguments(path, **(defaults | arguments))
