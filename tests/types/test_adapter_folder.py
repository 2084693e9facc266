"""Folders of adapters: what is read of them, what is refused by its name, and when two are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import InvalidParameterError
from actorllm.types.adapter_folder import MAX_CONFIG_BYTES, MAX_DIGESTS, AdapterDigests, AdapterSettings, digest_of
from actorllm.types.lora_request import LoRARequest
from tests.model.adapters.lora_folders import write_adapter

LAYER = "model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def settings(**fields: Any) -> AdapterSettings:
    return AdapterSettings.from_json(json.dumps(PLAIN | fields).encode(), "folder")


def test_the_scale_is_that_of_peft() -> None:
    assert settings().scale_of(LAYER) == 2.0
    assert settings(use_rslora=True).scale_of(LAYER) == pytest.approx(16 / 8**0.5)
    patterns = settings(rank_pattern={"q_proj": 4, "layers.1.mlp.up_proj": 2}, alpha_pattern={f"^{LAYER}": 32})
    assert (patterns.rank_of(LAYER), patterns.scale_of(LAYER)) == (4, 8.0)
    assert patterns.rank_of("model.layers.1.mlp.up_proj") == 2
    assert patterns.rank_of("model.layers.11.mlp.up_proj") == 8, "a pattern ends at a dot"
    assert patterns.max_rank == 8


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": "x"}, "lora_alpha='x'"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+$": 2}}, "no name of a layer"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
    ],
)
def test_what_is_more_than_low_rank_products_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameterError) as found:
        settings(**fields)
    assert told in str(found.value)


def test_equal_content_is_one_adapter_wherever_it_lies(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {LAYER: (8, 8)}, seed=1)
    write_adapter(tmp_path / "b", {LAYER: (8, 8)}, seed=2)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    digests = AdapterDigests(max_rank=16)
    a, b, copy = (digests.adapter_of(str(tmp_path / name)) for name in ("a", "b", "copy"))
    assert a.digest == copy.digest != b.digest
    write_adapter(tmp_path / "a", {LAYER: (8, 8)}, seed=2)
    assert digests.adapter_of(str(tmp_path / "a")).digest == b.digest, (
        "a folder that is written anew is another adapter"
    )
    write_adapter(tmp_path / "a", {LAYER: (8, 8)}, seed=2, lora_alpha=3)
    assert digests.adapter_of(str(tmp_path / "a")).digest != b.digest, "so is one with another scale"


def test_a_digest_is_computed_once_for_as_long_as_the_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files may have gigabytes, and each request names one."""
    computed: list[str] = []

    def noted(*content: Any) -> str:
        computed.append(digest_of(*content))
        return computed[-1]

    monkeypatch.setattr("actorllm.types.adapter_folder.digest_of", noted)
    write_adapter(tmp_path, {LAYER: (8, 8)}, seed=1)
    digests = AdapterDigests(max_rank=16)
    assert not digests.has_read(str(tmp_path))
    assert len({digests.adapter_of(str(tmp_path)).digest for _ in range(3)}) == len(computed) == 1
    assert digests.has_read(str(tmp_path))
    (tmp_path / "README.md").write_text("of no account")
    digests.adapter_of(str(tmp_path))
    assert len(computed) == 1
    write_adapter(tmp_path, {LAYER: (8, 8)}, seed=2)
    assert digests.adapter_of(str(tmp_path)).digest == computed[1] != computed[0]


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    digests = AdapterDigests(max_rank=4)
    with pytest.raises(InvalidParameterError, match="is no folder"):
        digests.adapter_of(str(tmp_path / "none"))
    with pytest.raises(InvalidParameterError, match=r"has no adapter_config\.json"):
        digests.adapter_of(str(tmp_path))
    folder = tmp_path / "a"
    write_adapter(folder, {LAYER: (8, 8)}, r=8)
    with pytest.raises(InvalidParameterError, match="max_lora_rank=8 or more"):
        digests.adapter_of(str(folder))
    (folder / "adapter_config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(InvalidParameterError, match="at most"):
        digests.adapter_of(str(folder))
    (folder / "adapter_config.json").write_bytes(b"{")
    with pytest.raises(InvalidParameterError, match="no JSON"):
        digests.adapter_of(str(folder))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidParameterError, match="safe_serialization=True"):
        digests.adapter_of(str(folder))


def test_the_folder_of_a_user_that_there_is_not() -> None:
    with pytest.raises(InvalidParameterError, match=r"lora_path='~no-such-user/x': .* write the whole path"):
        AdapterDigests(8).adapter_of("~no-such-user/x")


def test_digests_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.types.adapter_folder.MAX_DIGESTS", 2)
    assert MAX_DIGESTS > 2
    digests = AdapterDigests(max_rank=16)
    for i in range(4):
        write_adapter(tmp_path / str(i), {LAYER: (8, 8)}, seed=i)
        digests.adapter_of(str(tmp_path / str(i)))
    assert len(digests._known) == len(digests._paths) == 2


@pytest.mark.parametrize(
    "fields",
    [
        ("", 1, "p"),
        ("a", 0, "p"),
        ("a", True, "p"),
        ("a", 1, ""),
        ("a", 1, None),
        ("a" * 10_000, 1, "p"),
        ("a", 1, "p\0"),
    ],
)
def test_a_request_says_which_field_is_wrong(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="lora_"):
        LoRARequest(*fields)
