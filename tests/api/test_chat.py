"""`chat()` on both front doors, and what requests without sampling parameters get."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from actorllm import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import InvalidParameterError, InvalidPromptError

STORYTELLER = BUNDLED_MODELS["storyteller"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
HELLO = [{"role": "user", "content": "Tell me of a fox."}]
RENDERED = "<|endoftext|>user: Tell me of a fox.\nassistant:"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storyteller with another template, other recommendations, and a tokenizer that names its own end of text."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").symlink_to(STORYTELLER / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(STORYTELLER / name, folder)
    tokens = orjson.loads((STORYTELLER / "tokenizer_config.json").read_bytes())
    del tokens["chat_template"]
    tokens["eos_token"] = "Ġman"
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(tokens))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    recommended = {"temperature": 0.0, "max_new_tokens": 7, "eos_token_id": [0]}
    (folder / "generation_config.json").write_bytes(orjson.dumps(recommended))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, topology="inline", num_threads=1, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def async_llm(folder: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(folder, num_threads=1, dtype="float32")
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


def short(**arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 4, "temperature": 0} | arguments))


def test_a_conversation_is_its_rendered_prompt(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, short(), use_tqdm=False)
    assert output.prompt == RENDERED
    assert output.prompt_token_ids.count(0) == 1, "the template wrote it, and nobody adds a second one"
    (same,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, short(), use_tqdm=False)
    assert same.outputs == output.outputs
    (text,) = llm.generate(RENDERED, short(), use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert text.prompt_token_ids == output.prompt_token_ids


def test_a_template_for_all_conversations(folder: Path, tmp_path: Path) -> None:
    """As in vLLM: Jinja, or the file of it; one of a call goes before."""
    file = tmp_path / "loud.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (file, str(file), "{{ messages[0].content }}!"):
        with LLM(folder, chat_template=given, topology="inline", num_threads=1, dtype="float32") as llm:
            assert llm.chat(HELLO, short(), use_tqdm=False)[0].prompt == "Tell me of a fox.!"
            llm.enqueue_chat(HELLO, short())
            assert llm.wait_for_completion(use_tqdm=False)[0].prompt == "Tell me of a fox.!"
            (own,) = llm.chat(HELLO, short(), use_tqdm=False, chat_template="{{ messages[0].role }}")
            assert own.prompt == "user"
    for wrong in (tmp_path / "none.jinja", "none.jinja", tmp_path, 5):
        with pytest.raises(InvalidParameterError, match="chat_template="):
            LLM(folder, chat_template=wrong)  # type: ignore[arg-type]


def test_a_list_of_conversations(llm: LLM) -> None:
    talks = [HELLO, [*HELLO, {"role": "assistant", "content": "There"}, {"role": "user", "content": "On."}]]
    params = [short(), short(max_tokens=2)]
    outputs = llm.chat(talks, params, use_tqdm=False)
    assert outputs[0].prompt == RENDERED
    assert outputs[1].prompt == f"{RENDERED} There\nuser: On.\nassistant:"
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 2]


def test_the_arguments_of_vllm(llm: LLM) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "There was a"}]
    arguments: dict[str, Any] = {"use_tqdm": False, "add_generation_prompt": False}
    (output,) = llm.chat(talk, short(), **arguments, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("assistant: There was a")
    (output,) = llm.chat(HELLO, short(), **arguments, chat_template="{{ x }}!", chat_template_kwargs={"x": "Once"})
    assert output.prompt == "Once!"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    (output,) = llm.chat(parts, short(), tokenization_kwargs={"truncate_prompt_tokens": 3}, **arguments)
    assert output.prompt is not None
    assert "user: a\nb\n" in output.prompt
    assert len(output.prompt_token_ids) == 3
    with pytest.raises(InvalidParameterError, match="lora_request"):
        llm.chat(HELLO, lora_request="x")  # type: ignore[arg-type]


def test_a_bad_conversation_fails_its_call_only(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="'image_url'"):
        llm.chat([HELLO, [{"role": "user", "content": [{"type": "image_url"}]}]], use_tqdm=False)
    with pytest.raises(InvalidPromptError, match="cannot render"):
        llm.chat(HELLO, use_tqdm=False, chat_template="{{ raise_exception('no') }}")
    (output,) = llm.chat(HELLO, short(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_what_the_model_recommends(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=7)
    for output in (*llm.generate(["Once upon a time"], use_tqdm=False), *llm.chat(HELLO, use_tqdm=False)):
        assert 0 < len(output.outputs[0].token_ids) <= 7
    params = llm.get_default_sampling_params()
    params.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens == 7
    (output,) = llm.generate("Once", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16, "parameters that are given are not mixed with recommended ones"


def test_the_tokenizers_own_end_of_text_ends_it(llm: LLM) -> None:
    (output,) = llm.generate("Once upon a time", short(max_tokens=20), use_tqdm=False)
    assert output.outputs[0].text == " there lived a"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    more = short(max_tokens=20, ignore_eos=True, skip_special_tokens=False)
    (output,) = llm.generate("Once upon a time", more, use_tqdm=False)
    assert output.outputs[0].text.startswith(" there lived a man")


async def test_async_chat_streams(async_llm: AsyncLLM) -> None:
    params = short(max_tokens=12, output_kind=RequestOutputKind.DELTA)
    outputs = [output async for output in async_llm.chat(HELLO, params, request_id="mine")]
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].prompt == RENDERED
    final = [output async for output in async_llm.chat(HELLO, short(max_tokens=12))][-1]
    assert final.outputs[0].text == "".join(output.outputs[0].text for output in outputs)
    default = [output async for output in async_llm.chat(HELLO, tenant="a", priority=1)][-1]
    assert len(default.outputs[0].token_ids) <= 7
    assert async_llm.get_default_sampling_params().max_tokens == 7
    assert "".join([piece async for piece in async_llm.stream("Once upon a time")]).strip()
    assert len((await async_llm.complete("Once upon a time")).outputs[0].token_ids) <= 7


async def test_async_chat_raises_at_once_what_is_wrong_with_the_messages(async_llm: AsyncLLM) -> None:
    with pytest.raises(InvalidPromptError, match="needs a 'role'"):
        async_llm.chat([{"content": "a"}])
    with pytest.raises(InvalidParameterError, match="continue_final_message"):
        async_llm.chat(HELLO, continue_final_message=True)
    with pytest.raises(InvalidPromptError, match="not valid Jinja"):
        async for _ in async_llm.chat(HELLO, chat_template="{% if %}"):
            pass


async def test_without_a_tokenizer() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidPromptError, match="skip_tokenizer_init=True"):
            async for _ in llm.chat(HELLO):
                pass
        output = await llm.complete([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False))
        assert len(output.outputs[0].token_ids) == 3
        assert output.outputs[0].text == ""
