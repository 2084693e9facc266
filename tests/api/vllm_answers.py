"""Writes vllm_answers.json: what a vLLM answers to requests whose answer does not depend on chance, and which parameters it
takes.

    VLLM_TARGET_DEVICE=cpu .../vllm/bin/python tests/api/vllm_answers.py actorllm/bundled/storyteller

Run with the interpreter of that vLLM; the file that it makes is all that tests need. The model is small and in float32: the
tokens of two correct engines are the same, and log-probabilities agree to a few digits. Nothing is drawn: where the
temperature is not 0, a filter or `allowed_token_ids` leaves one token.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

STORY = "Once upon a time"
LENGTH = {"temperature": 0.0, "max_tokens": 12}

PARAMETERS: list[dict[str, Any]] = [
    *({"temperature": v} for v in (0, 0.0, 1, 2, 2.0, 2.01, -0.1, "1", None, True)),
    *({"top_p": v} for v in (1, 0.5, 0.0, 1.01, -1.0)),
    *({"top_k": v} for v in (-1, 0, 1, 100000, -2, 1.5, 2.0)),
    *({"min_p": v} for v in (0, 1, 0.5, -0.1, 1.1)),
    *({"presence_penalty": v} for v in (-2, 2, 2.1, -2.1)),
    *({"frequency_penalty": v} for v in (-2.0, 2.0, 2.5, -2.5)),
    *({"repetition_penalty": v} for v in (0.5, 1, 2.0, 10.0, 0.0, -1.0)),
    *({"seed": v} for v in (None, -1, 0, 42, 2**31, -5)),
    *({"n": v} for v in (1, 2, 16384, 0, -1, 16385)),
    {"n": 2, "temperature": 0.0},
    *({"max_tokens": v} for v in (None, 1, 0, -1)),
    *({"min_tokens": v} for v in (0, 16, 17, -1)),
    {"min_tokens": 20, "max_tokens": None},
    *({"stop": v} for v in (None, "a", ["a", "b"], [], "", ["a", ""], ["a", "a"])),
    {"stop": "a", "detokenize": False},
    *({"stop_token_ids": v} for v in (None, [], [1, 2], [1, 1, 2], ["1"])),
    *({"bad_words": v} for v in (None, [], ["a"], ["a", "a"], [""])),
    *({"logprobs": v} for v in (None, 0, 1, 20, -1, -2, True, False)),
    *({"prompt_logprobs": v} for v in (None, 0, 1, 20, -1, -2, True)),
    *({"stream_interval": v} for v in (None, 1, 5, 0, -1)),
    *({"logit_bias": v} for v in (None, {})),
    *({"repetition_detection": v} for v in ({"max_pattern_size": 3, "min_count": 2}, {"max_pattern_size": 3})),
    {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"no_such_parameter": 1},
    {"best_of": 2},
    {"logprob_token_ids": [1, 2]},
    {"logprob_token_ids": [1, 2], "logprobs": 2},
    {"skip_clone": True},
    {"extra_args": None},
    {"structured_outputs": None},
    {"thinking_token_budget": None},
]
"""Of SamplingParams: which of these are taken, and what is read back."""

READ_BACK = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
)
READ_BACK += ("bad_words", "logprobs", "prompt_logprobs", "stream_interval", "num_logprobs", "ignore_eos", "detokenize")


def requests(plain: list[int], text: str) -> list[dict[str, Any]]:
    """plain, text: tokens and text that STORY goes on with."""
    fifth, sixth = plain[4], plain[5]
    words = text.split()
    force_end = {"logit_bias": {"0": 100.0}}
    return [
        {},
        {"max_tokens": None},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-6},
        {"temperature": 1.5, "min_p": 1.0},
        {"temperature": 1.0, "allowed_token_ids": [fifth], "n": 3},
        # ends
        {"stop": words[3]},
        {"stop": words[3], "include_stop_str_in_output": True},
        {"stop": [words[5], words[3][1:]]},
        {"stop": [text[9:14], text[8:12]]},
        {"stop": words[0], "min_tokens": 3},
        {"stop": [text[:3]]},
        {"stop_token_ids": [fifth]},
        {"stop_token_ids": [fifth], "include_stop_str_in_output": True},
        {"stop_token_ids": [fifth], "min_tokens": 8},
        {"stop_token_ids": [fifth], "ignore_eos": True},
        {"stop_token_ids": [fifth], "stop": [text[9:14]]},
        {**force_end},
        {**force_end, "include_stop_str_in_output": True, "skip_special_tokens": False},
        {**force_end, "min_tokens": 4},
        {**force_end, "ignore_eos": True},
        {**force_end, "ignore_eos": True, "skip_special_tokens": False},
        {**force_end, "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        {**force_end, "stop_token_ids": [0]},
        {**force_end, "stop_token_ids": [0], "ignore_eos": True},
        {"min_tokens": 251, "max_tokens": None},
        {"min_tokens": 252, "max_tokens": None},
        {"min_tokens": 300, "max_tokens": 400},
        {"detokenize": False},
        {"detokenize": False, "logprobs": 1},
        {"allowed_token_ids": [fifth], "repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
        {
            "allowed_token_ids": [fifth],
            "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
        },
        # what changes the logits
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0, "max_tokens": 24},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "max_tokens": 24},
        {"logit_bias": {str(plain[0]): -100.0}},
        {"logit_bias": {str(fifth): 5.0, str(sixth): -3.5}},
        {"allowed_token_ids": sorted(plain[:6])},
        {"bad_words": [words[0]]},
        {"bad_words": [words[2], " ".join(words[3:5])]},
        {"bad_words": [" " + words[1]]},
        {
            "bad_words": [words[1]],
            "min_tokens": 3,
            "logit_bias": {str(fifth): 2.0},
            "repetition_penalty": 1.1,
            "logprobs": 2,
        },
        # log-probabilities
        {"logprobs": 0, "max_tokens": 4},
        {"logprobs": 1, "max_tokens": 4},
        {"logprobs": 5, "max_tokens": 4},
        {"logprobs": 3, "max_tokens": 4, "temperature": 1.0, "allowed_token_ids": [fifth]},
        {"logprobs": 2, "stop": words[3]},
        {"logprobs": 2, "stop_token_ids": [fifth]},
        {"logprobs": -1, "max_tokens": 2},
        {"logprobs": 21, "max_tokens": 2},
        {"prompt_logprobs": 0, "max_tokens": 1},
        {"prompt_logprobs": 3, "max_tokens": 2},
        {"prompt_logprobs": 21, "max_tokens": 1},
        {"logprob_token_ids": [fifth, 7, 300], "max_tokens": 2},
        {"logprob_token_ids": [fifth, 7], "logprobs": 2, "max_tokens": 2},
        {"logprob_token_ids": [7], "logprobs": 2, "max_tokens": 2},
        {"logprob_token_ids": [4096], "max_tokens": 2},
        {"flat_logprobs": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 3},
        # what is wrong with a request, and not with its parameters
        {"stop_token_ids": [4096]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"4096": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [4096]},
        {"bad_words": ["w" * 2000]},
    ]


def prompts(ids: list[int]) -> list[dict[str, Any]]:
    """ids: of STORY."""
    return [
        {"prompt": ids},
        {"prompt": {"prompt": STORY}},
        {"prompt": {"prompt": STORY, "cache_salt": "pepper"}},
        {"prompt": {"prompt_token_ids": ids}},
        {"prompt": {"prompt_token_ids": ids, "prompt": "something else"}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": 2}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": -1}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": 3, "truncation_side": "left"}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": 3, "truncation_side": "right"}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": 3, "truncation_side": "middle"}},
        {"prompt": STORY, "tokenization_kwargs": {"truncate_prompt_tokens": 257}},
        {"prompt": ids, "tokenization_kwargs": {"truncate_prompt_tokens": 2}},
        {
            "prompt": {"prompt_token_ids": ids},
            "tokenization_kwargs": {"truncate_prompt_tokens": 2, "truncation_side": "right"},
        },
        {"prompt": (ids * 100)[:300], "tokenization_kwargs": {"truncate_prompt_tokens": -1}},
        {"prompt": STORY, "tokenization_kwargs": {"add_special_tokens": False}},
        {"prompt": [ids, ids[:2]]},
        {"prompt": [STORY, {"prompt_token_ids": ids[:3]}]},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": {"prompt_token_ids": []}},
        {"prompt": {"prompt_token_ids": [4096]}},
        {"prompt": {"prompt_token_ids": [-1]}},
        {"prompt": {"prompt": 5}},
        {"prompt": {"text": STORY}},
        {"prompt": {"prompt": STORY, "cache_salt": ""}},
        {"prompt": 5},
        {"prompt": None},
        {"prompt": ids * 100},
        {"prompt": (ids * 100)[:255]},
        {"prompt": (ids * 100)[:256]},
        {"prompt": [1.5, 2.5]},
        {"prompt": STORY, "priority": 3},
        {"prompt": [STORY, "The sun"], "priority": [1, 0]},
        {"prompt": [STORY, "The sun"], "priority": [1]},
        {"prompt": [STORY, "The sun"], "sampling_params": [LENGTH]},
        {"prompt": [STORY, "The sun"], "sampling_params": [LENGTH, LENGTH | {"max_tokens": 3}]},
    ]


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": STORY}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": STORY}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": STORY}, {"type": "text", "text": "a dog"}]}]},
    {"messages": [[{"role": "user", "content": STORY}], [{"role": "user", "content": "The sun"}]]},
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": STORY}]},
    {"messages": [{"role": "user", "content": STORY}], "chat_template": "{{ messages[0]['content'] }}!"},
    {
        "messages": [{"role": "user", "content": STORY}],
        "chat_template": "{% if add_generation_prompt %}yes{% else %}no{% endif %}",
    },
    {
        "messages": [{"role": "user", "content": STORY}],
        "chat_template": "{% if add_generation_prompt %}yes{% else %}no{% endif %}",
        "add_generation_prompt": False,
    },
    {
        "messages": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "there was"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "user", "content": STORY}], "add_generation_prompt": True, "continue_final_message": True},
    {
        "messages": [{"role": "user", "content": STORY}],
        "chat_template": "{{ x }}{{ messages[0]['content'] }}",
        "chat_template_kwargs": {"x": "So "},
    },
    {
        "messages": [{"role": "user", "content": STORY}],
        "chat_template": "{{ tools[0]['function']['name'] }}",
        "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}],
    },
    {"messages": [{"role": "user", "content": STORY}], "chat_template": "{{ raise_exception('no') }}"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": STORY}]},
    {"messages": "hello"},
    {"messages": [{"role": "user", "content": STORY}], "tokenization_kwargs": {"truncate_prompt_tokens": 3}},
    {"messages": [{"role": "user", "content": STORY}], "priority": 1},
]

BEAMS: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 5},
    {"beam_width": 3, "max_tokens": 6},
    {"beam_width": 2, "max_tokens": 6, "length_penalty": 2.0},
    {"beam_width": 2, "max_tokens": 4, "ignore_eos": True},
    {"beam_width": 4, "max_tokens": 3, "temperature": 0.7},
]


def made(module: Any, arguments: dict[str, Any]) -> Any:
    """SamplingParams of either engine."""
    arguments = dict(arguments)
    if arguments.get("repetition_detection") is not None:
        arguments["repetition_detection"] = module.RepetitionDetectionParams(**arguments["repetition_detection"])
    if arguments.get("logit_bias"):
        arguments["logit_bias"] = {int(token): bias for token, bias in arguments["logit_bias"].items()}
    return module.SamplingParams(**arguments)


def kind_of(error: BaseException) -> str:
    """What a program catches."""
    for kind in (ValueError, TypeError):
        if isinstance(error, kind):
            return kind.__name__
    return type(error).__name__


def entries(position: Any) -> Any:
    """Of one position: id, log-probability, rank, text."""
    if position is None:
        return None
    found = [[token, round(p.logprob, 4), p.rank, p.decoded_token] for token, p in position.items()]
    if len(found) > 30:
        found = [*sorted(found, key=lambda entry: entry[2])[:5], [len(found)]]
    return found


def shown(output: Any) -> dict[str, Any]:
    """A RequestOutput of either engine."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": None if output.prompt_logprobs is None else [entries(p) for p in output.prompt_logprobs],
        "prompt_logprobs_type": type(output.prompt_logprobs).__name__,
        "finished": output.finished,
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "cumulative_logprob": None if one.cumulative_logprob is None else round(one.cumulative_logprob, 3),
                "logprobs": None if one.logprobs is None else [entries(p) for p in one.logprobs],
                "logprobs_type": type(one.logprobs).__name__,
            }
            for one in output.outputs
        ],
    }


def answer(ask: Any, case: dict[str, Any]) -> Any:
    """What comes of it, or what is raised."""
    try:
        return ask(copy.deepcopy(case))  # vLLM writes into prompts
    except Exception as error:
        return {"raises": kind_of(error), "says": str(error)[:200]}


def answers(module: Any, llm: Any, cases: dict[str, list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """Of either engine, to all cases."""

    def parameters(case: dict[str, Any]) -> Any:
        params = made(module, case)
        return {name: getattr(params, name) for name in READ_BACK}

    def request(case: dict[str, Any]) -> Any:
        return [shown(o) for o in llm.generate(STORY, made(module, LENGTH | case), use_tqdm=False)]

    def prompt(case: dict[str, Any]) -> Any:
        params: Any = case.pop("sampling_params", LENGTH)
        params = [made(module, p) for p in params] if isinstance(params, list) else made(module, params)
        return [shown(o) for o in llm.generate(case.pop("prompt"), params, use_tqdm=False, **case)]

    def chat(case: dict[str, Any]) -> Any:
        return [shown(o) for o in llm.chat(case.pop("messages"), made(module, LENGTH), use_tqdm=False, **case)]

    def beam(case: dict[str, Any]) -> Any:
        (found,) = llm.beam_search([{"prompt": STORY}], module.BeamSearchParams(**case))
        return [
            {"tokens": list(s.tokens), "text": s.text, "cum_logprob": round(s.cum_logprob, 3)} for s in found.sequences
        ]

    askers = {"parameters": parameters, "requests": request, "prompts": prompt, "chats": chat, "beams": beam}
    return {name: [answer(askers[name], case) for case in cases[name]] for name in cases}


def cases_of(module: Any, llm: Any) -> dict[str, list[dict[str, Any]]]:
    (plain,) = llm.generate(STORY, made(module, LENGTH | {"max_tokens": 24}), use_tqdm=False)
    first = plain.outputs[0]
    return {
        "parameters": PARAMETERS,
        "requests": requests(list(first.token_ids), first.text),
        "prompts": prompts(list(plain.prompt_token_ids)),
        "chats": CHATS,
        "beams": BEAMS,
    }


def main(folder: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm
    from vllm.sampling_params import BeamSearchParams, RepetitionDetectionParams

    class Module:
        SamplingParams = vllm.SamplingParams

    Module.BeamSearchParams = BeamSearchParams  # type: ignore[attr-defined]
    Module.RepetitionDetectionParams = RepetitionDetectionParams  # type: ignore[attr-defined]
    llm = vllm.LLM(
        folder, dtype="float32", max_model_len=256, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=True
    )
    cases = cases_of(Module, llm)
    found = answers(Module, llm, cases)
    tree = {"version": vllm.__version__, "cases": cases, "answers": found}
    lines = json.dumps(tree, indent=None)
    out = Path(os.environ.get("ANSWERS", Path(__file__).with_suffix(".json")))
    out.write_text(lines + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
