"""`--config FILE.yaml` of `actorllm serve` and `FlexibleArgumentParser`: options from a file, before those of the command line.

A key is an option's name, with dashes or underscores; `model` or `model_tag` is the model. An option that the command line
gives is left out, whichever of its names is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from actorllm.errors import ConfigError

MAX_BYTES = 1 << 20
SAME = {
    "uds": "unix-socket",
    "api-server-count": "api-processes",
    "policy": "scheduling-policy",
    "model-tag": "model",
}
"""Second names of options."""


def with_config(arguments: Sequence[str]) -> list[str]:
    """The command line of `actorllm` with the options of its file. Raises ConfigError."""
    arguments = list(arguments)
    return ["serve", *with_options_of_file(arguments[1:])] if arguments[:1] == ["serve"] else arguments


Written: TypeAlias = Callable[[str, Any], Iterable[str]]
"""An option and its value, which is neither None nor a truth value, as words of a command line."""


def repeated(option: str, value: Any) -> Iterator[str]:
    """`--name=value`, of a list once for each item."""
    for one in value if isinstance(value, list) else [value]:
        yield f"{option}={as_text(option, one)}"


def with_options_of_file(arguments: Sequence[str], written: Written = repeated) -> list[str]:
    """Words of a command line with the options of its file. Raises ConfigError."""
    paths, own = [], []
    rest = iter(arguments)
    for one in rest:
        if one == "--config":
            paths.append(next(rest, ""))
        elif one.startswith("--config="):
            paths.append(one.partition("=")[2])
        else:
            own.append(one)
    if not paths:
        return own
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: give one file")
    given = {_plain(one[2:].partition("=")[0]) for one in own if one.startswith("--")}
    if own and not own[0].startswith("-"):
        given.add("model")
    options = [
        text
        for name, value in _read(paths[0]).items()
        if _plain(name) not in given
        for text in _words(name, value, written)
    ]
    # A positional argument stays first: an option that takes several values would take it, too.
    place = 0 if not own or own[0].startswith("-") else 1
    return [*own[:place], *options, *own[place:]]


def _plain(name: str) -> str:
    name = name.replace("_", "-").removeprefix("no-")
    return SAME.get(name, name)


def _read(path: str) -> Mapping[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ConfigError("--config needs more packages (yaml): pip install 'actorllm[serve]'") from error
    try:
        if not os.path.isfile(path):
            raise ConfigError(f"--config {path:.200}: there is no such file")
        if os.path.getsize(path) > MAX_BYTES:
            raise ConfigError(f"--config {path:.200} has more than {MAX_BYTES} bytes")
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        compose = loader.compose_node

        def compose_once(parent: Any, index: Any) -> Any:
            # Aliases of aliases are a tree without end for whatever copies it: some hundred bytes are enough.
            if loader.check_event(yaml.AliasEvent):
                raise yaml.YAMLError(f"it has an alias, *{loader.peek_event().anchor:.80}: write its value out")
            return compose(parent, index)

        loader.compose_node = compose_once
        tree = loader.get_single_data()
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: a date or number that is none
        raise ConfigError(f"--config {path:.200} cannot be read: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"--config {path:.200} must be a mapping from options to values")
    for name in tree:
        if not (name[:1].isalpha() and name.replace("-", "_").isidentifier()):
            raise ConfigError(f"--config {path:.200}: {name!r:.80} is no option's name")
    names: dict[str, str] = {}
    for name in tree:
        if (other := names.setdefault(_plain(name), name)) != name:
            raise ConfigError(
                f"--config {path:.200} gives one option as {other!r:.80} and as {name!r:.80}: keep one of them"
            )
    if "config" in tree:
        raise ConfigError(f"--config {path:.200} names another file: give one")
    return tree


def _words(name: str, value: Any, written: Written) -> Iterable[str]:
    option = "--model" if _plain(name) == "model" else "--" + name.replace("_", "-")
    if value is None:
        return ()
    if isinstance(value, bool):
        return (option if value else f"--no-{option[2:]}",)
    return written(option, value)


def as_text(option: str, value: Any) -> str:
    """A value as a command line has it. Raises ConfigError."""
    try:
        return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    except TypeError as error:  # a key of YAML that JSON does not have
        raise ConfigError(f"--config: {option:.80} has a name that is no text: {error}") from error
