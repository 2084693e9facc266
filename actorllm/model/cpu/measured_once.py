"""`measured_once`: what the first process on a machine measured, for every process that must come to the same answer.

The replicas of an engine must compute alike, or a stream that moves would change. They start side by side. Each would measure what
is fastest, with noise. So the first one writes its answer into a file of the user's cache folder (`path`), and the others read it.
The key says everything that the answer depends on. Remove the file to measure anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from actorllm.model.answer_file import AnswerFile

logger = logging.getLogger(__name__)

ANSWERS = AnswerFile("measured.json", lambda answer: isinstance(answer, str))
path = ANSWERS.path


def measured_once(key: str, measure: Callable[[], str]) -> str | None:
    """What the first process has found under this key.

    measure: called where none has. Returns None if the processes of this machine cannot tell each other: the log says why.
    """
    try:
        return str(ANSWERS.add_once(key, measure))
    except OSError as error:
        found: str | None = ANSWERS.read().get(key)
        if found is None:
            logger.warning("nothing is measured for replicas, which could differ: %s", error)
        return found
