"""Triton's files on disk, damaged in every way, for `test_kernel_files.py`; a process on the driver of `fake_gpu.py`.

python fake_cache.py FOLDER damage: damages the files of a kernel one by one and prints what became of it, as JSON.
python fake_cache.py FOLDER once | slow | die: launches the kernel once; slowly, or dies while it is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gpu
import torch
import triton
import triton.language as tl
from triton.runtime.cache import FileCacheManager

from kilat.backends import kernel_files
from kilat.backends.gluon.launching import Of, Step
from kilat.backends.triton import launch


@triton.jit
def twice_kernel(x_ptr, n, SIZE: tl.constexpr):
    """x = 2 x"""
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, at < n), at < n)


compilations: list[bool] = []
"""Of each time that Triton was asked: whether it compiled."""


def listen(*, cache_hit: bool, **rest: Any) -> None:
    """A listener of Triton's."""
    compilations.append(not cache_hit)


def through_gluon(x: torch.Tensor) -> Any:
    """Make and launch a step; the compiled kernel."""
    step = Step(twice_kernel, 1, [Of(0), 5], [64], tensors=[x])
    assert step.start is not None
    step.start(7, (x.data_ptr(),))
    return step._compiled


def through_triton(x: torch.Tensor) -> Any:
    """Launch by the Triton backend's own function; the compiled kernel."""
    launch.start(twice_kernel, 1, (x, 5, 64), {"num_warps": 4})
    return next(iter(twice_kernel.device_caches[0][0].values()))


def digest_of(compiled: Any) -> str:
    """What is launched, and how."""
    text = f"{compiled.metadata.shared} {compiled.metadata.num_warps} {compiled.name}"
    return hashlib.sha256(compiled.kernel + text.encode()).hexdigest()


def attempt(door: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """What a process that knows no kernel yet meets."""
    twice_kernel.device_caches.clear()
    launch._checked.clear()
    compilations.clear()
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found["digest"] = digest_of(door(torch.zeros(64)))
        except kernel_files.DamagedError as error:
            found["error"] = str(error)
    return found | {"compiled": sum(compilations), "warned": [str(x.message) for x in warned]}


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "cubin-truncated": (".cubin", _truncated),
    "cubin-empty": (".cubin", lambda data: b""),
    "cubin-flipped": (".cubin", _flipped),
    "cubin-gone": (".cubin", lambda data: None),
    "json-truncated": ("l.json", _truncated),
    "json-empty": ("l.json", lambda data: b""),
    "json-gone": ("l.json", lambda data: None),
    "json-other-number": ("l.json", lambda data: data.replace(b'"num_warps": 4', b'"num_warps": 8')),
    "ptx-truncated": (".ptx", _truncated),
    "ptx-no-text": (".ptx", lambda data: b"\xff" + data),
    "ttir-no-text": (".ttir", lambda data: b"\xff" + data),
    "digest-flipped": (kernel_files.DIGEST, lambda data: data[::-1]),
    "never-used-cubin-empty": (".cubin", lambda data: b""),
    "never-used-cubin-text": (".cubin", lambda data: b"not a program"),
}


def damage(folder: Path) -> dict[str, Any]:
    """Each kind of damage, through both doors: what a new process meets, and the one after it."""
    found: dict[str, Any] = {}
    for name, door in (("gluon", through_gluon), ("triton", through_triton)):
        found[name] = {"first": attempt(door), "known": attempt(door)}
        for kind, (end, change) in DAMAGE.items():
            (file,) = [x for x in folder.rglob("twice_kernel*" if end[0] in ".l" else "*") if x.name.endswith(end)]
            data = change(file.read_bytes())
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
            if kind.startswith("never"):
                file.with_name(kernel_files.DIGEST).unlink()
            found[name][kind] = [attempt(door), attempt(door), attempt(door)]
    return found


def dying(self: FileCacheManager, data: Any, filename: str, binary: bool = True) -> str:
    """`put` of a process that is killed in the middle of the cubin."""
    if filename.endswith(".cubin"):
        Path(self.cache_dir, "tmp.pid_1_x").mkdir()
        Path(self.cache_dir, "tmp.pid_1_x", filename).write_bytes(data[: len(data) // 2])
        os._exit(9)
    return put(self, data, filename, binary)


def slow(self: FileCacheManager, data: Any, filename: str, binary: bool = True) -> str:
    """`put` that leaves another process time to write the same."""
    time.sleep(0.2)
    return put(self, data, filename, binary)


put = FileCacheManager.put


def main(folder: str, what: str) -> None:
    """Run and print."""
    library = Path(folder) / "library" / str(os.getpid())
    library.mkdir(parents=True)
    fake_gpu.load(library).fake_expect(0, None)
    fake_gpu.pretend()
    cache = Path(folder) / "cache"
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.listener = listen
    if what == "damage":
        print(json.dumps(damage(cache)))
        return
    FileCacheManager.put = {"die": dying, "slow": slow}.get(what, put)
    print(json.dumps({"gluon": attempt(through_gluon), "triton": attempt(through_triton)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
