"""Every container that the source keeps for longer than a call, found by its syntax: queues, dictionaries, lists, caches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LOOKED_AT = (
    "actorllm/actors",
    "actorllm/api",
    "actorllm/attach",
    "actorllm/client",
    "actorllm/intake",
    "actorllm/kvcache",
    "actorllm/messages",
    "actorllm/scheduling",
    "actorllm/server",
    "actorllm/supervision",
    "actorllm/fleet",
    "actorllm/fleet/nodes",
    "actorllm/text",
    "actorllm/types",
    "actorllm",
)
"""Folders; of the last one the files alone."""

TYPES = {
    *("dict", "list", "set", "deque", "OrderedDict", "defaultdict", "Counter"),
    *("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue"),
    *("WeakSet", "WeakValueDictionary", "WeakKeyDictionary"),
}
CACHES = {"cache", "lru_cache"}


def containers() -> dict[str, str]:
    """Where it is ("module: Class.attribute") -> the line of source."""
    found: dict[str, str] = {}
    for folder in LOOKED_AT:
        for file in sorted((ROOT / folder).glob("*.py") if folder == "actorllm" else (ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            name = ".".join(file.relative_to(ROOT / "actorllm").with_suffix("").parts).removesuffix(".__init__")
            found |= {f"{name}: {where}": ast.unparse(node) for where, node in _of_module(tree)}
    return found


def _of_module(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty_container(node):
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    yield target.id, node
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if _last_name(called) in CACHES:
                    yield node.name, decorator
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", line) for name, line in _of_class(node))


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(line.value, ast.Call):
            for keyword in line.value.keywords:
                if keyword.arg == "default_factory" and _last_name(keyword.value) in TYPES:
                    yield line.target.id, line
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__post_init__"):
            for line in ast.walk(method):
                if isinstance(line, ast.Assign | ast.AnnAssign) and _is_container(line):
                    for target in _targets(line):
                        if isinstance(target, ast.Attribute) and _last_name(target.value) == "self":
                            yield target.attr, line


def _targets(line: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return line.targets if isinstance(line, ast.Assign) else [line.target]


def _is_container(line: ast.Assign | ast.AnnAssign) -> bool:
    if isinstance(line, ast.AnnAssign):
        kind = line.annotation
        if _last_name(kind.value if isinstance(kind, ast.Subscript) else kind) in TYPES:
            return not isinstance(line.value, ast.Name | ast.Attribute)  # given: whoever gave it keeps it
    value = line.value
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and _last_name(value.func) in TYPES


def _is_empty_container(line: ast.Assign | ast.AnnAssign) -> bool:
    """Of a module: one that is to be filled, or a cache, and no table."""
    value = line.value
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Call):
            return _last_name(value.func.func) in CACHES
        return _last_name(value.func) in TYPES and not value.args
    return isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value).strip("{}[]")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
