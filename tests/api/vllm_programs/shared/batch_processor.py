"""A logits processor of the whole batch, which follows its rows."""

import sys

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class OneToken(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target {target!r} is no integer")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)
            target = (params.extra_args or {}).get("target")
            if target is not None:
                self.targets[index] = target
        for source, destination, direction in batch_update.moved:
            moved, replaced = self.targets.pop(source, None), self.targets.pop(destination, None)
            if moved is not None:
                self.targets[destination] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self.targets[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, logits_processors=[OneToken])
    params = [
        SamplingParams(temperature=0, max_tokens=2 + number, extra_args={"target": target} if target else None)
        for number, target in enumerate((300, None, 400, None))
    ]
    for output in llm.generate(["The dog"] * 4, params, use_tqdm=False):
        print(list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1])
