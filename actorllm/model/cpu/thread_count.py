"""How many threads torch computes with in the calling thread, and in no other.

`torch.set_num_threads` does more: its number is also what every thread begins with that is started later. The process may be an
application's, so the OpenMP runtime and MKL are told directly. They keep a count for each thread, and torch asks them.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch


def exchange_own_threads(count: int) -> tuple[int, int]:
    """Compute with so many threads from now on, in this thread. Returns what `restore_own_threads` needs: both runs each step."""
    before = torch.get_num_threads()  # the first call of a thread gives it the count of the process
    before_of_mkl = _set_of_mkl(count)
    if before != count:
        _set_of_openmp(count)
        _set_of_mkl(count)
    return before, before_of_mkl


def restore_own_threads(before: tuple[int, int]) -> None:
    """As many as before the exchange."""
    count, of_mkl = before
    if torch.get_num_threads() != count:
        _set_of_openmp(count)
    _set_of_mkl(of_mkl)


def set_own_num_threads(count: int) -> None:
    """From now on, in this thread."""
    if torch.get_num_threads() != count:
        _set_of_openmp(count)
        _set_of_mkl(count)


def _find() -> tuple[Any, Any]:
    """The functions of the runtimes that torch uses, found as the linker finds them. In place of one that is missing there is
    what does as well as can be."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"))
        of_openmp, of_mkl = library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", int)
        before = torch.get_num_threads()
        of_openmp(before + 1)
        is_told = torch.get_num_threads() == before + 1
        of_openmp(before)
    except (OSError, AttributeError):
        is_told = False
    return (of_openmp, of_mkl) if is_told else (torch.set_num_threads, int)


_set_of_openmp, _set_of_mkl = _find()
"""With the number of threads, as an int. That of MKL returns what it was; 0: as many as OpenMP has."""
