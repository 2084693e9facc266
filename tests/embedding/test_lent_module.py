"""`module=`: an engine that generates with the parameters of a training loop, which trains as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
import transformers

from actorllm import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.hf.transformers_backend import load, read_plan
from actorllm.model.hf.twin import twin
from tests.model.hf.decoders import SHAPE, VOCAB, prompt, save

INLINE: dict[str, Any] = {"topology": "inline", "kv_cache_memory_bytes": 4 << 20, "num_threads": 1}
NUM_TOKENS, PROMPT_LENGTH = 24, 70
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


def llama(**more: Any) -> Any:
    """A random model in training mode, with dropout: it draws from torch's generator."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SHAPE | {"attention_dropout": 0.1} | more)
    return transformers.LlamaForCausalLM(config).train()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """What transformers generates, with the mode of the model as it was."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        ids_out = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :]
    model.train(was_training)
    return ids_out.tolist()


def stream(llm: LLM, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def change(model: Any) -> None:
    """A step of an optimizer, large enough to change every stream."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    ids = torch.tensor([prompt(9, 30)])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3-moe", "gpt-neox", "bloom"])
def test_streams_equal_generate_and_those_of_the_same_weights_from_a_folder(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    ids = [prompt(seed, 5 + 9 * seed) for seed in range(3)]
    sampled = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, seed=5, logprobs=3)
    with LLM(module=model, **INLINE) as lent, LLM(tmp_path, skip_tokenizer_init=True, **INLINE) as read:
        for one in ids:
            assert stream(lent, one) == greedy(model, one) == stream(read, one)
        assert [stream(lent, one, sampled) for one in ids] == [stream(read, one, sampled) for one in ids]


def test_no_parameter_is_copied() -> None:
    model = llama()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    config = EngineConfig.from_arguments(module=model, **INLINE).model
    assert config.module is not None
    decoder = load(read_plan(config, config.module.tree), config, torch.float32, False)
    own = dict(decoder.model.named_parameters())
    assert own.keys() == places.keys()
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in own.items()} == places


# Training beside it


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that training could notice, as it is now."""
    modules = dict(model.named_modules())
    found: dict[str, Any] = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    found |= {f"gradient {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        assert any(parameter is one for one in model.parameters())
        found |= {f"optimizer {number} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    found["random state"] = torch.get_rng_state()
    found["types"] = {n: (type(p), p.requires_grad, p.is_inference()) for n, p in model.named_parameters()}
    found["modes"] = {n: m.training for n, m in modules.items()}
    found["hooks"] = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules.items()}
    found["attributes"] = {n: sorted(vars(m)) for n, m in modules.items()}
    found["configuration"] = model.config.to_dict() | {"attention": model.config._attn_implementation}
    found["settings"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    return found


def assert_same(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    assert ours.keys() == alone.keys()
    for name, value in alone.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, (name, ours[name], value)


def train(
    model: Any, between: Callable[[], object], num_steps: int = 4
) -> tuple[list[dict[str, Any]], list[float], list[int]]:
    """States after every step, losses, and what a hook of the application counts. between: called wherever a loop may stop."""
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    states, losses = [], []
    torch.manual_seed(11)
    for step in range(num_steps):
        between()
        ids = torch.tensor([prompt(100 + step, 40), prompt(200 + step, 40)])
        loss = model(input_ids=ids, labels=ids).loss
        between()  # what the graph has saved must still be what it was
        loss.backward()
        between()
        states.append(state_of(model, optimizer))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.item())
    states.append(state_of(model, optimizer))
    return states, losses, calls


@contextmanager
def blocking(model: Any) -> Iterator[Callable[[], object]]:
    with LLM(module=model, **INLINE) as llm:
        yield lambda: stream(llm, prompt(1, PROMPT_LENGTH))


@contextmanager
def stepped(model: Any) -> Iterator[Callable[[], object]]:
    """On the stack of the training loop itself."""
    with LLMEngine(module=model, **INLINE) as engine:

        def generate() -> None:
            engine.add_request("0", {"prompt_token_ids": prompt(1, PROMPT_LENGTH)}, GREEDY)
            while engine.has_unfinished_requests():
                engine.step()

        yield generate


@pytest.mark.parametrize("door", [blocking, stepped])
def test_training_is_bit_equal_to_training_alone(door: Any) -> None:
    alone = train(llama(), lambda: None)
    model = llama()
    with door(model) as generate:
        beside = train(model, generate)
        generate()
    beside[0].append(state_of(model, torch.optim.SGD(model.parameters())))
    assert beside[1:] == alone[1:]
    for ours, theirs in zip(beside[0], alone[0], strict=False):
        assert_same(ours, theirs)
    # Also after the end of the engine there is nothing of it in the module.
    last = {name: value for name, value in alone[0][-1].items() if not name.startswith("optimizer")}
    assert_same(beside[0][-1], last)
    assert alone[1][0] != alone[1][-1], "nothing was learnt: the comparison would show nothing"


async def test_training_in_a_thread_is_bit_equal_while_streams_run() -> None:
    alone = train(llama(), lambda: None)
    model = llama()
    is_over = threading.Event()

    async with AsyncLLM(module=model, **INLINE) as llm:
        num_outputs = 0

        async def consume(seed: int) -> None:
            nonlocal num_outputs
            while not is_over.is_set():
                async for _ in llm.generate({"prompt_token_ids": prompt(seed, 9)}, GREEDY):
                    num_outputs += 1

        async with anyio.create_task_group() as consumers:
            for seed in range(3):
                consumers.start_soon(consume, seed)
            try:
                beside = await anyio.to_thread.run_sync(train, model, lambda: None)
            finally:
                is_over.set()
        assert num_outputs
    assert beside[1:] == alone[1:]
    for ours, theirs in zip(beside[0], alone[0], strict=True):
        assert_same(ours, theirs)


# Weights that change


def replace_all(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).contiguous()


def load_other(model: Any) -> None:
    torch.manual_seed(8)
    other = transformers.LlamaForCausalLM(model.config)
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("changed", [change, replace_all, load_other])
def test_the_next_request_uses_the_new_weights_and_no_kv_of_the_old(changed: Callable[[Any], None]) -> None:
    model = llama()
    ids = prompt(1, PROMPT_LENGTH)
    prompts = [{"prompt_token_ids": ids}]
    with LLM(module=model, **INLINE) as llm:
        before = stream(llm, ids)
        (again,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert again.num_cached_tokens, "nothing is cached: the test would show nothing"
        changed(model)
        (after,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert after.num_cached_tokens == 0
        assert after.outputs[0].token_ids == greedy(model, ids) != before
        (again,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert again.num_cached_tokens
        assert again.outputs[0].token_ids == after.outputs[0].token_ids


def test_a_change_that_torch_does_not_count_needs_a_reset() -> None:
    model = llama()
    ids = prompt(1, PROMPT_LENGTH)
    with LLM(module=model, **INLINE) as llm:
        stream(llm, ids)
        for parameter in model.parameters():
            parameter.data.mul_(-1.5)
        llm.reset_prefix_cache()
        assert stream(llm, ids) == greedy(model, ids)


def test_salts_of_the_application_stay_apart() -> None:
    with LLM(module=llama(), **INLINE) as llm:
        cached = []
        for salt in ("a", "b", "a"):
            request = {"prompt_token_ids": prompt(1, PROMPT_LENGTH), "cache_salt": salt}
            cached.append(llm.generate([request], GREEDY, use_tqdm=False)[0].num_cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2]


# The twin


def test_the_twin_shares_parameters_and_nothing_that_is_set() -> None:
    model = llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, tie_word_embeddings=True)
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("hook"))
    bound = model.model.forward
    model.model.forward = bound  # as libraries do that wrap a method
    before = state_of(model, torch.optim.SGD(model.parameters()))
    other = twin(model)
    assert other.lm_head.weight is other.model.embed_tokens.weight is model.lm_head.weight
    assert not any(module.training for module in other.modules())
    assert vars(other.model)["forward"].__self__ is other.model
    other.set_attn_implementation("eager")
    other.model.rotary_emb.inv_freq.zero_()
    other(torch.tensor([prompt(1, 5)]))
    assert not seen
    assert_same(state_of(model, torch.optim.SGD(model.parameters())), before)


def test_the_twin_without_values_takes_no_memory() -> None:
    model = llama()
    empty = twin(model, on_meta=True)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert [p.shape for p in empty.parameters()] == [p.shape for p in model.parameters()]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "process"}, "copy of the weights in another process; use topology='inline'"),
        ({"model": "storyteller"}, "give one of them"),
        ({"name": "shared"}, "name='shared' does not go together"),
        ({"device": "cuda"}, "device='cuda' does not go together"),
        ({"model_impl": "vllm"}, "model_impl='vllm' does not go together"),
        ({"runner": "pooling"}, "runner='pooling' does not go together"),
        ({"revision": "v1.0"}, "revision='v1.0' does not go together"),
        ({"download_dir": "models"}, "download_dir='models' does not go together"),
        ({"hf_token": "secret"}, "module=LlamaForCausalLM: hf_token does not go together"),
        ({"dtype": "bfloat16"}, "the module's parameters are float32"),
        ({"max_model_len": 1000}, "more than the model's 128 positions"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncLLM(**{"module": llama(), **INLINE, **arguments})


def test_modules_that_cannot_be_lent() -> None:
    with pytest.raises(ConfigError, match="module=Linear must be a decoder of transformers"):
        AsyncLLM(module=torch.nn.Linear(2, 2), **INLINE)
    with pytest.raises(UnsupportedModelError, match="its parameters are on meta"):
        AsyncLLM(module=llama().to("meta"), **INLINE)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    translator = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(UnsupportedModelError, match="encoder with a decoder"):
        LLM(module=translator, max_model_len=64, **INLINE)
    with pytest.raises(ConfigError, match="model=None must be the name"):
        AsyncLLM(**INLINE)


def test_the_object_of_arguments_carries_it_and_json_does_not() -> None:
    model = llama()
    config = EngineArgs(None, module=model, **INLINE).create_engine_config()
    assert config.model.module is not None
    assert config.model.module.module is model
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_json(config.to_json()).model.module is None
