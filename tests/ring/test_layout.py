"""The memory map is free of overlaps, and the header is stored to in one way only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import actorllm.ring
from actorllm.ring import layout

PACKAGE = Path(actorllm.ring.__file__).parent

CACHE_LINE_WORDS = 8


def test_words_do_not_overlap() -> None:
    words = [value for name, value in vars(layout).items() if name.endswith("_WORD") and name != "READERS_WORD"]
    words.append(layout.LINK_ID_WORD + 1)
    for index in range(layout.MAX_READERS):
        base = layout.reader_word(index)
        words += [
            base + word for word in (layout.HEAD, layout.SLEEP, layout.READER_PID, layout.READER_START, layout.STATE)
        ]
    assert len(set(words)) == len(words)
    assert max(words) < layout.HEADER_BYTES // 8


def test_hot_words_of_different_writers_lie_on_different_cache_lines() -> None:
    readers = [layout.reader_word(index) + word for index in range(2) for word in (layout.HEAD, layout.SLEEP)]
    lines = [
        word // CACHE_LINE_WORDS for word in (layout.MAGIC_WORD, layout.TAIL_WORD, layout.SPACE_WANTED_WORD, *readers)
    ]
    assert len(set(lines)) == len(lines)


def test_the_longest_frame_fits_an_empty_ring_at_every_position() -> None:
    for capacity in (layout.MIN_CAPACITY, 4096, layout.MAX_CAPACITY):
        need = layout.max_payload(capacity) + layout.FRAME_HEADER_BYTES
        worst_pad = need - layout.ALIGNMENT  # the largest rest that is still too short for it
        assert need + worst_pad <= capacity
        assert 0 < layout.chunk_payload(capacity) <= layout.max_payload(capacity)


def test_header_words_are_stored_through_the_cast_view_only() -> None:
    """struct.pack_into zeroes the bytes before it stores, and a peer may read the zeros; numpy may store in pieces.

    So pack_into serves frame headers only, slices of the mapping are stored behind the header page only, and numpy
    never gets at the header.
    """
    behind_the_header = {"position", "HEADER_BYTES + offset"}
    slices = {"position:end", "HEADER_BYTES + offset:HEADER_BYTES + offset + count"}
    uses = []
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}: {ast.unparse(node) if isinstance(node, ast.expr) else ''}"
            if isinstance(node, ast.Attribute) and node.attr in ("pack_into", "frombuffer", "memmap", "ndarray"):
                uses.append((path.name, ast.unparse(node)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_pack_frame_header":
                assert ast.unparse(node.args[1]) in behind_the_header, where
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                target = ast.unparse(node.value)
                assert not target.endswith("view"), where
                if target.endswith("memory"):
                    assert ast.unparse(node.slice) in slices, where
    assert sorted(set(uses)) == [
        ("codec.py", "np.frombuffer"),
        ("ring.py", "FRAME_HEADER.pack_into"),
        ("ring.py", "np.frombuffer"),
    ]


def test_both_ends_of_every_pairing_are_marked() -> None:
    text = (PACKAGE / "ring.py").read_text()
    names = re.findall(r"SYNC POINT (\w+):", text)
    assert sorted(set(names)) == ["commit", "reclaim", "sleep", "space"]
    assert all(names.count(name) == 2 for name in names)
