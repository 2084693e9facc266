"""The processor of a model's folder, without the part for videos.

transformers' classes for videos need torchvision, whose usual build does not go together with a torch for the CPU. Videos are not
taken, so the processor is made without that part. Images are prepared by torchvision where it is installed, and else by pillow.
Called by `media_reader`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from actorllm.errors import CorruptModelError
from actorllm.types.model_files import read_object
from actorllm.types.quiet_transformers import quiet

VIDEO = "video_processor"


def load_processor(path: str) -> Any:
    """Raises CorruptModelError. Nothing is downloaded, and no code of the folder is run."""
    transformers: Any = importlib.import_module("transformers")  # it is not typed
    auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    try:
        with quiet():
            kind = read_object(Path(path) / "config.json").get("model_type")
            complete = getattr(transformers, auto.PROCESSOR_MAPPING_NAMES[kind])
            return without_videos(complete).from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever another library raises for the files of a folder
        raise CorruptModelError(f"{path}: the processor cannot be loaded: {error!s:.300}") from error


def load_feature_extractor(path: str) -> Any:
    """What prepares recordings for a Whisper encoder. Raises CorruptModelError. Nothing is downloaded."""
    transformers: Any = importlib.import_module("transformers")  # it is not typed
    try:
        return transformers.WhisperFeatureExtractor.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever another library raises for the files of a folder
        raise CorruptModelError(f"{path}: the feature extractor cannot be loaded: {error!s:.300}") from error


def without_videos(complete: Any) -> Any:
    """A class of processors like this one, but for the part for videos."""
    attributes = complete.get_attributes()
    if VIDEO not in attributes:
        return complete
    left = [name for name in attributes if name != VIDEO]

    def parts(cls: Any, *args: Any, **options: Any) -> list[Any]:
        found: list[Any] = complete._get_arguments_from_pretrained.__func__(cls, *args, **options)
        found.insert(attributes.index(VIDEO), None)
        return found

    # Its name stays, since files tell the class of a processor by that.
    own = {"get_attributes": classmethod(lambda cls: left), "_get_arguments_from_pretrained": classmethod(parts)}
    return type(complete.__name__, (complete,), own)
