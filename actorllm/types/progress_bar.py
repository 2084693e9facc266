"""`ProgressBar`: tqdm's bar, without what its first bar does to the whole process.

tqdm's own lock takes a lock of multiprocessing, which fixes the start method: an application that calls `set_start_method`
afterwards fails. Its monitor is a thread that stays. A bar of one thread needs neither.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
    _lock = threading.RLock()
    monitor_interval = 0

    def __init__(self, *arguments: Any, disable: bool | None = False, **more: Any) -> None:
        super().__init__(*arguments, disable=disable or sys.stderr is None, **more)  # a program without a console
