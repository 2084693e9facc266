"""`Rollouts`: an engine as what TRL's `GRPOTrainer` samples with, by its argument `rollout_func`.

    llm = LLM("storyteller", dtype="float32", topology="inline", logprobs_mode="processed_logprobs")
    GRPOTrainer(model, reward, args=config, train_dataset=prompts, rollout_func=Rollouts(llm)).train()

The trainer keeps its loop. Where vLLM would be told each parameter by itself, all of them come as one update of the engine
(`update_weights_from_tensors`). Equal prompts in a row are siblings of one request, so a prompt is computed once for its group.
Log-probabilities are those of the version that sampled, which is what the trainer's importance sampling wants.

Nothing here imports TRL: what is used of the trainer is its documented state (`RolloutFunc` in `trl.trainer.grpo_trainer`, 1.16).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from actorllm.api.llm import LLM
from actorllm.errors import InvalidParameterError
from actorllm.types.params import SamplingParams

PROCESSED = "processed_logprobs"


class Rollouts:
    """See the module docstring. It is called by the trainer, once for each batch that is to be sampled."""

    def __init__(self, llm: LLM, **sampling: Any) -> None:
        """
        Arguments:
            llm: an engine of the model that is trained. Each process of a distributed trainer has its own.
            sampling: fields of `SamplingParams` beside those that the trainer's arguments have, such as `stop`.

        Raises:
            InvalidParameterError: the engine tells log-probabilities before the temperature, and the trainer compares them with
                those after it.
        """
        if llm.model_config.logprobs_mode != PROCESSED:
            raise InvalidParameterError(
                f"logprobs_mode={llm.model_config.logprobs_mode!r}: the trainer compares log-probabilities after temperature; "
                f"build the engine with logprobs_mode={PROCESSED!r}"
            )
        self._llm = llm
        self._sampling = sampling
        self._trainer: weakref.ref[Any] | None = None
        self._step: int | None = None
        """Of that trainer, whose weights the engine has."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Sample one completion of each prompt.

        Arguments:
            prompts: texts or conversations; each stands in a row as often as it is to be completed.
            trainer: a `GRPOTrainer`.

        Returns:
            prompt_ids, completion_ids: lists of ids, one for each prompt. logprobs: of each id of a completion.

        Raises:
            InvalidParameterError: the weights of the trainer are sharded, or adapters that are not merged.
            As `LLM.generate` and `LLM.update_weights_from_tensors`.
        """
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        if not prompts:
            return found
        is_known = self._trainer is not None and self._trainer() is trainer
        if not is_known or self._step != trainer.state.global_step:
            self._llm.update_weights_from_tensors(weights_of(trainer), version=f"step-{trainer.state.global_step}")
            self._trainer, self._step = weakref.ref(trainer), trainer.state.global_step
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        params = [self._params(trainer.args, number) for _, number in groups]
        asked = [prompt for prompt, _ in groups]
        is_conversation = not isinstance(asked[0], str)
        answer = self._llm.chat if is_conversation else self._llm.generate
        outputs = answer(asked, params, use_tqdm=False)
        for output in outputs:
            for one in output.outputs:
                ids = list(one.token_ids)
                found["prompt_ids"].append(list(output.prompt_token_ids))
                found["completion_ids"].append(ids)
                told = zip(one.logprobs or (), ids, strict=True)
                found["logprobs"].append([by_id[token].logprob for by_id, token in told if by_id is not None])
        return found

    def _params(self, args: Any, n: int) -> SamplingParams:
        """As the trainer would have told vLLM. args: its `GRPOConfig`."""
        fields: dict[str, Any] = {
            "n": n,
            "max_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or 0,
            "min_p": args.min_p or 0.0,
            "repetition_penalty": args.repetition_penalty,
            "logprobs": 0,
        }
        return SamplingParams(**fields | (args.generation_kwargs or {}) | self._sampling)


def weights_of(trainer: Any) -> dict[str, Any]:
    """The tensors of the model that a trainer has, by their names in the checkpoint. Raises InvalidParameterError."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_adapter"):
        raise InvalidParameterError(
            "the trainer trains adapters of peft, whose weights are beside the model's; train the whole model"
        )
    tensors = dict(model.state_dict())
    for name, tensor in tensors.items():
        if not tensor.numel() or hasattr(tensor, "full_tensor"):
            raise InvalidParameterError(
                f"{name} is in parts over the processes of the trainer; train without sharding of parameters"
            )
    return tensors
