"""Run a kernel on several threads.

The threads are those of the OpenMP runtime that torch has loaded: a second runtime would fight with torch's threads
for the cores right after each torch operation. Where torch has no GNU-style OpenMP (macOS, Windows), and in a child
that was forked (libgomp hangs there if the parent had used it), Python threads do the work.

A kernel is `void worker(ptr parameters)`, the same call on each thread. It takes tasks from an atomic counter, so it
must be right on any number of threads, one included, and may not wait for another thread to arrive.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # a call through it releases the GIL

_workers: dict[int, Callable[[int], None]] = {}


class _State:
    """The runtime in use: `openmp` is GOMP_parallel(function, data, threads, flags), None until `searched`."""

    def __init__(self, searched: bool) -> None:
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None
        self.openmp: Callable[[int, int, int, int], None] | None = None
        self.searched = searched

    def reset_in_child(self) -> None:
        """libgomp's threads do not survive a fork, its records of them do; Python threads start anew."""
        self.__init__(searched=True)


_state = _State(searched=False)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.reset_in_child)


def run(address: int, params_pointer: int, threads: int) -> None:
    """Call the kernel at `address` with `params_pointer` on up to `threads` threads; return when all are done."""
    if threads > 1:
        if not _state.searched:
            _find()
        if _state.openmp is not None:
            _state.openmp(address, params_pointer, threads, 0)
        else:
            _run_on_python_threads(address, params_pointer, threads)
    else:
        (_workers.get(address) or _prototype(address))(params_pointer)


def kind() -> str:
    """Which threads `run` uses: "openmp" (torch's own) or "python"."""
    if not _state.searched:
        _find()
    return "python" if _state.openmp is None else "openmp"


def _prototype(address: int) -> Callable[[int], None]:
    """The kernel as a Python callable, made once: that costs more than a call."""
    worker = _workers[address] = _PROTOTYPE(address)
    return worker


def _run_on_python_threads(address: int, params_pointer: int, threads: int) -> None:
    worker = _workers.get(address) or _prototype(address)
    with _state.lock:
        if _state.executor is None:
            count = max(os.cpu_count() or 1, threads)
            _state.executor = ThreadPoolExecutor(count, thread_name_prefix="kilat")
        executor = _state.executor
    try:
        others = [executor.submit(worker, params_pointer) for _ in range(threads - 1)]
    except RuntimeError:  # the interpreter is shutting down and takes no more work: this thread does it all
        others = []
    worker(params_pointer)
    for other in others:
        if not other.cancel():  # one that has not begun would find no task left
            other.result()


def _find() -> None:
    """Look for the OpenMP entry that torch itself would call; without torch in the process, look again next time."""
    with _state.lock:
        if _state.searched:
            return
        for path in _libraries():
            try:
                function = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue  # not loadable by path, or without that symbol: try the next
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            _state.openmp = function
            break
        _state.searched = "torch" in sys.modules


def _libraries() -> list[str]:
    """Loaded libraries to ask: torch's core, whose look-up includes what it depends on, then any libgomp."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    paths = dict.fromkeys(p for p in mapped if p.startswith("/") and not p.endswith(" (deleted)"))
    names = ("libtorch_cpu.so", "libgomp")
    return [p for name in names for p in paths if os.path.basename(p).startswith(name)]
