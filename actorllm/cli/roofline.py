"""`actorllm roofline`: step times of a GPU that is not there, from data sheets. Called by the command line."""

from __future__ import annotations

from pathlib import Path

from actorllm.cli.options import check_writable


def roofline(
    *, gpu: str, model: Path, tp: int = 1, weight_bits: int = 16, output: Path | None = None, name: str = ""
) -> None:
    """Compute a step-time model for the simulator from the data sheet of a GPU and the config.json of a model.

    It is a first guess, with no error that is known.

    Parameters
    ----------
    gpu
        A10G, A100, L4, L40S, H100, H200, B200, MI300X or RTX4090.
    model
        A config.json, or a folder with one.
    tp
        GPUs that share every layer.
    weight_bits
        Of a weight: 4, 8, 16 or 32.
    output
        Write the model to this file, as JSON.
    name
        Of the model.
    """
    from actorllm.scheduling.cost_model import to_json
    from actorllm.slo.data_sheets import read_config, roofline_of

    check_writable(output=output)
    found = roofline_of(gpu, read_config(model), tp=tp, name=name, weight_bits=weight_bits)
    print(f"{found.name}: {found.weight_bytes / 1e9:.1f} GB of weights are read in a step")
    print(f"{'DECODE ROWS':>12}  {'CONTEXT EACH':>12}  {'STEP':>9}")
    for d in (1, 16, 64, 256):
        print(f"{d:>12}  {1024:>12}  {1e3 * found.seconds(0, d, 1024 * d):>6.2f} ms")
    print(f"{'PROMPT':>12}  {'':>12}  {'STEP':>9}")
    for p in (512, 2048, 8192):
        print(f"{p:>12}  {'':>12}  {1e3 * found.seconds(p, 0, 0, 0, p * p / 2):>6.2f} ms")
    if output is not None:
        output.write_text(to_json(found) + "\n")
