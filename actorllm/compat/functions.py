"""Functions and classes that programs of vLLM import beside the engine: `actorllm.compat` has them under vLLM's modules."""

from __future__ import annotations

import functools
import gc
import os
import resource
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import ConfigError

T = TypeVar("T")


class Settings(dict[str, Any]):
    """A configuration of vLLM's as the mapping of its fields, which arguments of the engine take. Fields are attributes, too.

    Arguments:
        level: of compilation, which alone may be given without its name.
        fields: by name.
    """

    def __init__(self, level: Any = None, **fields: Any) -> None:
        super().__init__(fields if level is None else {"level": level, **fields})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this configuration was given no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class CompilationMode(IntEnum):
    """How vLLM compiles a model."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class IdCounter:
    """Numbers from `start` on, one at a time: `next(counter)`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Begin with 0 again."""
        self.counter = 0


class Platform:
    """What the engine computes on by default: `current_platform`."""

    @property
    def device_type(self) -> str:
        """ "cuda" where torch sees a GPU of NVIDIA, else "cpu"."""
        import torch

        return "cuda" if torch.cuda.is_available() and torch.version.cuda else "cpu"

    def is_cuda(self) -> bool:
        """A GPU of NVIDIA."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """As `is_cuda`: there is no ROCm."""
        return self.is_cuda()

    def is_cpu(self) -> bool:
        """No GPU."""
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        """False."""
        return False

    def is_tpu(self) -> bool:
        """False."""
        return False

    def is_xpu(self) -> bool:
        """False."""
        return False


current_platform = Platform()


class ModelRegistry:
    """Which architectures there are. Programs cannot add models that are written for vLLM's layers."""

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        """Those with a fused forward; other decoders of transformers run as well, if they pass a check at loading."""
        from actorllm.model.registry import FAMILIES, FAMILY_OF

        return frozenset({*FAMILIES, *FAMILY_OF})

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> NoReturn:
        """Refuses.

        Arguments:
            model_arch: the name of an architecture.
            model_cls: a class of vLLM's layers, or its path.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"ModelRegistry.register_model({model_arch!r:.80}): models of vLLM's layers do not run here; register the "
            f"architecture with transformers (AutoModelForCausalLM.register), or add a family (docs/internals/model.md)"
        )


async def merge_async_iterators(*iterators: AsyncIterator[T]) -> AsyncGenerator[tuple[int, T]]:
    """The items of several iterators as they come, each with the number of its iterator.

    Arguments:
        iterators: what one of them raises is raised here. When this generator is closed, they are, too.
    """
    send, receive = anyio.create_memory_object_stream[tuple[int, T] | Exception]()
    scopes = [anyio.CancelScope() for _ in iterators]
    tasks: set[object] = set()
    ended = [anyio.Event() for _ in iterators]

    async def pump(number: int, own: MemoryObjectSendStream[tuple[int, T] | Exception]) -> None:
        iterator = iterators[number]
        try:
            with own, scopes[number]:
                try:
                    async for item in iterator:
                        await own.send((number, item))
                except Exception as error:  # the program that merges them is told
                    await own.send(error)
        finally:
            with anyio.CancelScope(shield=True):
                if (aclose := getattr(iterator, "aclose", None)) is not None:  # streams of `generate` are no generators
                    await aclose()
            ended[number].set()

    with send:
        for number in range(len(iterators)):
            HostLoop.current().spawn(partial(pump, number, send.clone()), tasks)
    try:
        with receive:
            async for found in receive:
                if isinstance(found, Exception):
                    raise found
                yield found
    finally:
        for scope in scopes:
            scope.cancel()
        with anyio.CancelScope(shield=True):
            for one in ended:
                await one.wait()


def get_open_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def get_ip() -> str:
    """The address by which other machines reach this one: $VLLM_HOST_IP, else that of its route outwards, else 127.0.0.1."""
    if told := os.environ.get("VLLM_HOST_IP"):
        return told
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # chooses a route, and sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def cuda_device_count_stateless() -> int:
    """How many GPUs of NVIDIA this process may use."""
    import torch

    return torch.cuda.device_count() if current_platform.is_cuda() else 0


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """An endpoint that is cancelled when its client leaves. It returns None then.

    Arguments:
        handler: the endpoint; its second argument, or `raw_request`, is the request of starlette.
    """

    @functools.wraps(handler)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        request = args[1] if len(args) > 1 else kwargs["raw_request"]
        answer: Any = None
        raised: Exception | None = None

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                answer = await handler(*args, **kwargs)
            except Exception as error:  # not from within the group, which would wrap it
                raised = error
            tasks.cancel_scope.cancel()
        if raised is not None:
            raise raised
        return answer

    return watched


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Let this process have more files open, as far as the system allows.

    Arguments:
        target_soft_limit: how many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cli_env_setup() -> None:
    """Nothing: the command needs no environment of its own."""


def get_tokenizer(tokenizer_name: Any, *_: Any, **__: Any) -> Any:
    """The tokenizer of a model as transformers has it.

    Arguments:
        tokenizer_name: a bundled model, a folder, or a Hugging Face id whose files are here.

    Further arguments of vLLM are taken and have no effect.

    Raises:
        ConfigError: there is no such model. CorruptModelError: its tokenizer cannot be read.
    """
    from actorllm.config import read_model_folder
    from actorllm.text.tokenizer import transformers_tokenizer

    return transformers_tokenizer(read_model_folder(str(tokenizer_name))[0])


def load_chat_template(chat_template: Any, *, is_literal: bool = False) -> str | None:
    """The text of a chat template.

    Arguments:
        chat_template: that text, or the path of a file of it; None: none.
        is_literal: it is the text, whatever it looks like.

    Raises:
        InvalidParameterError: the path cannot be read.
    """
    from actorllm.text.chat_template import load_template

    return str(chat_template) if is_literal else load_template(chat_template)


def resolve_hf_chat_template(tokenizer: Any, chat_template: str | None = None, *_: Any, **__: Any) -> str | None:
    """The chat template that counts, as harnesses ask for it.

    Arguments:
        tokenizer: of transformers.
        chat_template: the caller's own, or the name of one of the model's; None: the tokenizer's.

    Further arguments of vLLM are taken and have no effect. None: the model has no template.
    """
    own = tokenizer.chat_template
    named: dict[str, str] = own if isinstance(own, dict) else {} if own is None else {"default": own}
    if chat_template is None:
        return named.get("default")
    return named.get(chat_template, chat_template)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what is no longer used; an engine ends by itself when it is dropped.

    Arguments:
        shutdown_ray: without effect.
    """
    gc.collect()
