"""Host programs that compare the state of their process before and after they use an engine."""

from __future__ import annotations

SNAPSHOT = """
import asyncio, ctypes, faulthandler, gc, locale, logging, multiprocessing, os, random, resource, signal, sys, threading, warnings

def snapshot():
    loggers = [logging.getLogger(), logging.getLogger("asyncio"), logging.getLogger("application")]
    found = {
        "handlers of signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "what the kernel calls": {number: kernel_action(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wake-up descriptor": wakeup_fd(),
        "loggers": [(one.level, one.disabled, one.propagate, list(one.handlers), list(one.filters)) for one in loggers],
        "logger class": logging.getLoggerClass(),
        "record factory": logging.getLogRecordFactory(),
        "disabled level": logging.root.manager.disable,
        "environment": dict(os.environ),
        "filters of warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "excepthook": sys.excepthook,
        "excepthook of threads": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "displayhook": sys.displayhook,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace()),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "import path": list(sys.path),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "folder": os.getcwd(),
        "umask": umask(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "locale": locale.setlocale(locale.LC_ALL),
        "random state": random.getstate(),
        "loop policy": type(asyncio.get_event_loop_policy()),
        "process group": (os.getpgid(0), os.getsid(0)),
    }
    if "numpy" in sys.modules:
        import numpy
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tobytes(), rest, numpy.geterr(), numpy.get_printoptions())
    if "torch" in sys.modules:
        import torch
        found["torch"] = (
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
            torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.random.get_rng_state().numpy().tobytes(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
        )
        found["initialisers of torch"] = {name: value for name, value in vars(torch.nn.init).items() if callable(value)}
        found["torch in a new thread"] = in_a_new_thread(torch.get_num_threads)
    if "transformers" in sys.modules:
        from transformers.utils import logging as of_transformers
        found["transformers"] = (of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled())
    return found

def kernel_action(number):
    "Function, mask and flags (the rest is not used), which signal.signal sets besides what getsignal returns."
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(int(number), None, action)
    return action.raw[:16].hex(), action.raw[136:140].hex()

def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results

def wakeup_fd():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    return before

def umask():
    before = os.umask(0)
    os.umask(before)
    return before

def compare(before, when):
    after = snapshot()
    for name in before:
        if before[name] != after[name]:
            print("CHANGED", when, name, before[name], "->", after[name], flush=True)
"""

ASYNC = """
from actorllm import AsyncLLM, SamplingParams
before = snapshot()
params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=None)
async def main():
    inside = snapshot()  # a loop has a wake-up descriptor, and one for SIGINT
    llm = AsyncLLM("storyteller", topology=TOPOLOGY, num_threads=1)
    await llm.start()
    compare(inside, "start")
    async for output in llm.generate("Once upon a time", params):
        compare(inside, "stream")
    compare(inside, "run")
    llm.shutdown()
    compare(inside, "end")
asyncio.run(main())
compare(before, "end of the loop")
"""
