"""`actorllm trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actorllm import cli
from actorllm.slo.live.catalogue import TRACES
from actorllm.slo.traces import SAMPLE, load_trace


def test_the_bundled_sample_is_what_sample_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "sample", str(tmp_path / "s.jsonl")]) == 0
    assert (tmp_path / "s.jsonl").read_bytes() == SAMPLE.read_bytes()
    assert cli.main(["trace", "show", str(tmp_path / "s.jsonl")]) == 0
    out = capsys.readouterr().out
    for words in ("200 in 86.2 s", "CV 2.35", "33,191 tokens; median 132", "29% of them", "be 96, ls 104", "0 skipped"):
        assert words in out


def test_show_names_the_rows_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,10,5\n2023-11-16 18:17:04,0,5\n")
    assert cli.main(["trace", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "1 in 0.0 s" in out
    assert "2 rows of azure, 1 skipped\n  line 3: ContextTokens='0' must be a whole number of tokens" in out
    file.write_text("nothing,of,this\n")
    assert cli.main(["trace", "show", str(file)]) == 2
    assert "no known format" in capsys.readouterr().err


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "t.csv", tmp_path / "t.jsonl"
    source.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,5\nx,1,1\n1.5,20,6\n9.5,30,7\n")
    options = ("--num-requests", "2", "--rate", "4", "--mix", "a:1:ttft=0.5")
    assert cli.main(["trace", "convert", str(source), str(target), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"2 requests in {target}\n"
    assert "line 3: " in captured.err
    workload = load_trace(target).workload
    assert workload.arrival.tolist() == [0.0, 0.25]
    assert workload.num_prompt.tolist() == [10, 20]
    assert workload.classes[0].name == "a"
    assert cli.main(["trace", "convert", str(source), str(target), "--output-block-tokens", "64"]) == 2
    assert "output_block_tokens=64: the requests of" in capsys.readouterr().err
    blocks = tmp_path / "b.jsonl"
    blocks.write_text('{"timestamp": 0, "input_length": 99, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}\n')
    convert = ["trace", "convert", str(blocks), str(target), "--block-tokens", "16"]
    assert cli.main([*convert, "--output-block-tokens", "64"]) == 0
    assert "note: hash ids stand for 64 tokens now instead of 16" in capsys.readouterr().err
    assert json.loads(target.read_text())["block_tokens"] == 64
    assert cli.main([*convert, "--output-block-tokens", "65"]) == 2
    assert "regrouped to a multiple or a divisor of 16 only" in capsys.readouterr().err
    assert cli.main(["trace", "convert", str(source), str(tmp_path / "no" / "where")]) == 2
    assert "output=" in capsys.readouterr().err


def test_list_and_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["trace", "list"]) == 0
    out = capsys.readouterr().out
    for name, trace in TRACES.items():
        assert f"{name}  ({trace.licence}" in out
        assert trace.url in out
    assert cli.main(["trace", "fetch", "azure22"]) == 2
    assert "there is no public trace 'azure22'" in capsys.readouterr().err
    file = tmp_path / "azure23-conv.csv"
    file.write_text("something else")
    assert cli.main(["trace", "fetch", "azure23-conv", "--output", str(file)]) == 1
    assert "is not azure23-conv" in capsys.readouterr().err
