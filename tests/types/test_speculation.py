"""`speculative_config`: vLLM's names; what is not known, or not there, is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from actorllm.errors import ConfigError
from actorllm.types.drafter import Speculation
from actorllm.types.speculation import (
    NOT_THERE,
    make_drafter,
    paying_ranges,
    read_speculation,
    seconds_of,
    with_costs,
)


def test_a_mapping_and_its_json_say_the_same() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}
    read = read_speculation(given)
    assert (
        read
        == read_speculation(json.dumps(given))
        == Speculation(
            "ngram",
            4,
            2,
            6,
            num_speculative_tokens_per_batch_size=((1, 2, 4), (3, 4, 3), (5, 8, 1)),
            goes_by_costs=True,
        )
    )
    assert read is not None
    assert Speculation.from_tree(json.loads(json.dumps(asdict(read)))) == read
    assert read_speculation(None) is None
    assert Speculation.from_tree(None) is None


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 3}, (3, 3))],
)
def test_missing_sizes_of_n_grams_are_those_of_vllm(lookup: dict[str, int], expected: tuple[int, int]) -> None:
    read = read_speculation({"method": "ngram", "num_speculative_tokens": 4, **lookup})
    assert read is not None
    assert (read.prompt_lookup_min, read.prompt_lookup_max) == expected


def test_options_of_vllm_that_change_nothing_are_taken() -> None:
    given = {"model": "[ngram]", "num_speculative_tokens": 2, "rejection_sample_method": "standard"}
    read = read_speculation(given)
    assert read is not None
    assert read.method == "ngram"


def test_options_of_vllm_are_taken_at_their_defaults() -> None:
    """A configuration that is printed and given back has all of them."""
    defaults = {
        "kv_cache_dtype": None,
        "quantization": None,
        "max_model_len": None,
        "revision": None,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "synthetic_acceptance_rates": None,
        "draft_load_config": None,
    }
    given = {"method": "ngram", "num_speculative_tokens": 2}
    assert read_speculation(given | defaults) == read_speculation(given)
    for name, value in (("max_model_len", 2048), ("quantization", "fp8"), ("parallel_drafting", True)):
        with pytest.raises(ConfigError, match=f"speculative_config: {name}=.* is not supported; leave it out"):
            read_speculation(given | {name: value})
    with pytest.raises(
        ConfigError, match="disable_by_batch_size=8 is not supported; use num_speculative_tokens_per_batch"
    ):
        read_speculation(given | {"disable_by_batch_size": 8})


@pytest.mark.parametrize("name", ["mimo_mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_names_of_families_are_names_of_mtp(name: str) -> None:
    read = read_speculation({"method": name})
    assert read is not None
    assert (read.method, read.num_speculative_tokens) == ("mtp", 1)


def test_a_model_without_a_method_is_a_draft_model() -> None:
    read = read_speculation({"model": "some/folder", "num_speculative_tokens": 2, "draft_sample_method": "greedy"})
    assert read is not None
    assert (read.method, read.model, read.draft_sample_method) == ("draft_model", "some/folder", "greedy")
    assert Speculation.from_tree(json.loads(json.dumps(asdict(read)))) == read


def test_ranges_say_how_many_drafts_a_batch_has() -> None:
    ranges = [[1, 4, 3], [5, 9, 0]]
    given = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": ranges}
    read = read_speculation(given)
    assert read is not None
    assert read.num_speculative_tokens_per_batch_size == ((1, 4, 3), (5, 9, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "speculative_config=5 must be a mapping"),
        ("{", "speculative_config is not valid JSON"),
        ("[1]", r"speculative_config=\[1\] must be a mapping"),
        ({}, "method=None must be 'ngram', 'suffix', 'draft_model', 'eagle', 'eagle3', 'mtp', or a class"),
        ({"method": "ngram"}, "num_speculative_tokens is missing; give"),
        ({"method": "ngrams"}, "method='ngrams' is not known; did you mean 'ngram'"),
        ({"method": "eagle4"}, "there are 'draft_model', 'eagle', 'eagle3', 'mtp', 'ngram', 'suffix', or a class"),
        ({"method": "collections:OrderedDict"}, "must be a subclass of Drafter"),
        ({"method": "no_such_module:Drafter"}, "cannot be loaded: ModuleNotFoundError"),
        ({"num_speculative_token": 1}, "there is no 'num_speculative_token'; did you mean 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be an integer from 1 to 31"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be an integer"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 is more than prompt_lookup_max=3"),
        ({"prompt_lookup_max": 65}, "prompt_lookup_max=65 must be an integer from 1 to 64"),
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method='synthetic' is not supported; leave it out",
        ),
        (
            {"model": "some/model"},
            "model='some/model' is not supported with method='ngram'; leave it out, or use 'draft",
        ),
        ({"method": "draft_model"}, r"model=None must be the name or the folder of the draft model"),
        ({"method": "draft_model", "model": 3, "num_speculative_tokens": 2}, "model=3 must be the name or the folder"),
        ({"draft_sample_method": "gumbel"}, "draft_sample_method='gumbel' must be 'probabilistic' or 'greedy'"),
        ({"num_speculative_tokens_per_batch_size": 3}, "must be a list of"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2]]}, r"\[1, 2\] must be \[fewest rows"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2, 9]]}, "=9 must be an integer from 0 to 4"),
        ({"num_speculative_tokens_per_batch_size": [[1, 3, 1], [3, 4, 1]]}, "list the ranges in rising order"),
    ],
)
def test_bad_values_are_named_with_the_fix(given: Any, message: str) -> None:
    if isinstance(given, dict) and given and list(given) != ["method"]:
        given = {"method": "ngram", "num_speculative_tokens": 4} | given
    with pytest.raises(ConfigError, match=message):
        read_speculation(given)


def test_suffix_decoding_has_the_options_of_vllm() -> None:
    read = read_speculation({"method": "suffix"})
    assert read is not None
    assert read.num_speculative_tokens == 8
    told = (
        read.suffix_decoding_max_tree_depth,
        read.suffix_decoding_max_spec_factor,
        read.suffix_decoding_min_token_prob,
    )
    assert told == (24, 1.0, 0.1)
    assert read.suffix_decoding_max_cached_requests == 10_000
    assert read.drafts_from_others
    alone = read_speculation({"method": "suffix", "suffix_decoding_max_cached_requests": 0})
    assert alone is not None
    assert not alone.drafts_from_others
    with pytest.raises(ConfigError, match="suffix_decoding_min_token_prob=2 must be a number from 0 to 1"):
        read_speculation({"method": "suffix", "suffix_decoding_min_token_prob": 2})


@pytest.mark.parametrize("method", NOT_THERE)
def test_methods_that_are_not_there_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=f"method='{method}' is not supported; use 'ngram', or a drafter of yours"):
        read_speculation({"method": method, "num_speculative_tokens": 4})


def test_a_drafter_that_cannot_be_built_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'actorllm\.types.drafter:Drafter' cannot be built: TypeError"):
        make_drafter(Speculation("actorllm.types.drafter:Drafter", 4), 10)


def rising(tokens_for_free: int) -> tuple[tuple[int, float], ...]:
    """Steps that take as long as one of so many tokens, or as long as they have tokens beyond that."""
    return tuple((size, 1e-3 * max(1.0, size / tokens_for_free)) for size in (1, 2, 4, 8, 16, 32, 64))


def test_as_many_drafts_are_tried_as_pay() -> None:
    assert paying_ranges(7, rising(64), ())[-1] == (17, 32, 1), "beyond 64 tokens each draft costs what a row does"
    assert paying_ranges(7, rising(64), ())[0] == (1, 1, 7), "seven drafts cost what none do"
    assert paying_ranges(7, rising(8), ()) == ((1, 1, 7), (2, 2, 3), (3, 4, 1))
    assert paying_ranges(7, rising(1), ()) == (), "every draft costs what a row does"
    assert paying_ranges(7, rising(64), ((1, 1e-3), (2, 1e-3))) == (), "a pass of the draft model is as long as a step"
    assert paying_ranges(7, rising(64), ((1, 1e-4), (2, 1e-4)))[0] == (1, 1, 4)
    noisy = ((1, 2e-3), (2, 1e-3), (4, 5e-3))
    assert [seconds_of(noisy, size) for size in (1, 2, 4)] == [2e-3, 2e-3, 5e-3], "more tokens never take less time"
    assert seconds_of(noisy, 8) == pytest.approx(10e-3)
    assert seconds_of(((2, 1e-3),), 4) == 2e-3


def test_ranges_of_the_application_stay_whatever_is_measured() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    read = read_speculation(given)
    assert read is not None
    made = with_costs(read, rising(64), ())
    assert made.num_speculative_tokens_per_batch_size[0] == (1, 1, 3)
    assert made.step_costs == rising(64)
    assert Speculation.from_tree(json.loads(json.dumps(asdict(made)))) == made
    assert with_costs(read, (), ()) == read
    given |= {"num_speculative_tokens_per_batch_size": [[1, 9, 2]]}
    read = read_speculation(given)
    assert read is not None
    assert with_costs(read, rising(64), ()) == read
