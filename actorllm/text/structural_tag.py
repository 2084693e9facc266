"""Structural tags: formats around JSON schemas, such as those in which models write tool calls, as a Lark grammar.

Formats are those of vLLM and xgrammar: `{"type": "structural_tag", "format": FORMAT}`. FORMAT is one of const_string, regex,
any_text, json_schema, sequence, or, tag, triggered_tags and tags_with_separator. The older form with "structures" and
"triggers" is understood as well. Texts that are special tokens of the model are matched as these tokens, since a grammar of
characters never matches them. Pure; called by text.grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ANY_TEXT = r"/(.|\n)*/"


def lark_of(tag: Mapping[str, Any], special: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """special: ids of special tokens by their text. Raises ValueError for a tag that is not understood."""
    format = tag.get("format")
    if format is None and "structures" in tag:
        format = {
            "type": "triggered_tags",
            "triggers": tag.get("triggers"),
            "tags": [_of_structure(s) for s in tag["structures"]],
        }
    if format is None:
        raise ValueError("a structural tag needs a 'format', or 'structures' and 'triggers'")
    writer = _Writer(special, json_options)
    start = writer.write(format)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, ""])


def schemas_of(tag: Any) -> Iterator[dict[str, Any]]:
    """The JSON schemas within a tag."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            for name, inner in part.items():
                if name in ("json_schema", "schema"):
                    if isinstance(inner, dict):
                        yield inner
                elif isinstance(inner, dict | list):
                    waiting.append(inner)


def _of_structure(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping):
        raise ValueError(f"a structure must be an object with begin, schema and end, not {structure!r:.80}")
    content = {"type": "json_schema", "json_schema": structure.get("schema") or {}}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end", "")}


class _Writer:
    """Collects the rules; an expression of them stands for each format."""

    def __init__(self, special: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._special = special
        self._json_options = dict(json_options)
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)()")

    def write(self, format: Any) -> str:
        if not isinstance(format, Mapping):
            raise ValueError(f"a format must be an object with a type, not {format!r:.80}")
        match format.get("type"):
            case "const_string":
                return self.text(_string(format, "value"))
            case "regex":
                # A bare slash would end it; one behind a backslash is there already as it has to be.
                inside = re.sub(
                    r"(\\.)|/", lambda found: found[1] or r"\/", _string(format, "pattern"), flags=re.DOTALL
                )
                return f"/{inside}/"
            case "any_text":
                return self._rule(self._token(ANY_TEXT))
            case "json_schema":
                return self._json(format.get("json_schema"))
            case "sequence":
                return self._rule(" ".join(self.write(one) for one in _list(format, "elements")))
            case "or":
                return self._rule(" | ".join(self.write(one) for one in _list(format, "elements")))
            case "tag":
                return self._tag(format)
            case "tags_with_separator":
                return self._tags_with_separator(format)
            case "triggered_tags":
                return self._triggered_tags(format)
        raise ValueError(f"structural tags of type {format.get('type')!r:.80} are not supported")

    def text(self, text: str) -> str:
        """Literal text, with its special tokens as such."""
        pieces = [piece for piece in self._split.split(text) if piece]
        if not pieces:
            return '""'
        return " ".join(
            f"<[{self._special[p]}]>" if p in self._special else json.dumps(p, ensure_ascii=False) for p in pieces
        )

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _token(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _lazy(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {body}")
        return name

    def _json(self, schema: Any) -> str:
        if schema is True or schema is None:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"json_schema must be a schema, not {schema!r:.80}")
        return self._rule("%json " + json.dumps({**schema, "x-guidance": self._json_options}, ensure_ascii=False))

    def _tag(self, tag: Any, begin: str | None = None) -> str:
        """begin: what is left of its beginning, where a trigger has been written."""
        if not isinstance(tag, Mapping):
            raise ValueError(f"a tag must be an object with begin, content and end, not {tag!r:.80}")
        opening = self.text(_string(tag, "begin") if begin is None else begin)
        ends = tag.get("end", "")
        ends = list(ends) if isinstance(ends, Sequence) and not isinstance(ends, str) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError(f"the end of a tag must be text, not {tag.get('end')!r:.80}")
        content = tag.get("content")
        # Free text up to its end is one rule: as two, the text could swallow the end.
        if isinstance(content, Mapping) and content.get("type") == "any_text" and any(ends):
            closing = " | ".join(self._until(end) for end in ends)
            return self._rule(f"{opening} ({closing})")
        closing = " | ".join(self.text(end) for end in ends)
        return self._rule(f"{opening} {self.write(content)} ({closing})")

    def _until(self, text: str) -> str:
        """Any text up to this one, and this one."""
        if not text:
            return self._token(ANY_TEXT)
        first, *others = [piece for piece in self._split.split(text) if piece]
        if first in self._special:
            return f"{self._token(ANY_TEXT)} {self.text(text)}"
        head = self._lazy(f"{self._token(ANY_TEXT)} {json.dumps(first, ensure_ascii=False)}")
        return f"{head} {self.text(''.join(others))}"

    def _tags_with_separator(self, format: Mapping[str, Any]) -> str:
        one = self._rule(" | ".join(self._tag(tag) for tag in _list(format, "tags")))
        if format.get("stop_after_first"):
            return one if format.get("at_least_one") else self._rule(f"{one}?")
        separator = self.text(str(format.get("separator", "")))
        several = self._rule(f"{one} ({separator} {one})*")
        return several if format.get("at_least_one") else self._rule(f"{several}?")

    def _triggered_tags(self, format: Mapping[str, Any]) -> str:
        """Text as it comes, and with a trigger one of the tags that begin with it."""
        triggers, tags = _list(format, "triggers"), _list(format, "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError(f"triggers must be texts, not {triggers!r:.80}")
        by_trigger: dict[str, list[str]] = {}
        for tag in tags:
            begin = _string(tag, "begin") if isinstance(tag, Mapping) else ""
            # A trigger in free text decides that one of its tags follows, so the tag's rest is what the grammar
            # demands.
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"a tag begins with {begin!r:.80}, and the triggers are {triggers!r:.80}")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, begin[len(trigger) :]))
        calls = self._rule(
            " | ".join(f"{self._until(trigger)} ({' | '.join(bodies)})" for trigger, bodies in by_trigger.items())
        )
        # How often a call may come: exactly once, at most once, at least once, or any number of times.
        many = "" if format.get("stop_after_first") else "+" if format.get("at_least_one") else "*"
        if format.get("stop_after_first") and not format.get("at_least_one"):
            many = "?"
        if format.get("stop_after_first") and format.get("at_least_one"):
            return calls
        return self._rule(f"{calls}{many} {self._token(ANY_TEXT)}")


def _string(format: Mapping[str, Any], name: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{format.get('type', 'a format')}: {name}={value!r:.80} must be text")
    return value


def _list(format: Mapping[str, Any], name: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{format.get('type', 'a format')}: {name}={value!r:.80} must be a list that is not empty")
    return value
