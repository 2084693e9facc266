"""`TRLRollouts`: an engine as the `rollout_func` of TRL's trainers (GRPOTrainer). Imports nothing of TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from actorllm.api.llm import LLM
from actorllm.errors import ConfigError, shown
from actorllm.types.params import SamplingParams


class TRLRollouts:
    """Samples completions with an engine, and gives it the weights of the trainer's model before each new step.

    Arguments:
        llm: of the model that is trained; the caller shuts it down.
        params: sampling parameters that count before those of the trainer's arguments, by name.

    Example:
        trainer = GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=data, rollout_func=TRLRollouts(llm))
    """

    def __init__(self, llm: LLM, **params: Any) -> None:
        self._llm = llm
        self._params = params
        self._step: int | None = None
        """Of the trainer, whose weights the engine has."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """The completions of one step.

        Arguments:
            prompts: texts or conversations; one that stands there several times, one after the other, gets so many completions.
            trainer: of TRL.

        Returns `prompt_ids`, `completion_ids` and `logprobs`, each by completion. The log-probabilities are those that the model gives
        the tokens, before temperature.

        Raises:
            ConfigError: the trainer has arguments that this engine does not sample with.
            What `LLM.generate` and `LLM.update_weights_from_tensors` raise.
        """
        self._synchronize(trainer)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        params = [self._sampling_params(trainer, number, count) for number, (_, count) in enumerate(groups)]
        told: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for output in self._outputs([prompt for prompt, _ in groups], params):
            for one in output.outputs:
                told["prompt_ids"].append(list(output.prompt_token_ids))
                told["completion_ids"].append(list(one.token_ids))
                told["logprobs"].append(
                    [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
                )
        return told

    def _outputs(self, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
        if prompts and not isinstance(prompts[0], str):
            return list(self._llm.chat(prompts, params, use_tqdm=False))
        return list(self._llm.generate(prompts, params, use_tqdm=False))

    def _synchronize(self, trainer: Any) -> None:
        """Tokens are drawn with the weights of the trainer's step, which the version is named after."""
        step = int(trainer.state.global_step)
        if step != self._step:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._llm.update_weights_from_tensors(model.state_dict(), version=str(step))
            self._step = step

    def _sampling_params(self, trainer: Any, number: int, count: int) -> SamplingParams:
        """As the trainer's arguments have them."""
        arguments = trainer.args
        more = getattr(arguments, "generation_kwargs", None) or {}
        if not isinstance(more, Mapping):
            raise ConfigError(f"generation_kwargs={shown(more)} must be a mapping")
        found: dict[str, Any] = {"max_tokens": arguments.max_completion_length, "temperature": arguments.temperature}
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            value = getattr(arguments, name, None)
            if value is not None:
                found[name] = value
        seed = int(arguments.seed) * 1_000_003 + int(trainer.state.global_step) * 4099 + number
        return SamplingParams(**{**found, "n": count, "logprobs": 0, "seed": seed % 2**63, **more, **self._params})
