"""`EngineArgs` and `AsyncEngineArgs`: the arguments of an engine as one object, and as options of a command line.

Dataclasses whose fields are the arguments of `actorllm.types.options`, so that an argument is written down in one place. The
front doors take them by `from_engine_args`; `LLM(**dataclasses.asdict(args))` works too.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar, Unpack, get_args

import orjson

from actorllm.config import ARGUMENTS, EngineConfig, ModelConfig, human_number
from actorllm.errors import InvalidParameterError, UnknownArgumentError, nearest_name
from actorllm.types.command_words import SHORT, spelled_out
from actorllm.types.config_file import as_text, repeated, with_options_of_file
from actorllm.types.options import TYPES, EngineOptions, is_switch, meanings, with_options
from actorllm.types.vllm_options import VLLM_ARGUMENTS

DEFAULT_MODEL = "storyteller"

DEFAULTS: dict[str, Any] = (
    {"model": DEFAULT_MODEL} | {name: accepted[0] for name, accepted in VLLM_ARGUMENTS.items()} | ARGUMENTS
)
"""Every argument and what it is when not given."""

IDLE_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "enable_log_requests": VLLM_ARGUMENTS["enable_log_requests"],
    "aggregate_engine_logging": VLLM_ARGUMENTS["aggregate_engine_logging"],
    "client_addresses": (None,),
    "client_count": (1,),
    "client_index": (0,),
    "reset_connector": (False, True),
    "chat_template": (None,),
}
"""Arguments of vLLM's methods, and the values at which they ask for what is done anyway."""


def check_idle_arguments(**arguments: Any) -> None:
    """Raises InvalidParameterError for an argument of a method (IDLE_ARGUMENTS) that asks for what there is not."""
    for name, value in arguments.items():
        if value not in IDLE_ARGUMENTS[name]:
            accepted = " or ".join(repr(one) for one in IDLE_ARGUMENTS[name])
            raise InvalidParameterError(f"{name}={value!r} is not supported; leave it at {accepted}")


T = TypeVar("T", bound=type)

SECRETS = ("hf_token",)
"""Arguments that are not shown: what shows others may end in a log."""


def _with_arguments_as_fields(cls: T) -> T:
    return make_dataclass(  # type: ignore[return-value]
        cls.__name__,
        [(name, Any, field(default=None, repr=name not in SECRETS)) for name in DEFAULTS],
        bases=(cls,),
        init=False,
        namespace={"__doc__": cls.__doc__, "__module__": cls.__module__},
    )


@with_options
@_with_arguments_as_fields
class EngineArgs:
    """The arguments of an engine, and those of vLLM that have no counterpart (`actorllm.types.vllm_options`).

    An unknown name raises UnknownArgumentError here; values are checked by `create_engine_config`.
    """

    model: str | os.PathLike[str]

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[EngineOptions]) -> None:
        arguments: dict[str, Any] = {**options}
        for name in arguments:
            if name not in DEFAULTS:
                raise UnknownArgumentError(f"there is no engine argument {name!r}{nearest_name(name, DEFAULTS)}")
        for name, default in DEFAULTS.items():
            setattr(self, name, arguments[name] if name in arguments else copy.copy(default))
        self.model = model

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """The checked configuration.

        Arguments:
            usage_context: not looked at.

        Raises:
            ConfigError: names the argument, its value and the fix.
            ModelError: the model cannot be served.

        Example:
            config = EngineArgs("storyteller", max_num_seqs=4).create_engine_config()
            assert config.scheduler.max_num_seqs == 4
        """
        arguments = {name: getattr(self, name) for name in DEFAULTS if name != "model"}
        return EngineConfig.from_arguments(self.model, **arguments)

    def create_model_config(self) -> ModelConfig:
        """Of that what is about the model.

        Raises:
            ConfigError, ModelError: as `create_engine_config`.
        """
        return self.create_engine_config().model

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for every argument: `--max-model-len 512`, also `--max_model_len`; `--no-...` for switches.

        Options that the parser has already stay the program's own.

        Arguments:
            parser: any parser of argparse; the same is returned.

        Example:
            parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
            args = EngineArgs.from_cli_args(parser.parse_args(["--max-num-seqs", "4"]))
            assert args.max_num_seqs == 4
        """
        group, told = parser.add_argument_group("engine"), meanings()
        for name, default in DEFAULTS.items():
            long = name.replace("_", "-")
            # Short options of one letter are programs' own; `FlexibleArgumentParser` takes those that are not.
            short = [one for one, option in SHORT.items() if option == long and len(one) > 2]
            options = [*dict.fromkeys((f"--{long}", f"--{name}")), *short]
            if options[0] in parser._option_string_actions:
                continue  # the program has an option of this name, which is then read by `from_cli_args`
            group.add_argument(
                *options, dest=name, default=copy.copy(default), help=told.get(name), **_option_of(name, default)
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """From what a parser with `add_cli_args` returned; other options in it are left alone.

        Arguments:
            args: the namespace.
        """
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})  # type: ignore[arg-type]


class AsyncEngineArgs(EngineArgs):
    """The same, under the name that programs with an AsyncLLMEngine import."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose options may be spelled as vLLM's.

    That is with underscores in the place of dashes, short (`-tp 2`), and field by field (`--compilation-config.level 3`).
    `--config FILE.yaml` is a file of options, by their names; those of the command line count first.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's.

        Arguments:
            args: the command line as words; None: this program's.
            namespace: to be filled; None: a new one.

        Raises:
            ConfigError: names a field of an option that has no value, or that adds to what is no list; or what is wrong with
                the file of --config.
        """
        words = spelled_out(sys.argv[1:] if args is None else args, self._option_string_actions.__contains__)
        if "--config" not in self._option_string_actions:  # else it is an option of the program
            words = [word for word in with_options_of_file(words, self._written) if not self._is_idle_switch(word)]
        return super().parse_known_args([*map(self._spelled, words)], namespace)

    def _written(self, option: str, value: Any) -> list[str]:
        """An option of the file: a list as several words, where the option takes several."""
        action = self._option_string_actions.get(self._spelled(option))
        if isinstance(value, list) and action is not None and action.nargs in ("+", "*"):
            return [option, *(as_text(option, one) for one in value)]
        if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
            return [f"{option}={as_text(option, value)}"]
        return [*repeated(option, value)]

    def _is_idle_switch(self, word: str) -> bool:
        """`--no-name` of a switch that can be switched on only, as `store_true` makes it: a file may say false for it."""
        if not word.startswith("--no-") or self._spelled(word) in self._option_string_actions:
            return False
        action = self._option_string_actions.get(f"--{word[5:]}")
        action = action or self._option_string_actions.get(f"--{word[5:].replace('-', '_')}")
        return isinstance(action, argparse._StoreTrueAction)

    def _spelled(self, argument: str) -> str:
        name, sign, value = argument.partition("=")
        is_known = not name.startswith("--") or name in self._option_string_actions
        return argument if is_known else name.replace("_", "-") + sign + value


STRINGS = ("tokenizer", "name", "record", "admission_policy")
"""Arguments that are text and may look like a number."""


def _option_of(name: str, default: Any) -> dict[str, Any]:
    if is_switch(name):
        return {"action": argparse.BooleanOptionalAction}
    if default is None and set(get_args(TYPES.get(name))) == {bool, type(None)}:
        return {"action": argparse.BooleanOptionalAction}
    convert: Callable[[str], Any] = _literal
    if isinstance(default, str) or name in STRINGS:
        convert = str
    elif isinstance(default, int | float):
        convert = type(default)
    elif set(get_args(TYPES.get(name))) == {int, type(None)}:
        convert = _whole
    return {"type": convert, "metavar": name.upper()}


def _whole(text: str) -> int | None:
    """A whole number, also as people write it, or None. Raises ValueError."""
    return None if text in ("None", "null") else int(human_number(text))


def _literal(text: str) -> Any:
    """A number, an object or a list as in JSON, or None; everything else is text."""
    if text in ("None", "null"):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
