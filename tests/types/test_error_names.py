"""The names that vLLM has for errors, by which programs catch them."""

from __future__ import annotations

import pytest

from actorllm import SamplingParams
from actorllm.errors import (
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    RequestFailedError,
    VLLMValidationError,
)


@pytest.mark.parametrize("error", [ConfigError, InvalidParameterError, InvalidPromptError])
def test_an_error_about_a_value_is_a_validation_error(error: type[Exception]) -> None:
    assert issubclass(error, VLLMValidationError)
    assert issubclass(error, ValueError)


def test_a_parameter_is_refused_with_it_and_a_failed_request_is_none() -> None:
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=-1)
    assert not issubclass(RequestFailedError, VLLMValidationError)
