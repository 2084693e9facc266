"""What programs of vLLM import beside the engine does what it does there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from actorllm.compat.config import CompilationConfig, CompilationMode, SpeculativeConfig, StructuredOutputsConfig
from actorllm.compat.distributed import cleanup_dist_env_and_memory
from actorllm.compat.entrypoints.chat_utils import load_chat_template
from actorllm.compat.platforms import current_platform
from actorllm.compat.tokenizers import get_tokenizer
from actorllm.compat.utils import Counter, get_open_port

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError


def test_configurations_are_arguments_of_the_engine() -> None:
    compilation = CompilationConfig(3)
    compilation.mode = CompilationMode.VLLM_COMPILE
    with pytest.warns(UserWarning, match="the kernels are those of the backend"):
        config = EngineConfig.from_arguments(
            "storyteller",
            compilation_config=compilation,
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
        )
    assert compilation == {"level": 3, "mode": 3}
    assert compilation.level == 3
    assert config.speculation is not None
    assert config.speculation.num_speculative_tokens == 2
    with pytest.raises(AttributeError, match="no 'pass_config'"):
        _ = compilation.pass_config
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        EngineConfig.from_arguments("storyteller", kv_transfer_config=SpeculativeConfig(kv_connector="x"))


def test_small_ones(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_open_port()))
    counter = Counter(3)
    assert [next(counter), next(counter)] == [3, 4]
    counter.reset()
    assert next(counter) == 0
    assert get_tokenizer("storyteller", trust_remote_code=True).encode("Once upon a time")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert load_chat_template(template) == load_chat_template("{{ messages }}", is_literal=True) == "{{ messages }}"
    assert load_chat_template(None) is None
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        load_chat_template(str(tmp_path / "none.jinja"))
    assert current_platform.is_cpu() != current_platform.is_cuda()
    cleanup_dist_env_and_memory(shutdown_ray=True)
