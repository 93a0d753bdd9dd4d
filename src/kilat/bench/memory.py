"""Peak memory of one call above what was there before it, as the operating system counts resident pages."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Job = TypeVar("Job")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# mallopt's names for these are M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (glibc, malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Peak:
    """Bytes resident before a call, the largest number during it, and how the latter was found."""

    before: int
    during: int
    method: str

    @property
    def extra(self) -> int:
        """Bytes that the call needed on top of what was resident before it, its results included."""
        return max(0, self.during - self.before)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} must have a line {field}; it has none")


def _max_rss_bytes() -> int:
    import resource  # not on Windows, where nothing here is measured

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_high_water_mark() -> bool:
    """Ask Linux to forget the peak so far; False where the kernel has no such file or refuses."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def return_freed_memory() -> None:
    """Make glibc give every freed block above 64 kB back to the system, in this process, from now on.

    Memory that the allocator keeps counts as resident before the next call and would hide that call's need.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 16)
        mallopt(_TRIM_THRESHOLD, 1 << 16)


def measure_peak(call: Callable[[], T]) -> tuple[T, Peak]:
    """Run a call once and return its result with its peak resident memory.

    On Linux the kernel's high-water mark (VmHWM) is reset first, so each call is seen alone. Elsewhere the peak of
    the whole process (ru_maxrss) stands in for it: right for a first, large call in a fresh process, an underestimate
    after a larger one.
    """
    if _STATUS.exists() and _reset_high_water_mark():
        before = _status_bytes("VmRSS")
        result = call()
        return result, Peak(before, _status_bytes("VmHWM"), "VmHWM, reset before the call")
    before = _max_rss_bytes()
    result = call()
    return result, Peak(before, _max_rss_bytes(), "growth of ru_maxrss of the process")


def available_bytes() -> int | None:
    """Return the memory that can be had without swapping, or None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limit = int(line.split()[1]) * 1024
            break
    else:
        return None
    # A container may be allowed less than the machine has.
    allowed, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if allowed.exists() and used.exists() and allowed.read_text().strip().isdigit():
        limit = min(limit, int(allowed.read_text()) - int(used.read_text()))
    return max(0, limit)


def in_fresh_process(call: Callable[[Job], T], job: Job, what: str) -> T:
    """Run `call(job)` in a new interpreter and return what it returns; both travel by pickling.

    A fresh process gives everyone a cold allocator and the whole machine. Raises RuntimeError naming `what` if the
    process dies, as it does when memory runs out; what the call itself raises is raised here.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(call, job).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"the process for {what} ended early, most likely out of memory; try a smaller length"
            ) from error
