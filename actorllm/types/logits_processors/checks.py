"""What logits processors say of a request's parameters, before it is sent to the scheduler."""

from __future__ import annotations

import logging
from functools import cached_property

from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.types.logits_processors.interface import LogitsProcessor
from actorllm.types.logits_processors.paths import load
from actorllm.types.logits_processors.travel import U8, encode_params
from actorllm.types.params import SamplingParams

logger = logging.getLogger(__name__)


class ParameterChecks:
    """Of the processors of one engine. Called on the threads of the intake."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    @cached_property
    def _classes(self) -> list[type[LogitsProcessor]]:
        """Those that check anything. The worker says what is wrong with one that cannot be loaded."""
        found = []
        for path in self._paths:
            try:
                found.append(load(path))
            except ConfigError as error:  # in an attached program, which may not have the module
                logger.warning("parameters of requests are not checked by the processor: %s", error)
        return [one for one in found if one.validate_params.__func__ is not LogitsProcessor.validate_params.__func__]  # type: ignore[attr-defined]

    def checked(self, params: SamplingParams) -> U8:
        """The parameters as `Submit` carries them. Raises InvalidParameterError where a processor refuses them."""
        for one in self._classes:
            try:
                one.validate_params(params)
            except ValueError as error:
                raise InvalidParameterError(str(error)) from error
            except Exception as error:  # of the application's class
                raise InvalidParameterError(
                    f"{one.__qualname__}.validate_params failed: {type(error).__name__}: {error}"
                ) from error
        return encode_params(params)
