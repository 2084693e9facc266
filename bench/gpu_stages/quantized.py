"""Products with weights of 8 and 4 bits beside those of bfloat16, for the layers of the models: of decode rows and of prompts.

W8A16 and W4A16 are what all rows have (`model.cuda.quantized`), W8A8 what rows of prompts may have (`model.cuda.prompt_products`).
The last is held against plain numbers first. Weights come from memory, as in stage `products`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from actorllm.model.cuda import ops
from actorllm.model.cuda.prompt_products import DeviceByKind, PromptProducts, difference_of
from actorllm.model.cuda.quantized import DeviceQuantized, Workspaces, linear
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from actorllm_kernels.skinny_gemm import SplitScratch

from .clock import Bench
from .inputs import bf16
from .models import Shape
from .products import CACHE_BYTES

DECODE_ROWS, PROMPT_ROWS = (1, 16, 64), (512, 2048)
TRIED_ROWS = (1, 17, 515)
FORMS: dict[str, Any] = {"fp8": Fp8, "int8": Int8, "int4": Int4}


def run(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Rows of both kinds, and what is wrong with products of 8 bits by 8 bits."""
    rows: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for shape in shapes:
        for name, outputs, inputs in shape.linears:
            for form in FORMS:
                found, faults = _compare(bench, shape, name, form, outputs, inputs)
                rows += found
                wrong += faults
                bench.empty_cache()
    return {"quantized": rows, "faults": wrong}


def _compare(
    bench: Bench, shape: Shape, name: str, form: str, outputs: int, inputs: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    device, number = bench.device, bf16(1, 1, device=bench.device)
    workspaces, products = Workspaces(number.dtype, device), PromptProducts()
    copies = bench.pick(max(2, -(-CACHE_BYTES // (outputs * inputs))), 1)
    plain = [bf16(outputs, inputs, device=device, scale=inputs**-0.5) for _ in range(copies)]
    layers: list[Any] = [linear(FORMS[form].of(weight), workspaces) for weight in plain]
    prompts = [products.of(layer) for layer in layers]
    faults: list[dict[str, Any]] = []
    is_right = isinstance(prompts[0], DeviceByKind)
    label = {"model": shape.name, "product": name, "weight": f"{outputs}x{inputs}", "form": form}
    if isinstance(prompts[0], DeviceByKind):
        for count in bench.pick(TRIED_ROWS, (1, 17)):
            try:
                told = difference_of(prompts[0], bf16(count, inputs, device=device))
            except Exception as error:  # of a library that does not take this product
                told = f"{type(error).__name__}: {error!s:.300}"
            if told is not None:
                faults.append({**label, "rows": count, "what": told})
                is_right = False
                break
    rows, scratch = [], SplitScratch.empty(device)
    for count in bench.pick((*DECODE_ROWS, *PROMPT_ROWS), (1, 40)):
        x, y = bf16(count, inputs, device=device), bf16(count, outputs, device=device)
        dense = bench.seconds([partial(ops.linear, x, weight, y) for weight in plain])
        codes = bench.seconds([partial(_product, layer, x, y, scratch, bench.pdl) for layer in layers])
        row = {**label, "rows": count, "bfloat16, us": dense * 1e6, "codes, us": codes * 1e6, "times": dense / codes}
        if is_right and count > DECODE_ROWS[0]:
            both = bench.seconds([partial(one.of_prompts, x, y) for one in prompts if isinstance(one, DeviceByKind)])
            row |= {"W8A8, us": both * 1e6, "times, W8A8": dense / both}
        rows.append(row)
    return rows, faults


def _product(layer: DeviceQuantized, x: torch.Tensor, y: torch.Tensor, scratch: SplitScratch, pdl: bool) -> None:
    """As a step launches it."""
    if layer.fuses(len(x), False):
        layer.launch(x, y, scratch=scratch, pdl=pdl)
    else:
        layer(x, y)
