"""Step times from measured kernels: they are added up, in the words of public profiles, and bad files are named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import from_json, load_model, preset, to_json
from actorllm.scheduling.kernel_model import Curve, KernelModel, Surface
from actorllm.slo.kernel_profiles import fit_kernels, is_kernel_profile, read_kernels
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import fixed_lengths, make_workload, poisson_arrivals

LAYERS = 4


def projection(tokens: float) -> float:
    """Microseconds."""
    return 50 + 0.5 * tokens


def decode(rows: float, context: float) -> float:
    return 3 + 0.01 * rows * context


def prompt(chunk: float, before: float) -> float:
    return 8 + 0.002 * (chunk * before + chunk * (chunk + 1) / 2) + 0.01 * before


def write(folder: Path) -> Path:
    """A profile with the columns of LLMServingSim."""
    folder.mkdir()
    sizes = (1, 16, 64, 256, 1024)
    dense = [f"qkv_proj,{t},{projection(t)}" for t in sizes] + [f"layernorm,{t},2" for t in sizes]
    dense += [f"embedding,{t},7" for t in sizes]
    (folder / "dense.csv").write_text("layer,tokens,time_us\n" + "\n".join(dense))
    rows = [f"lm_head,{n},{100 + n}" for n in (1, 32, 128)]
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "\n".join(rows))
    attention = [f"0,0,{n},{k},{decode(n, k)}" for n in (1, 8, 64) for k in (16, 512, 4096)]
    attention += [f"{c},{b},0,0,{prompt(c, b)}" for c in (16, 256) for b in (0, 512)]
    attention += [f"256,0,{n},{k},{prompt(256, 0) + 2 * decode(n, k)}" for n in (1, 64) for k in (16, 4096)]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
    (folder / "attention.csv").write_text(header + "\n".join(attention))
    return folder


def microseconds(model: KernelModel, *step: float) -> float:
    return 1e6 * model.seconds(*step)


def test_a_step_is_the_sum_of_its_kernels(tmp_path: Path) -> None:
    found = fit_kernels(read_kernels(write(tmp_path / "gpu")), LAYERS, fixed_s=1e-4)
    model = found.model
    rows, context = 8, 512
    once = 100 + 7
    assert microseconds(model, 0, rows, rows * context) == pytest.approx(
        once + 100 + rows + LAYERS * (projection(rows) + 2 * 2 + decode(rows, context))
    ), "norms are twice in a layer; the embedding and the logits once in a step"
    chunk, before = 256, 512
    pairs = chunk * before + chunk * (chunk + 1) / 2
    assert microseconds(model, chunk, 0, 0, before, pairs) == pytest.approx(
        once + 101 + LAYERS * (projection(chunk) + 2 * 2 + prompt(chunk, before)), rel=1e-6
    )
    beside = microseconds(model, 256, 64, 64 * 4096, 0, 256 * 257 / 2)
    alone = microseconds(model, 256, 0, 0, 0, 256 * 257 / 2)
    assert beside - alone == pytest.approx(64 + LAYERS * (0.5 * 64 + 2 * decode(64, 4096)), rel=1e-3), (
        "beside prompts decode rows have other kernels"
    )
    assert {part for part, _, _ in found.errors} == {"tokens", "logits", "decode", "mixed", "prompt"}
    assert not found.missing


def test_times_go_on_beyond_the_last_node_and_runs_are_those_of_single_steps(tmp_path: Path) -> None:
    model = fit_kernels(read_kernels(write(tmp_path / "gpu")), LAYERS).model
    assert model.tokens.at(4096) == pytest.approx(1e-6 * (7 + LAYERS * (projection(4096) + 4)))
    chosen = random.Random(0)
    for _ in range(50):
        d, steps = chosen.randint(1, 200), chosen.randint(1, 30)
        context = chosen.randint(d, d * 9000)
        assert model.decode_run(d, context, steps).tolist() == [
            model.seconds(0, d, context + d * step) for step in range(steps)
        ]
    assert from_json(to_json(model)) == model
    workload = make_workload(poisson_arrivals(30, 40.0, 1), fixed_lengths(30, 200, 40))
    shape = EngineShape(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=2048)
    one, other = (simulate(workload, shape, model, skip=skip) for skip in (True, False))
    assert one.num_steps_skipped
    assert one.timeline.end.tolist() == other.timeline.end.tolist()


def test_vidur_has_a_column_for_each_kernel_and_a_row_for_each_number_of_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "a100"
    folder.mkdir()
    mlp = (
        "num_tokens,num_tensor_parallel_workers,time_stats.mlp_up_proj.median,time_stats.emb.median,time_stats.emb.min"
    )
    rows = [f"{t},{tp},{1e-3 * projection(t) / tp},,0" for t in (1, 64, 1024) for tp in (1, 2)]
    (folder / "mlp.csv").write_text("\n".join([mlp, *rows, "64,2,,0.007,0"]))
    attention = (
        "batch_size,prefill_chunk_size,kv_cache_size,num_tensor_parallel_workers,"
        "time_stats.attn_prefill.median,time_stats.attn_decode.median,time_stats.attn_kv_cache_save.median"
    )
    rows = [f"1,{c},{b},2,{1e-3 * prompt(c, b)},,0.01" for c in (64, 256) for b in (0, 512)]
    rows += [f"{n},0,{k},2,,{1e-3 * decode(n, k)},0.01" for n in (1, 32) for k in (64, 2048)]
    (folder / "attention.csv").write_text("\n".join([attention, *rows]))
    with pytest.raises(ConfigError, match="shared by 1, 2 GPUs; choose one with --profile-tp"):
        read_kernels(folder)
    found = fit_kernels(read_kernels(folder, tp=2), LAYERS)
    assert found.missing == ("logits",)
    assert microseconds(found.model, 0, 32, 32 * 2048) == pytest.approx(
        7 + LAYERS * (projection(32) / 2 + decode(32, 2048))
    )


def test_layers_of_one_file_have_attention_by_tokens_and_cache(tmp_path: Path) -> None:
    file = tmp_path / "layers.csv"
    rows = [f"q_proj,{t},0,1,{1e3 * projection(t)}" for t in (1, 64)]
    rows += ["lm_head,1,0,1,90000", "attn,1,511,1,4000", "attn,64,0,1,9000"]
    file.write_text("layer_name,input,kv_cache,tp_size,latency(ns)\n" + "\n".join(rows))
    assert is_kernel_profile(file)
    model = fit_kernels(read_kernels(file), LAYERS).model
    assert microseconds(model, 0, 1, 512) == pytest.approx(90 + LAYERS * (projection(1) + 4))
    assert microseconds(model, 64, 0, 0, 0, 64 * 65 / 2) == pytest.approx(90 + LAYERS * (projection(64) + 9))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows below its header"),
        ("layer,tokens\nx,1", "no column for the duration of a kernel"),
        ("layer,tokens,time_us\nx,much,2", "line 2: tokens='much' is no number"),
        ("layer,tokens,time_us\nx,1,-2", "line 2: time_us='-2' must be 0 or more"),
        ("layer,size,time_us\nx,1,2", "no column for the size of 'x'"),
        ("layer,sequences,time_us\nlm_head,1,2", "has no kernel by tokens"),
        ("prefill_chunk,time_us\n1,2", "attention without its sizes"),
    ],
)
def test_a_profile_that_cannot_be_read_is_named(tmp_path: Path, text: str, told: str) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match=rf"(kernels|bad\.csv).*{told}"):
        read_kernels(folder)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Curve((2.0, 1.0), (1.0, 1.0)), "must be numbers that ascend"),
        (lambda: Curve((1.0,), (-1.0,)), "as many seconds, 0 or more"),
        (lambda: Surface((1.0,), (1.0,), ((1.0, 2.0),)), "as many lines of 1 seconds"),
        (lambda: KernelModel(Curve((1.0,), (1.0,)), prompt=(1.0,)), "must be 3 numbers"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()  # type: ignore[operator]


def test_the_command_says_what_is_missing_and_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = write(tmp_path / "gpu"), tmp_path / "model.json"
    assert cli.main(["calibrate", "--profile", str(folder)]) == 2
    assert "say how many --layers the model has" in capsys.readouterr().err
    (folder / "per_sequence.csv").unlink()
    assert cli.main(["calibrate", "--profile", str(folder), "--layers", "4", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "no kernel of logits" in out
    assert "on steps: unknown" in out
    assert load_model(str(output)).name == "gpu"
    steps = tmp_path / "steps.csv"
    steps.write_text("p,d,seconds\n0,1,1")
    assert cli.main(["calibrate", "--profile", str(steps), "--layers", "4"]) == 2
    assert "are of kernels" in capsys.readouterr().err


PARAMETERS = {
    "llama-3.1-8b": (7.5e9, 7.5e9), "phi-4": (14.1e9, 14.1e9), "qwen2.5-7b": (7.07e9, 7.07e9),
    "llama-3.1-70b": (69.5e9, 69.5e9), "qwen3-32b": (32.0e9, 32.0e9), "qwen3-30b-a3b": (3.03e9, 3.03e9),
    "mistral-small-24b": (22.9e9, 22.9e9), "llama-3.3-70b": (69.5e9, 69.5e9), "mixtral-8x7b": (12.7e9, 12.7e9),
}  # fmt: skip
"""Of a model without its embedding of the input: those that one token reads, and those that it is computed with."""


def test_no_published_step_is_faster_than_the_data_sheet() -> None:
    from actorllm.scheduling.cost_model import _KERNELS, _LINEAR
    from actorllm.slo.data_sheets import GPUS

    for name in (*_LINEAR["microseconds"], *_KERNELS["errors"]):
        gpu, _, model = name.removesuffix("-kernels").partition("-")
        size = 1 if model.endswith("-fp8") else 2
        model = model.removesuffix("-fp8")
        tp = 1
        if model.startswith("tp"):
            shared, _, model = model.partition("-")
            tp = int(shared.removeprefix("tp"))
        read, computed = PARAMETERS[model]
        device = GPUS[gpu.upper()]
        told = preset(name)
        faster = 2 / size  # arithmetic of fp8 is twice as fast
        assert told.seconds(0, 1, 1024) > size * read / (tp * device.bytes_per_s), name
        assert told.seconds(2048, 0, 0) > 2 * computed * 2048 / (tp * faster * device.flops), name
