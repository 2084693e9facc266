"""What a first hour has shown, in sentences that say what to do next."""

from __future__ import annotations

from typing import Any

from .targets import CHIP

SURPRISE = 1.15
"""A step that takes so many times the long end of its prediction is worth a look."""

ADVICE = {
    "attn_decode": "--stage search-decode tries other tiles and stages",
    "skinny_gemm": "--stage search-products tries other tiles, and --stage products compares with cuBLAS",
    "lm_head_sample": "--stage search-head tries other tiles",
    "attn_prefill": "--stage search-prefill tries other tiles",
}

Results = dict[str, dict[str, Any]]


def verdict(results: Results, beside: list[dict[str, Any]], problems: dict[str, str], chip: str) -> list[str]:
    """Sentences, the most important first. beside: measured and predicted steps; problems: why stages did not end well."""
    lines = [_correctness(results, problems), _order(results, problems)]
    failed = {
        name: why for name, why in problems.items() if name not in ("correctness", "order") and name not in results
    }
    lines += [
        f"Stage {name} ended without a result ({why}): run --stage {name} again by itself."
        for name, why in failed.items()
    ]
    lines += _speed(results, beside, chip)
    lines.append(_capabilities(results))
    lines += _tricks(results)
    return [line for line in lines if line]


def _correctness(results: Results, problems: dict[str, str]) -> str:
    if why := problems.get("correctness"):
        return (
            f"WRONG: {why}. No time below counts. An engine finds that at its start and computes these kernels by torch; report "
            f"the GPU, the driver and the table of correctness."
        )
    found = results.get("correctness")
    if found is None:
        return "Whether the kernels are right was not checked: run --stage correctness before you believe a time."
    return f"Kernels are right: {len(found['checks'])} launches agree with torch in bfloat16."


def _order(results: Results, problems: dict[str, str]) -> str:
    if why := problems.get("order"):
        return f"WRONG: {why}. Run engines on this GPU with enforce_eager=True until that is mended."
    if "order" not in results:
        return "Whether dependent launches are ordered was not checked: run --stage order."
    return "Dependent launches give the tokens of plain ones, bit for bit."


def _speed(results: Results, beside: list[dict[str, Any]], chip: str) -> list[str]:
    lines = []
    for model in dict.fromkeys(row["model"] for row in results.get("steps", {}).get("steps", [])):
        rows = [row for row in results["steps"]["steps"] if row["model"] == model and row["batch"] in (1, 32, 256)]
        wrong = [str(row["batch"]) for row in rows if row.get("verdict") != "right"]
        shares = ", ".join(f"{row['share']:.0%} at batch {row['batch']}" for row in rows)
        lines.append(f"Decode steps of {model} reach {shares} of what the memory allows." if rows else "")
        if wrong:
            lines.append(
                f"Those at batch {', '.join(wrong)} do not count: not all of a step was computed as it should."
            )
    if not lines:
        return ["No step was timed: run --stage steps."]
    for row in beside:
        if row["measured, ms"] <= SURPRISE * row["predicted to, ms"]:
            continue
        kernel = row["slower than predicted"].split(",")[0]
        more = ADVICE.get(kernel, "look at the table by kernel")
        ratio = row["measured / predicted"]
        where = f", most of it in {row['slower than predicted']}" if kernel else ""
        lines.append(
            f"{row['model']} at batch {row['batch']} takes {ratio:.1f} times what is predicted{where}: {more}."
        )
    if CHIP not in chip:
        lines.append(f"Targets are of an {CHIP}; this is another GPU, so shares and ratios count, and times do not.")
    return lines


def _capabilities(results: Results) -> str:
    rows = results.get("capabilities", {}).get("capabilities", [])
    wrong = [row["case"] for row in rows if not row["right"]]
    if wrong:
        return f"WRONG beside plain models: {', '.join(wrong)}. The table of capabilities says how far each is off, and why."
    return f"All {len(rows)} capabilities beside plain models agree with torch in float32." if rows else ""


def _tricks(results: Results) -> list[str]:
    rows = results.get("ablations", {}).get("ablations", [])
    slower = sorted({row["way"] for row in rows if row["to"] < 0.98})
    return [f"A step is faster with {way}: the table should say so; report it." for way in slower]
