"""Writes vllm_names.json: the public names of the classes of a vLLM that docs/compatibility.md speaks of, what the
methods of its engines take, and the defaults of both; the endpoints of its server, and the fields of their bodies.

    python tests/project/vllm_names.py .../site-packages/vllm

Reads vLLM's source without importing it. Which class is in which table of the page is said here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actorllm.compat import MODULES

CLASSES: dict[str, list[tuple[str, str]]] = {
    "SamplingParams": [("sampling_params.py", "SamplingParams")],
    "PoolingParams": [("pooling_params.py", "PoolingParams")],
    "PoolingRequestOutput": [("outputs.py", "PoolingRequestOutput")],
    "BeamSearchParams": [("sampling_params.py", "BeamSearchParams")],
    "RepetitionDetectionParams": [("sampling_params.py", "RepetitionDetectionParams")],
    "StructuredOutputsParams": [("sampling_params.py", "StructuredOutputsParams")],
    "BeamSearchSequence": [("entrypoints/generate/beam_search/utils.py", "BeamSearchSequence")],
    "BeamSearchOutput": [("entrypoints/generate/beam_search/utils.py", "BeamSearchOutput")],
    "RequestOutput": [("outputs.py", "RequestOutput")],
    "CompletionOutput": [("outputs.py", "CompletionOutput")],
    "Logprob": [("logprobs.py", "Logprob")],
    "FlatLogprobs": [("logprobs.py", "FlatLogprobs")],
    "RequestMetrics": [("v1/metrics/stats.py", "RequestStateStats")],
    "LLM": [
        ("entrypoints/llm.py", "LLM"),
        ("entrypoints/generate/beam_search/offline.py", "BeamSearchOfflineMixin"),
        ("entrypoints/pooling/offline.py", "PoolingOfflineMixin"),
        ("entrypoints/rl/offline.py", "RLOfflineMixin"),
        ("entrypoints/common/offline.py", "OfflineInferenceMixin"),
    ],
    "LLMEngine": [("v1/engine/llm_engine.py", "LLMEngine")],
    "AsyncLLM": [("v1/engine/async_llm.py", "AsyncLLM"), ("engine/protocol.py", "EngineClient")],
    "EngineArgs": [("engine/arg_utils.py", "EngineArgs"), ("engine/arg_utils.py", "AsyncEngineArgs")],
}
TAKERS = {
    "Request arguments": [
        ("v1/engine/async_llm.py", "AsyncLLM", ("generate", "add_request")),
        ("v1/engine/llm_engine.py", "LLMEngine", ("add_request",)),
        ("entrypoints/llm.py", "LLM", ("generate",)),
    ]
}
BODIES: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("ChatCompletionRequest",),
    "/v1/completions": ("CompletionRequest",),
    "/v1/responses": ("ResponsesRequest",),
    "/v1/messages": ("AnthropicMessagesRequest",),
    "/v1/embeddings": ("EmbeddingCompletionRequest", "EmbeddingChatRequest"),
    "/classify": ("ClassificationCompletionRequest", "ClassificationChatRequest"),
    "/pooling": ("PoolingCompletionRequest", "PoolingChatRequest", "IOProcessorRequest"),
    "/score": ("ScoreDataRequest", "ScoreTextRequest", "ScoreQueriesDocumentsRequest", "ScoreQueriesItemsRequest"),
    "/rerank": ("RerankRequest",),
    "/tokenize": ("TokenizeCompletionRequest", "TokenizeChatRequest"),
    "/detokenize": ("DetokenizeRequest",),
    "/inference/v1/generate": ("GenerateRequest",),
}
"""The classes of what its server takes, by endpoint."""
MOST_HOMES = 2
"""Of a name that is not defined again and again, for other things."""
ROUTE = re.compile(r"@\w*router\.(get|post|put|delete|websocket)\(\s*\"([^\"]+)\"")
NOT_EXTRAS = {"self", "prompt", "prompts", "params", "sampling_params", "request_id", "use_tqdm"}


def class_of(file: Path, name: str) -> ast.ClassDef:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise SystemExit(f"{file} has no class {name}")


def members(node: ast.ClassDef) -> Iterator[str]:
    """Fields, methods, properties, and the attributes that the constructor sets."""
    for item in node.body:
        match item:
            case ast.FunctionDef(name="__init__"):
                for inner in ast.walk(item):
                    match inner:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def signatures(node: ast.ClassDef) -> dict[str, dict[str, list[str]]]:
    """What every public method takes: by position, and by name only."""
    return {
        item.name: {
            "positional": [argument.arg for argument in item.args.args if argument.arg not in ("self", "cls")],
            "named": [argument.arg for argument in item.args.kwonlyargs],
        }
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_")
    }


def fields(node: ast.ClassDef) -> list[str]:
    """In the order of the class, which is that of the constructor's arguments."""
    return [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def optional_fields(node: ast.ClassDef) -> list[str]:
    """Those that may be None."""
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and ("None" in ast.unparse(item.annotation) or (item.value is not None and ast.unparse(item.value) == "None"))
    ]


def parameters(node: ast.ClassDef, methods: tuple[str, ...]) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in methods:
            yield from (argument.arg for argument in [*item.args.args, *item.args.kwonlyargs])


class Bodies:
    """Fields of what vLLM's server takes, with those of the classes that a class is derived from."""

    def __init__(self, root: Path) -> None:
        self._classes: dict[str, list[ast.ClassDef]] = {}
        for file in sorted((root / "entrypoints").rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, []).append(node)

    def fields(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in self._classes.get(name, ()):
            for base in node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(base, ast.Name):
                    found |= self.fields(base.id)
            found |= {name for name in fields(node) if not name.startswith("_")} - {"field_names"}  # a ClassVar
        return found

    def of(self, names: tuple[str, ...]) -> list[str]:
        assert all(name in self._classes for name in names), names
        return sorted(set().union(*map(self.fields, names)))


def homes(root: Path) -> dict[str, list[str]]:
    """By name of those that `actorllm.compat` has in its submodules: the modules of vLLM that define it, if they are few."""
    names = {name for found in MODULES.values() for name in found}
    found: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] in ("benchmarks", "models", "model_executor", "_version"):
            continue
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    defined = [name]
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    defined = [name]
                case _:
                    continue
            for name in {*defined} & names:
                found.setdefault(name, []).append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) <= MOST_HOMES}


def endpoints(root: Path) -> list[str]:
    """As 'POST /path'."""
    texts = [file.read_text() for file in (root / "entrypoints").rglob("*.py")]
    return sorted({f"{method.upper()} {path}" for text in texts for method, path in ROUTE.findall(text)})


class Defaults:
    """Default values as JSON has them. What only running the code would tell is left out."""

    def __init__(self, root: Path) -> None:
        self._classes = {
            node.name: node
            for file in sorted((root / "config").glob("*.py"))
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef)
        }

    def of(self, node: ast.expr | None) -> list[Any]:
        """The value in a list; nothing where there is none, or none that can be read."""
        match node:
            case ast.Attribute(value=ast.Name(id=cls), attr=name) if cls in self._classes:
                return self._of_field(cls, name)
            case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=cls), ast.Constant(value=name)]):
                return self._of_field(cls, name)
            case ast.Call(func=ast.Name(id="field" | "Field"), keywords=keywords):
                return [value for k in keywords if k.arg == "default" for value in self.of(k.value)]
            case ast.Attribute():
                return [ast.unparse(node)]
            case None:
                return []
        try:
            value = ast.literal_eval(node)
            json.dumps(value)
        except (ValueError, TypeError):
            return []
        return [value]

    def _of_field(self, cls: str, name: str) -> list[Any]:
        for item in self._classes[cls].body:
            match item:
                case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                    return self.of(item.value)
        return []

    def of_fields(self, node: ast.ClassDef) -> dict[str, Any]:
        found = {}
        for item in node.body:
            match item:
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    for default in self.of(value):
                        found[name] = default
        return found

    def of_methods(self, node: ast.ClassDef) -> dict[str, dict[str, Any]]:
        methods: dict[str, dict[str, Any]] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_"):
                last = item.args.args[len(item.args.args) - len(item.args.defaults) :]
                pairs = [*zip(last, item.args.defaults, strict=True)]
                pairs += [(a, d) for a, d in zip(item.args.kwonlyargs, item.args.kw_defaults, strict=True) if d]
                methods[item.name] = {argument.arg: value for argument, d in pairs for value in self.of(d)}
        return methods


def main(root: Path) -> None:
    metadata = next(root.parent.glob("vllm*.dist-info")).name
    names = {
        table: sorted(
            {name for file, cls in classes for name in members(class_of(root / file, cls)) if not name.startswith("_")}
        )
        for table, classes in CLASSES.items()
    }
    for table, takers in TAKERS.items():
        extras = {name for file, cls, methods in takers for name in parameters(class_of(root / file, cls), methods)}
        names[table] = sorted(extras - NOT_EXTRAS)
    engines: dict[str, dict[str, dict[str, list[str]]]] = {"LLM": {}, "LLMEngine": {}, "AsyncLLM": {}}
    for table, found in engines.items():
        for file, cls in reversed(CLASSES[table]):
            found |= signatures(class_of(root / file, cls))
    defaults = Defaults(root)
    of_fields: dict[str, dict[str, Any]] = {}
    for table in ("SamplingParams", "BeamSearchParams", "RepetitionDetectionParams", "EngineArgs"):
        for file, cls in reversed(CLASSES[table]):
            of_fields[table] = of_fields.get(table, {}) | defaults.of_fields(class_of(root / file, cls))
    of_methods: dict[str, dict[str, dict[str, Any]]] = {}
    for table in engines:
        for file, cls in reversed(CLASSES[table]):
            of_methods[table] = of_methods.get(table, {}) | defaults.of_methods(class_of(root / file, cls))
    tree = ast.parse((root / "__init__.py").read_text())
    (exported,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    (init,) = [
        item for item in class_of(root / "entrypoints/llm.py", "LLM").body if getattr(item, "name", "") == "__init__"
    ]
    assert isinstance(init, ast.FunctionDef)
    constructor = [argument.arg for argument in [*init.args.args[1:], *init.args.kwonlyargs]]
    bodies = Bodies(root)
    made = {
        "version": metadata.removesuffix(".dist-info").split("-")[1],
        "exported": exported,
        "constructor": constructor,
        "names": names,
        "signatures": engines,
        "defaults": {"fields": of_fields, "methods": of_methods},
        "bodies": {path: bodies.of(classes) for path, classes in BODIES.items()},
        "endpoints": endpoints(root),
        "homes": homes(root),
        "optional": sorted(
            {name for file, cls in CLASSES["EngineArgs"] for name in optional_fields(class_of(root / file, cls))}
        ),
        "fields": {"SamplingParams": fields(class_of(root / "sampling_params.py", "SamplingParams"))},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
