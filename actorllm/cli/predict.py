"""`actorllm predict`: does the simulator say of a measured run what was measured? Called by the command line."""

from __future__ import annotations

import math
from pathlib import Path

from actorllm.cli.laboratory import print_rows
from actorllm.cli.options import check_writable, see_own_folder
from actorllm.errors import ConfigError


def predict(
    run: Path,
    /,
    *,
    model: str,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 32_768,
    policy: str = "fcfs",
    fit_share: float = 0.0,
    output: Path | None = None,
) -> int:
    """Simulate a run that was measured elsewhere, and judge the prediction. Exit status 1 if a figure is missed.

    Parameters
    ----------
    run
        The JSON of `vllm bench serve --save-result --save-detailed`, ours of --output-json, or JSON lines of LLMServingSim.
    model
        Step times: a preset, a file, or module:Class.
    num_blocks
        KV blocks of the engine that was measured.
    fit_share
        Of the requests, the first ones, that the step times are fitted to before; the others are judged. 0: nothing is fitted.
    output
        Write the model, as fitted, to this file.
    """
    from actorllm.scheduling.cost_model import load_model, to_json
    from actorllm.slo.measured_runs import read_run
    from actorllm.slo.prediction import predict_run
    from actorllm.slo.simulator import EngineShape

    see_own_folder()
    check_writable(output=output)
    if num_blocks * block_size < max_model_len:
        raise ConfigError(f"{num_blocks} blocks of {block_size} hold less than max_model_len={max_model_len}")
    shape = EngineShape(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    measured = read_run(run)
    found = predict_run(measured, shape, load_model(model), policy=policy, fit_share=fit_share)
    left_out = f", {measured.num_skipped} left out" if measured.num_skipped else ""
    fitted = f"fitted to the first {found.num_fitted}" if found.num_fitted else "nothing fitted"
    print(f"{run.name}: {found.num_judged} requests judged{left_out}; {found.model.name}, {fitted}")
    rows: list[tuple[str, ...]] = [("FIGURE", "MEASURED", "PREDICTED", "ERROR", "LIMIT", "VERDICT")]
    for one in found.figures:
        limit = "-" if one.limit is None else f"{one.limit:.0%}"
        times = ["-" if math.isnan(value) else f"{1e3 * value:,.1f} ms" for value in (one.measured, one.predicted)]
        rows.append((one.name, *times, "-" if math.isnan(one.error) else f"{one.error:+.1%}", limit, one.verdict))
    print_rows(rows)
    if found.num_unfinished:
        print(f"{found.num_unfinished} requests did not finish in the simulation, and are in no figure")
    print("the prediction holds" if found.is_met else "the prediction does not hold")
    if output is not None:
        output.write_text(to_json(found.model) + "\n")
    return 0 if found.is_met else 1
