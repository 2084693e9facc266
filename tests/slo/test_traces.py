"""Reading traces: every format, and what is said of rows that cannot be used."""

from __future__ import annotations

import gzip
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.scheduling.cost_model import preset
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.traces import SAMPLE, load_trace, write_trace
from actorllm.slo.workload import Workload, assign_classes, parse_mix, sample
from actorllm.types.objective import SLO, RequestClass


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
            "2023-11-16 18:17:05.4799600,3180,8",
        ),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,4808,10\n"
            "2024-05-10 00:00:01.509930+00:00,3180,8\n",
        ),
        ("vidur", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n1.5,3180,8\n"),
        (
            "burstgpt",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,4808,10,4818,API log\n"
            "6.5,ChatGPT,3180,8,3188,Conversation log\n",
        ),
        (
            "mooncake",
            '{"timestamp": 1500, "input_length": 3180, "output_length": 8, "hash_ids": [0, 2]}\n'
            '{"timestamp": 0, "input_length": 4808, "output_length": 10, "hash_ids": [0, 1]}\n',
        ),
        (
            "timed",
            '{"timestamp": 7, "input_length": 4808, "output_length": 10, "hash_ids": [0, 1]}\n'
            '{"timestamp": 8.5, "input_length": 3180, "output_length": 8, "hash_ids": [0, 2]}\n',
        ),
    ],
)
def test_every_format_gives_the_same_requests(tmp_path: Path, format: str, text: str) -> None:
    trace = load_trace(write(tmp_path, text), None if format != "timed" else "timed")
    workload = trace.workload
    assert (trace.report.format, trace.report.num_rows, trace.report.num_skipped) == (format, 2, 0)
    assert workload.arrival.tolist() == pytest.approx([0.0, 1.5])
    assert workload.num_prompt.tolist() == [4808, 3180]
    assert workload.num_output.tolist() == [10, 8]
    if workload.prefixes is not None:
        assert workload.prefixes.of(1).tolist() == [0, 2]
        assert workload.prefixes.block_tokens == (512 if format == "mooncake" else 16)
    if format == "burstgpt":
        assert [kind.name for kind in workload.classes] == ["API log", "Conversation log"]


@pytest.mark.parametrize(
    ("num_ids", "format", "block_tokens"), [((2, 1), "mooncake", 512), ((38, 20), "timed", 16), ((2, 20), "timed", 16)]
)
def test_json_lines_are_told_apart_by_their_hash_ids(
    tmp_path: Path, num_ids: tuple[int, int], format: str, block_tokens: int
) -> None:
    rows = [
        {"timestamp": at, "input_length": size, "output_length": 2, "hash_ids": list(range(num))}
        for at, size, num in zip((0, 2), (600, 310), num_ids, strict=True)
    ]
    trace = load_trace(write(tmp_path, "\n".join(map(json.dumps, rows))))
    assert trace.report.format == format
    assert trace.workload.prefixes is not None
    assert trace.workload.prefixes.block_tokens == block_tokens
    assert trace.workload.arrival.tolist() == pytest.approx([0.0, 2.0 if format == "timed" else 0.002])


def test_more_hash_ids_than_either_format_has_are_no_guess(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 99, "output_length": 2, "hash_ids": list(range(13))}
    path = write(tmp_path, json.dumps(row))
    with pytest.raises(ConfigError, match="13 hash ids for a prompt of 99 tokens are more than one for every 16"):
        load_trace(path)
    assert load_trace(path, block_tokens=8).report.format == "mooncake"


def test_malformed_rows_are_left_out_and_told(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03,10,5\n"
        "yesterday,10,5\n"
        "2023-11-16 18:17:04,ten,5\n"
        "\n"
        "2023-11-16 18:17:05,10\n"
        "2023-11-16 18:17:06,10,0\n"
        "2023-11-16 18:17:07,11,6\n"
    )
    trace = load_trace(write(tmp_path, text))
    assert trace.workload.num_prompt.tolist() == [10, 11]
    assert (trace.report.num_rows, trace.report.num_skipped) == (6, 4)
    assert dict(trace.report.problems) == {
        3: "Invalid isoformat string: 'yesterday'",
        4: "ContextTokens='ten' is not a number",
        6: "2 columns instead of 3",
        7: "GeneratedTokens='0' must be a whole number of tokens, at least 1",
    }
    assert "6 rows of azure, 4 skipped\n  line 3: " in str(trace.report)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"timestamp": 1, "input_length": 5', "not JSON: Expecting ',' delimiter"),
        ("[1]", "an object expected, got list"),
        ('{"timestamp": 1, "input_length": 5}', "'output_length' is missing"),
        ('{"timestamp": "1", "input_length": 5, "output_length": 1}', "timestamp='1' is not a number"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "timestamp is nan"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 1}', "input_length=5.5 must be a whole number"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids="),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "slo": {"tppt": 1}}', "SLO tppt=1 is not known"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "slo": -1}', "SLO tpot=-1 must be"),
        (f'{{"timestamp": 1{"0" * 400}, "input_length": 5, "output_length": 1}}', "000... is no time"),
        (f'{{"timestamp": 1, "input_length": 1{"0" * 400}, "output_length": 1}}', "input_length=1000"),
        (f'{{"timestamp": 1, "input_length": 5, "output_length": 1, "slo": 1{"0" * 400}}}', "SLO tpot=1000"),
        (f'{{"timestamp": 1, "input_length": 5, "output_length": 1, "slo": {{"e2e": 1{"0" * 400}}}}}', "SLO e2e=1000"),
        (f'{{"timestamp": 1, "input_length": 5, "output_length": 1, "priority": 1{"0" * 400}}}', "priority=1000"),
        (f'{{"timestamp": {"9" * 5000}, "input_length": 5, "output_length": 1}}', "Exceeds the limit"),
        ("[" * 100_000, "too deep in each other"),
        ('{"timestamp": ' + "[" * 900 + "]" * 900 + ', "input_length": 5, "output_length": 1}', "timestamp=[[["),
        ('{"timestamp": 1, "input_length": 5, "output_length": ' + "[" * 900 + "]" * 900 + "}", "output_length=[[["),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "priority": 1.5}', "priority=1.5 must be a whole"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "is_latency_sensitive": 1}', "must be true or false"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "patience": -1}', "patience=-1 must be a positive"),
    ],
)
def test_a_row_of_json_that_is_wrong_says_how(tmp_path: Path, row: str, problem: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1}'
    trace = load_trace(write(tmp_path, f"{good}\n{row}\n"))
    assert len(trace.workload) == 1
    ((line, told),) = trace.report.problems
    assert line == 2
    assert problem in told
    assert len(told) <= 203


def test_a_separator_of_lines_within_a_string_ends_no_line(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 5, "output_length": 1, "type_info": "a\u2028b"}'
    trace = load_trace(write(tmp_path, f"{row}\n{row}\n[]\n"))
    assert trace.workload.classes[0].name == "a\u2028b"
    assert trace.report.problems == [(3, "an object expected, got list")]


def test_a_cell_that_no_reader_takes_skips_its_row(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n" + "9" * 200_000 + ",1,1\n1,2,2\n"
    trace = load_trace(write(tmp_path, text))
    assert trace.workload.num_prompt.tolist() == [1, 2]
    ((line, problem),) = trace.report.problems
    assert (line, "field larger than field limit" in problem) == (3, True)


def test_only_the_first_problems_are_told_and_all_are_counted(tmp_path: Path) -> None:
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n" + "x,1,1\n" * 50
    report = load_trace(write(tmp_path, rows)).report
    assert (report.num_skipped, len(report.problems)) == (50, 20)
    assert str(report).endswith("and 30 more")


@pytest.mark.parametrize(
    ("text", "format", "problem"),
    [
        ("a,b\n1,2\n", None, "'a,b' is the first line of no known format"),
        ("", None, "first line of no known format"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\nx,1,1\n", None, "no usable row"),
        ("arrived_at,num_prefill,num_decode_tokens\n", "vidur", "no column 'num_prefill_tokens'; did you mean"),
        ("x", "azur", "'azur' is not known; did you mean 'azure'"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, format: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_trace(write(tmp_path, text), format)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'/nowhere/trace\.csv' cannot be read"):
        load_trace("/nowhere/trace.csv")


def test_the_sample_is_what_the_code_makes() -> None:
    trace, made = load_trace(SAMPLE), sample()
    assert trace.report.num_skipped == 0
    workload = trace.workload
    assert len(workload) == 200
    assert np.allclose(workload.arrival, made.arrival - made.arrival[0], atol=2e-6)
    assert np.array_equal(workload.num_prompt, made.num_prompt)
    assert np.array_equal(workload.num_output, made.num_output)
    assert {kind.name: kind for kind in workload.classes} == {kind.name: kind for kind in made.classes}
    assert workload.prefixes is not None
    assert made.prefixes is not None
    assert np.array_equal(workload.prefixes.ids, made.prefixes.ids)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    slo = {"ttft": 0.5, "tpot": 0.05}
    rows = [
        {
            "timestamp": 0,
            "input_length": 5,
            "output_length": 1,
            "slo": slo,
            "is_latency_sensitive": True,
            "tenant": "a",
        },
        {"timestamp": 10, "input_length": 6, "output_length": 2, "type_info": "batch", "priority": 4, "tenant": "b"},
        {"timestamp": 20, "input_length": 7, "output_length": 3, "slo": 0.1},
    ]
    first = load_trace(write(tmp_path, "\n".join(map(json.dumps, rows)))).workload
    write_trace(first, tmp_path / "again.jsonl")
    again = load_trace(tmp_path / "again.jsonl").workload
    assert (
        again.classes
        == first.classes
        == (
            RequestClass("unlabelled, latency sensitive", SLO(0.5, 0.05), True, type_info=""),
            RequestClass("batch", None, False, 4),
            RequestClass("unlabelled", SLO(tpot=0.1), type_info=""),
        )
    )
    assert again.tenants == ("", "a", "b")
    assert again.tenant_ids is not None
    assert again.tenant_ids.tolist() == [1, 2, 0]


def own_promises(folder: Path, num: int, **more: object) -> Path:
    """Rows of one type_info, each with a promise of its own; every second one is latency sensitive."""
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 20 + i % 7,
            "output_length": 3,
            "type_info": "chat",
            "is_latency_sensitive": i % 2 == 0,
            "slo": {"ttft": 1.0 + i / 1000, "tpot": 0.05} if i % 3 else None,
        }
        | more
        for i in range(num)
    ]
    return write(folder, "\n".join(map(json.dumps, rows)))


def test_requests_may_be_promised_what_no_other_is(tmp_path: Path) -> None:
    num = 40_000
    workload = load_trace(own_promises(tmp_path, num)).workload
    assert [kind.name for kind in workload.classes] == ["chat, latency sensitive", "chat"]
    assert [kind.label for kind in workload.classes] == ["chat", "chat"]
    assert workload.class_ids.tolist() == [0, 1] * (num // 2)
    assert workload.kind(num - 1).slo is None
    assert workload.kind(num - 2) == RequestClass(
        "chat, latency sensitive", SLO(1.0 + (num - 2) / 1000, 0.05), True, type_info="chat"
    )
    assert workload.repeated(2 * num).kind(num + 1).slo == workload.kind(1).slo
    assert workload.select(np.array([5, 7])).kind(1).slo == workload.kind(7).slo
    assert assign_classes(workload, [(RequestClass("plain"), 1)]).promises.slo(1) is None


def test_a_class_of_which_all_are_promised_the_same_is_promised_it(tmp_path: Path) -> None:
    workload = load_trace(own_promises(tmp_path, 10, slo=0.1, is_latency_sensitive=True)).workload
    assert workload.classes == (RequestClass("chat", SLO(tpot=0.1), True),)
    assert workload.own_promises is None


def test_labels_of_classes_are_told_apart(tmp_path: Path) -> None:
    rows = [{"type_info": name, "priority": p} for name, p in (("a", 0), ("a", 2), ("a, priority 2", 0), (None, 0))]
    rows = [row | {"timestamp": i, "input_length": 1, "output_length": 1} for i, row in enumerate(rows)]
    workload = load_trace(write(tmp_path, "\n".join(map(json.dumps, rows)))).workload
    assert [(kind.name, kind.label) for kind in workload.classes] == [
        ("a", "a"), ("a, priority 2", "a"), ("a, priority 2 (2)", "a, priority 2"), ("unlabelled", ""),
    ]  # fmt: skip


def test_everything_of_a_class_is_written(tmp_path: Path) -> None:
    first = load_trace(own_promises(tmp_path, 30)).workload
    write_trace(first, tmp_path / "again.jsonl")
    again = load_trace(tmp_path / "again.jsonl").workload
    assert [again.kind(i) for i in range(30)] == [first.kind(i) for i in range(30)]
    mix = parse_mix("ls:0.5:ttft=0.5+p/4000,tpot=0.05,patience=3.5,priority=2 be:0.5:sensitive=1")
    mixed = assign_classes(first, mix)
    write_trace(mixed, tmp_path / "mixed.jsonl")
    again = load_trace(tmp_path / "mixed.jsonl").workload
    assert [again.kind(i) for i in range(30)] == [mixed.kind(i) for i in range(30)]
    assert {kind.patience for kind in again.classes} == {3.5, None}


def shared_tokens(workload: Workload, a: int, b: int) -> int:
    """How many tokens two prompts are known to share."""
    prefixes = workload.prefixes
    assert prefixes is not None
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prefixes.of(a), prefixes.of(b), strict=False))
    return sum(1 for _ in pairs) * prefixes.block_tokens


def test_hash_ids_of_any_size_are_written_and_regrouped(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": size, "output_length": 2, "hash_ids": ids}
        for at, (size, ids) in enumerate(
            [(150, list(range(10))), (140, [*range(7), 70, 71]), (20, [0, 1]), (30, [0, 9])]
        )
    ]
    source = write(tmp_path, "\n".join(map(json.dumps, rows)))
    workload = load_trace(source, block_tokens=16).workload
    assert [shared_tokens(workload, 0, other) for other in (1, 2, 3)] == [112, 32, 16]
    write_trace(workload, tmp_path / "same.jsonl")
    same = load_trace(tmp_path / "same.jsonl").workload
    assert same.prefixes is not None
    assert same.prefixes.block_tokens == 16
    assert [shared_tokens(same, 0, other) for other in (1, 2, 3)] == [112, 32, 16]
    with pytest.raises(ConfigError, match=r"block_tokens=512 contradicts the trace '.*same.jsonl', whose rows say 16"):
        load_trace(tmp_path / "same.jsonl", block_tokens=512)
    write_trace(workload, tmp_path / "coarse.jsonl", block_tokens=64)
    coarse = load_trace(tmp_path / "coarse.jsonl").workload
    assert [shared_tokens(coarse, 0, other) for other in (1, 2, 3)] == [64, 0, 0]
    write_trace(workload, tmp_path / "fine.jsonl", block_tokens=4)
    fine = load_trace(tmp_path / "fine.jsonl").workload
    assert fine.prefixes is not None
    assert [fine.prefixes.of(row).size for row in range(4)] == [38, 35, 5, 8], "no more than the prompt is long"
    assert shared_tokens(fine, 0, 1) == 112
    write_trace(workload, tmp_path / "mooncake.jsonl", block_tokens=512)
    assert "block_tokens" not in (tmp_path / "mooncake.jsonl").read_text()
    for wrong in (24, 0, 100):
        with pytest.raises(
            InvalidParameterError, match=f"block_tokens={wrong}: hash ids that stand for 16 tokens each"
        ):
            write_trace(workload, tmp_path / "wrong.jsonl", block_tokens=wrong)


def test_rows_that_disagree_on_the_size_of_hash_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], "block_tokens": size}
        for size in (16, 32)
    ]
    with pytest.raises(ConfigError, match="block_tokens is 16 in some rows and 32 in others"):
        load_trace(write(tmp_path, "\n".join(map(json.dumps, rows))))
    rows[1]["block_tokens"] = 0
    report = load_trace(write(tmp_path, "\n".join(map(json.dumps, rows)))).report
    assert report.problems == [(2, "block_tokens=0 must be a whole number of tokens, at least 1")]


def servegen(folder: Path) -> Path:
    for client, rate in ((0, 2.0), (1, 0.5)):
        rows = [f"0,{rate},1.0,Gamma,1.0,{1 / rate}", "600,0,0,,0,0", f"1200,{rate},2.0,Weibull,0.7,{1 / rate}"]
        (folder / f"chunk-{client}-trace.csv").write_text("\n".join([*rows, "1800,1,2"]))
        lengths = {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}
        (folder / f"chunk-{client}-dataset.json").write_text(json.dumps({"0": lengths, "600": {"input_tokens": "{"}}))
    return folder


def test_clients_of_servegen_are_drawn_from(tmp_path: Path) -> None:
    folder = servegen(tmp_path)
    trace = load_trace(folder, start=0, stop=600, seed=4)
    workload = trace.workload
    assert workload.rate == pytest.approx(2.5, rel=0.2)
    assert set(workload.num_prompt.tolist()) == {100, 200}
    assert set(workload.num_output.tolist()) == {7}
    assert workload.tenants == ("client-0", "client-1")
    assert workload.tenant_ids is not None
    assert (workload.tenant_ids == 0).mean() == pytest.approx(0.8, abs=0.05)
    assert np.array_equal(load_trace(folder, start=0, stop=600, seed=4).workload.arrival, workload.arrival)
    assert load_trace(folder, start=0, stop=600, seed=4, rate=10.0).workload.rate == pytest.approx(10.0)
    problems = [problem for _, problem in trace.report.problems]
    assert any("chunk-0-trace.csv: 3 columns instead of 6" in problem for problem in problems)
    assert any("chunk-1-dataset.json: lengths at 600" in problem for problem in problems)
    for content in (
        b"[1]",
        b"[" * 100_000,
        b"\xff",
        b'{"0": {"input_tokens": "{1e99: 1}", "output_tokens": "{1: 1}"}}',
    ):
        (folder / "chunk-1-dataset.json").write_bytes(content)
        assert load_trace(folder, start=0, stop=600, seed=4).report.num_skipped == 4
    with pytest.raises(ConfigError, match=r"no request of .* between 600 and 1200"):
        load_trace(folder, start=600, stop=1200)
    with pytest.raises(ConfigError, match="as a ServeGen folder has"):
        load_trace(tmp_path / "empty", "servegen")


def round_of(session: str, asked: list[float], answered: list[float], size: int, num_output: int) -> dict[str, object]:
    """A row of TraceLab: when what it was asked came, and when the parts of its answer did; in seconds."""
    kinds = [("tool_result" if size > 1000 else "user_message", at) for at in asked]
    events = [*kinds, *(("reasoning", at) for at in answered)]
    return {
        "provider": session.partition(":")[0],
        "session_id": session,
        "input_tokens_total": size,
        "output_tokens": num_output,
        "timing_events": [
            {"event_type": kind, "timestamp": datetime.fromtimestamp(1_780_000_000 + at, UTC).isoformat()}
            for kind, at in events
        ],
    }


def test_rounds_of_agents_are_turns(tmp_path: Path) -> None:
    """A round waits for its tools since the round before it; one whose context was compacted begins a session of its own."""
    rows = [
        round_of("claude:a", [0.0], [4.0, 5.0], 1000, 100),
        round_of("codex:b", [3.0], [4.0], 700, 20) | {"user": "user_1"},
        round_of("claude:a", [5.5, 7.0], [9.0], 1500, 50),
        round_of("claude:a", [9.5], [9.9], 1600, 0),
        round_of("claude:a", [20.0], [21.0], 400, 10),
        round_of("claude:a", [20.5], [22.0], 450, 10),
        round_of("codex:b", [], [], 800, 20),
    ]
    file = tmp_path / "rounds.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    trace = load_trace(file)
    assert (trace.report.format, trace.report.num_rows) == ("tracelab", 7)
    assert dict(trace.report.problems) == {
        4: "output_tokens=0 must be a whole number of tokens, at least 1",
        7: "timing_events=[] must be a list of events, at least one",
    }
    workload = trace.workload
    assert workload.arrival == pytest.approx([0.0, 2.0, 3.0, 20.0, 20.0])
    assert workload.num_prompt.tolist() == [1000, 1500, 700, 400, 450], "told whole"
    assert [workload.kind(row).name for row in range(5)] == ["claude", "claude", "codex", "claude", "claude"]
    assert workload.turns is not None
    assert [workload.turns.parents_of(row) for row in range(5)] == [[], [0], [], [], [3]]
    assert workload.turns.think_s[1] == pytest.approx(2.0), "from the end of the answer to the last of its tools"
    assert workload.turns.think_s[4] == 0.0, "asked before the answer was over"
    run = simulate(workload, EngineShape(num_blocks=2000, max_model_len=4096), preset("a100-llama-3-8b"))
    assert run.evaluate().summary["completed"] == 5
    assert run.timeline.num_cached.sum() > 1000, "a round finds what was said before"


def test_a_packed_trace_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.jsonl.gz"
    row = json.dumps({"timestamp": 0, "input_length": 99, "output_length": 2}) + "\n"
    whole = gzip.compress((row * 50).encode())
    for broken in (whole[:-9], b"no gzip", whole[:20] + b"x" + whole[21:]):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"trace\.jsonl\.gz' cannot be read"):
            load_trace(file)
    file.write_bytes(whole)
    assert len(load_trace(file).workload) == 50
    monkeypatch.setattr("actorllm.slo.traces.MAX_LINE", len(row) - 1)
    with pytest.raises(ConfigError, match=f"a line has {len(row) - 1} characters or more"):
        load_trace(file)
