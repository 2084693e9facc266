"""`IOProcessor`: vLLM's interface of a plug-in that makes prompts of data of its own, and its own answer of their vectors.

A request of such an engine is data, which only the plug-in understands. `client.plugin_data` loads a plug-in and calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

from actorllm.types.params import PoolingParams, SamplingParams

IOProcessorInput = TypeVar("IOProcessorInput")
IOProcessorOutput = TypeVar("IOProcessorOutput")


class IOProcessor(ABC, Generic[IOProcessorInput, IOProcessorOutput]):
    """What a plug-in derives from: one object an engine, of which at most one method runs at a time.

    Arguments:
        vllm_config: the configuration of the engine.
        renderer: has the tokenizer of the engine (`get_tokenizer`); plug-ins of older releases leave it out.
    """

    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
        super().__init__()
        self.vllm_config = vllm_config

    def parse_data(self, data: object) -> IOProcessorInput:
        """What the data of a request mean.

        Arguments:
            data: of the request, as its caller gave it.

        Raises:
            ValueError, TypeError: they are wrong; the request is refused with the message.
        """
        older = getattr(self, "parse_request", None)  # of vLLM before 0.19
        if older is None:
            raise NotImplementedError(f"{type(self).__name__} has no parse_data")
        parsed: IOProcessorInput = older(data)
        return parsed

    def merge_sampling_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """Of engines that generate text, for which no plug-in is called.

        Arguments:
            params: of the request; None: it has none.
        """
        return params or SamplingParams()

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """How the prompts become vectors; called once for each prompt, behind `pre_process`.

        Arguments:
            params: of the request; None: it has none.
        """
        older = getattr(self, "validate_or_generate_params", None)  # of vLLM before 0.19
        if older is not None:
            merged: PoolingParams = older(params)
            return merged
        return params or PoolingParams(task="plugin")

    @abstractmethod
    def pre_process(self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any) -> Any:
        """The prompts of a request: one, or a list of them.

        Arguments:
            prompt: as `parse_data` has given it.
            request_id: of a server's request; None: there is none.
            kwargs: none.
        """

    async def pre_process_async(self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any) -> Any:
        """As `pre_process`; the server awaits it where a plug-in has its own.

        Arguments:
            prompt, request_id, kwargs: as in `pre_process`.
        """
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> IOProcessorOutput:
        """The answer.

        Arguments:
            model_output: a `PoolingRequestOutput` of each prompt, in their order.
            request_id: as `pre_process` was given it.
            kwargs: none.
        """

    async def post_process_async(
        self, model_output: AsyncGenerator[tuple[int, Any]], request_id: str | None = None, **kwargs: Any
    ) -> IOProcessorOutput:
        """As `post_process`; the server awaits it where a plug-in has its own.

        Arguments:
            model_output: the number of each prompt with its output, in any order.
            request_id, kwargs: as in `post_process`.
        """
        numbered = [item async for item in model_output]
        return self.post_process(
            [output for _, output in sorted(numbered, key=lambda item: item[0])], request_id, **kwargs
        )


# Functions that plug-ins use


def is_list_of(value: object, typ: type | tuple[type, ...], *, check: Literal["first", "all"] = "first") -> bool:
    """Whether it is a list of such items.

    Arguments:
        value: the list, or anything else.
        typ: of the items.
        check: "first" looks at the first of them only; an empty list passes.
    """
    if not isinstance(value, list):
        return False
    return all(isinstance(item, typ) for item in (value[:1] if check == "first" else value))


def convert_ids_list_to_tokens(tokenizer: Any, token_ids: Iterable[int]) -> list[str]:
    """The text of each token by itself.

    Arguments:
        tokenizer: as transformers has it.
        token_ids: of the tokens.
    """
    return [tokenizer.decode([token]) or "" for token in token_ids]
