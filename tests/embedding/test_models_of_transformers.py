"""What transformers changes of the process while it loads is as before behind it, also where two engines load at once.

Models with a fused forward are read without it. The others are made by transformers, with `topology="inline"` in the application.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from actorllm.model.hf.loading import built
from tests.embedding.host_program import run_host
from tests.embedding.snapshots import SNAPSHOT
from tests.model.hf.decoders import save

PROGRAM = """
import numpy, sympy, torch, transformers  # sympy adds a filter of warnings, whoever imports it
torch.zeros(4).sum()
from actorllm import LLM, SamplingParams
before = snapshot()
for how in ({}, {"load_format": "dummy"}):
    llm = LLM(FOLDER, topology="inline", skip_tokenizer_init=True, num_threads=1, kv_cache_memory_bytes=4 << 20, **how)
    compare(before, "start")
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=8, temperature=1.0), use_tqdm=False)
    compare(before, "run")
    llm.shutdown()
    compare(before, "end")
print("compared")
"""


def test_an_engine_changes_nothing(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    host = run_host("-c", SNAPSHOT + f"FOLDER = {str(tmp_path)!r}\n" + PROGRAM)
    assert host.output == "compared\n"


class Auto:
    """As a class of transformers that makes modules, which takes its time."""

    def __init__(self, is_in: threading.Event, may_leave: threading.Event) -> None:
        self._is_in = is_in
        self._may_leave = may_leave

    def from_config(self, config: object, *, dtype: torch.dtype, **how: Any) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self._is_in.set()
        self._may_leave.wait(0.5)  # to no avail, where loads take turns
        torch.set_default_dtype(before)


def state() -> tuple[torch.dtype, int, bool]:
    return torch.get_default_dtype(), logging.get_verbosity(), logging.is_progress_bar_enabled()


def set_state(dtype: torch.dtype, verbosity: int, has_progress: bool) -> None:
    torch.set_default_dtype(dtype)
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if has_progress else logging.disable_progress_bar)()


def test_two_loads_at_once_leave_the_process_as_it_was() -> None:
    """The second would put back what the first has set, which is then the application's."""
    before = state()
    first_is_in, second_is_in, first_has_left = threading.Event(), threading.Event(), threading.Event()

    def load(auto: Auto, has_left: threading.Event) -> None:
        built(auto, None, "eager", torch.bfloat16)
        has_left.set()

    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(load, Auto(first_is_in, second_is_in), first_has_left)
            assert first_is_in.wait(30)
            second = pool.submit(load, Auto(second_is_in, first_has_left), threading.Event())
            first.result(30)
            second.result(30)
        assert state() == before
    finally:
        set_state(*before)


class Drawing:
    """As a class of transformers. Meanwhile another thread of the application draws."""

    drawn: torch.Tensor

    def from_config(self, config: object, **how: Any) -> None:
        self.drawn = torch.rand(3, device="cpu")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_modules_without_weights_take_nothing_of_torchs_random_state(kind: str) -> None:
    before = torch.get_rng_state()
    config = CONFIG_MAPPING[kind]()
    config.num_hidden_layers = 1
    built(AutoModelForCausalLM, config, "eager", torch.float32, torch.device("meta"))
    assert torch.equal(torch.get_rng_state(), before)
    auto = Drawing()
    built(auto, config, "eager", torch.float32, torch.device("meta"))
    assert not torch.equal(torch.rand(3), auto.drawn), "what the application has drawn meanwhile is drawn again"
