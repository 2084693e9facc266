"""`OtherEngineOptions`: the engine's arguments that `actorllm serve` has no option of its own for, most of them vLLM's only.

Their values are read as the parser of `EngineArgs` reads them. The engine's own table says what becomes of each. It is taken, or
taken with a warning, or refused by name.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from cyclopts import Parameter

from actorllm.errors import ConfigError
from actorllm.types.options import DEFAULTS, is_switch
from actorllm.types.vllm_options import VLLM_ARGUMENTS

NOT_OF_A_COMMAND = {"module"}
"""Objects of the application."""


class OtherOptions:
    """Hidden options, `None` where they are not given."""

    def arguments(self) -> dict[str, Any]:
        """Those that are given, as the engine takes them. Raises ConfigError for a value that is not of the argument's type."""
        given = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}  # type: ignore[arg-type]
        if not given:
            return {}
        from actorllm.api.engine_args import EngineArgs

        parser = EngineArgs.add_cli_args(argparse.ArgumentParser(add_help=False, exit_on_error=False))
        words = [
            f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
            for name, value in given.items()
        ]
        try:
            read = parser.parse_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{(error.argument_name or '').split('/')[0]}: {error.message}") from error
        return {name: getattr(read, name) for name in given}


def other_engine_options(own: Iterable[str]) -> type[OtherOptions]:
    """A class of them with a field for each argument.

    own: the arguments that the command has options for.
    """
    names = sorted({*DEFAULTS, *VLLM_ARGUMENTS} - {*own} - NOT_OF_A_COMMAND)
    fields = [(name, bool | None if is_switch(name) else str | None, dataclasses.field(default=None)) for name in names]
    made = dataclasses.make_dataclass("OtherEngineOptions", fields, bases=(OtherOptions,), frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts takes a class of `types` for a built-in one
    return Parameter(name="*", show=False)(made)
