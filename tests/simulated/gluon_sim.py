"""Runs a Gluon kernel's own Python source on the CPU: a check of barriers and numbers without a GPU.

A gluon.jit function keeps its plain Python function in `.fn`. `launch` runs it with the globals of its module rebound
to NumPy stand-ins (also in modules that it takes functions from), once per program of the grid:

- a partition of `warp_specialize` is a thread, an mbarrier counts arrivals and bytes;
- TMA loads land in any order, in some runs not before somebody waits for them; TMA stores and reduce-adds read their
  source at the next `store_wait`;
- an asynchronous wgmma reads its shared operands at some moment between its issue and its wait;
- shared memory starts as poison and becomes poison again when a load into it is issued;
- ints are int32: `//` and `%` truncate as on the GPU, overflow is an error;
- shared memory that was stored to and not fenced may not be read by TMA or wgmma.

So a missing wait, a buffer freed or refilled too early, a wrong phase (a deadlock), a wrong arrival count or a missing
fence is found in some of the seeds, as a SimError or as a wrong result. Nothing is said about layouts, registers,
memory order between threads of one partition, or speed.

    launch(module, "forward_kernel", grid=(4,), args=dict(q_desc=Desc(q, (1, 64, 1, 64)), lse=Ptr(lse), ...), seed=1)
"""

from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from simulated import gluon_values as values
from simulated.gluon_rebind import Rebinder
from simulated.gluon_values import I32, Desc, Ptr, Smem, T, as_int, is_poisoned, poison, tensor

__all__ = ["Desc", "Ptr", "Sim", "SimError", "launch"]


class SimError(RuntimeError):
    """The kernel broke a rule of the machine."""


class Sim:
    """The state that the partitions of one program share: one lock, TMA's queue, what failed."""

    def __init__(self, seed: int = 0, timeout: float = 20.0) -> None:
        self.rng = random.Random(seed)
        self.lock = threading.Condition()
        self.timeout = timeout
        self.errors: list[BaseException] = []
        self.late = self.rng.random() < 0.5  # loads land only when somebody waits for them
        self.jobs: list[tuple[Barrier, Callable[[], None]]] = []
        self.stores: list[Callable[[], None]] = []  # done as late as they may be
        self.waiting_for_stores = 0
        self.stop = False
        self.engine = threading.Thread(target=self._copy, daemon=True)
        self.engine.start()

    def _copy(self) -> None:
        """The TMA engine: do the copies asked for, late and in any order."""
        while True:
            with self.lock:
                while (job := self._next()) is None:
                    if self.stop:
                        return
                    self.lock.wait(0.05)
            if self.rng.random() < 0.3:
                time.sleep(0.0005)
            with self.lock:
                try:
                    job()
                except SimError as error:
                    self.errors.append(error)
                self.lock.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Some copy that may be done now."""
        ready = [job for job in self.jobs if not self.late or job[0].waiters or self.stop]
        if ready:
            job = ready[self.rng.randrange(len(ready))]
            self.jobs.remove(job)
            return job[1]
        if self.stores and (self.waiting_for_stores or self.stop):
            return self.stores.pop(self.rng.randrange(len(self.stores)))
        return None

    def submit(self, barrier: Barrier, job: Callable[[], None]) -> None:
        """Queue a load; the lock is held."""
        self.jobs.append((barrier, job))
        self.lock.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition` holds; the lock is held."""
        end = time.time() + self.timeout
        while not condition():
            if self.errors:
                raise SimError("another partition failed")
            if not self.lock.wait(0.2) and time.time() > end:
                raise SimError(f"deadlock: waited too long for {what}")

    def close(self) -> None:
        """End the engine after its last copy."""
        with self.lock:
            self.stop = True
            self.lock.notify_all()
        self.engine.join()


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes have come."""

    def __init__(self, sim: Sim) -> None:
        self.sim, self.count, self.pending, self.bytes, self.phase = sim, 0, 0, 0, 0
        self.waiters = 0

    def settle(self) -> None:
        """End the phase if nothing is missing; the lock is held."""
        if self.pending < 0:
            raise SimError("more arrivals than the barrier's count")
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1
            self.sim.lock.notify_all()


class Barriers:
    """An array of mbarriers in shared memory."""

    def __init__(self, sim: Sim, count: int) -> None:
        self.each = [Barrier(sim) for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


class Token:
    """A wgmma under way: `read` happens once, at any time up to its wait."""

    def __init__(self, read: Callable[[], T]) -> None:
        self.read, self.value, self.done = read, None, False

    def run(self) -> None:
        if not self.done:
            self.value, self.done = self.read(), True


class MBarrierModule:
    """Stands in for `mbarrier`."""

    MBarrierLayout = staticmethod(lambda *_: "mbarrier")

    def __init__(self, sim: Sim) -> None:
        self.sim = sim

    def init(self, bar: Any, count: int) -> None:
        bar = self._one(bar)
        bar.count = bar.pending = count

    def arrive(self, bar: Any, *, count: int = 1, pred: Any = True) -> None:
        if not pred:
            return
        with self.sim.lock:
            self._one(bar).pending -= count
            self._one(bar).settle()
        if self.sim.rng.random() < 0.4:
            time.sleep(0.001)  # let the others act on it first

    def expect(self, bar: Any, nbytes: int, pred: Any = True) -> None:
        if not pred:
            return
        with self.sim.lock:
            bar = self._one(bar)
            bar.bytes += int(nbytes)
            bar.pending -= 1
            bar.settle()

    def wait(self, bar: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            bar = self._one(bar)
            with self.sim.lock:
                bar.waiters += 1
                self.sim.lock.notify_all()
                self.sim.wait_until(lambda: bar.phase != (int(phase) & 1), "an mbarrier")
                bar.waiters -= 1

    @staticmethod
    def _one(bar: Any) -> Barrier:
        return bar.index(0) if isinstance(bar, Barriers) else bar


class Copies:
    """Stands in for `tma` and the copies of `_compat`; every one reads or writes at some later time."""

    def __init__(self, sim: Sim, local: threading.local) -> None:
        self.sim, self.local = sim, local

    def load(self, desc: Desc, coord: Sequence[Any], bar: Any, dst: Smem, pred: Any = True) -> None:
        """Global to shared, zero outside the tensor, then the bytes count as arrived."""
        if not pred:
            return
        box, barrier = desc.box(coord), MBarrierModule._one(bar)
        if list(dst.data.shape) != list(desc.block_shape):
            raise SimError(f"a box of {desc.block_shape} does not fit a buffer of {list(dst.data.shape)}")

        def land() -> None:
            dst.data[...] = desc.read(box)
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        with self.sim.lock:
            poison(dst.data)  # a reader that was not done with this buffer will notice
            self.sim.submit(barrier, land)

    def store(self, desc: Desc, coord: Sequence[Any], src: Smem) -> None:
        self._out(desc, coord, src, add=False)

    def reduce_add(self, desc: Desc, coord: Sequence[Any], src: Smem) -> None:
        """Add shared memory to global memory."""
        self._out(desc, coord, src, add=True)

    def _out(self, desc: Desc, coord: Sequence[Any], src: Smem, add: bool) -> None:
        box = desc.box(coord)
        issued, read = self.local.__dict__.setdefault("issued", []), threading.Event()

        def leave() -> None:
            self._check(src)
            desc.write(box, src.data, add)
            read.set()

        with self.sim.lock:
            self._check(src)
            issued.append(read)
            self.sim.stores.append(leave)

    def store_wait(self, pendings: int = 0) -> None:
        """Until of this partition's stores all but the last `pendings` have read their source."""
        with self.sim.lock:
            issued = self.local.__dict__.setdefault("issued", [])
            early = issued[: max(len(issued) - pendings, 0)]
            self.sim.waiting_for_stores += 1
            self.sim.lock.notify_all()
            self.sim.wait_until(lambda: all(read.is_set() for read in early), "TMA stores")
            self.sim.waiting_for_stores -= 1

    @staticmethod
    def _check(src: Smem) -> None:
        if is_poisoned(src.data):
            raise SimError("TMA stores a buffer that was never filled")
        if src.state.unfenced:
            raise SimError("no fence between a store to shared memory and TMA")


class Mma:
    """Stands in for `warpgroup_mma` and its wait."""

    def __init__(self, sim: Sim, local: threading.local) -> None:
        self.sim, self.local = sim, local

    def _queue(self) -> list[Token]:
        return self.local.__dict__.setdefault("mma", [])

    def issue(self, a: Any, b: Smem, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
        registers = None if isinstance(a, Smem) else np.array(a, np.float32)
        before = acc if isinstance(acc, Token) else np.array(acc)

        def read() -> T:
            with self.sim.lock:
                x = self._read(a) if registers is None else registers
                product = x @ self._read(b)
            if use_acc:
                if isinstance(before, Token):
                    before.run()
                product = product + (before.value if isinstance(before, Token) else before)
            return tensor(product, np.float32)

        token, queue = Token(read), self._queue()
        queue.append(token)
        if not is_async:
            return self.wait(0, deps=[token])
        if self.sim.rng.random() < 0.3:
            for each in queue:
                each.run()
        return token

    @staticmethod
    def _read(x: Smem) -> Any:
        if is_poisoned(x.data):
            raise SimError("wgmma read a buffer that TMA is refilling or never filled")
        if x.state.unfenced:
            raise SimError("no fence between a store to shared memory and wgmma")
        return np.array(x.data, np.float32)

    def wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        queue = self._queue()
        if self.local.__dict__.setdefault("slow", self.sim.rng.random() < 0.4) and self.sim.rng.random() < 0.5:
            time.sleep(0.002)  # some partitions are slow, so that others run ahead
        while len(queue) > num_outstanding:
            queue.pop(0).run()
        for dep in deps:
            if dep in queue:
                raise SimError("a value is used while its wgmma is still outstanding")
        values = [dep.value if isinstance(dep, Token) else dep for dep in deps]
        return values[0] if len(values) == 1 else tuple(values)


def _shared(sim: Sim) -> Callable[..., Any]:
    def allocate(dtype: Any, shape: Sequence[int], layout: Any = None, value: Any = None) -> Any:
        if layout == "mbarrier":
            return Barriers(sim, int(shape[0]))
        data = np.zeros([int(n) for n in shape], dtype)
        poison(data)
        smem = Smem(data)
        if value is not None:
            smem.store(value)
        return smem

    return allocate


def _specialize(sim: Sim) -> Callable[..., None]:
    def body(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            with np.errstate(all="ignore"):
                function(*args)
        except BaseException as error:  # noqa: BLE001 (handed to the caller of `launch`)
            with sim.lock:
                sim.errors.append(error)
                sim.lock.notify_all()

    def warp_specialize(parts: Sequence[Any], warps: Any, regs: Any = None) -> None:
        threads = [threading.Thread(target=body, args=part, daemon=True) for part in parts]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if sim.errors:
            raise next((e for e in sim.errors if "another partition" not in str(e)), sim.errors[0])

    return warp_specialize


def _language(sim: Sim, pids: Sequence[int], grid: Sequence[int]) -> types.SimpleNamespace:
    """What `gl` stands for: NumPy functions, and layouts that mean nothing."""
    gl = types.SimpleNamespace(**values.FUNCTIONS)
    for name in values.LAYOUTS:
        setattr(gl, name, values.Nothing)
    gl.program_id = lambda axis: I32(pids[axis])
    gl.num_programs = lambda axis: I32(grid[axis])
    gl.allocate_shared_memory = _shared(sim)
    gl.warp_specialize = _specialize(sim)
    return gl


def namespace(sim: Sim, pids: Sequence[int], grid: Sequence[int]) -> dict[str, Any]:
    """The stand-ins by the names under which kernels import them."""
    local = threading.local()
    copies, mma = Copies(sim, local), Mma(sim, local)

    def fence(cluster: bool = False) -> None:
        with sim.lock:
            for state in Smem.stored_by(threading.get_ident()):
                state.unfenced.discard(threading.get_ident())

    return {
        "gl": _language(sim, pids, grid),
        "mbarrier": MBarrierModule(sim),
        "tma": copies,
        "async_load": copies.load,
        "async_store": copies.store,
        "async_reduce_add": copies.reduce_add,
        "fence_async_shared": fence,
        "cta_barrier": lambda: None,
        "warpgroup_mma": mma.issue,
        "warpgroup_mma_wait": mma.wait,
        "warpgroup_mma_init": lambda x: x,
    }


def launch(
    module: types.ModuleType,
    kernel: str,
    grid: tuple[int, ...],
    args: dict[str, Any],
    *,
    seed: int = 0,
    timeout: float = 20.0,
    also: dict[str, Any] | None = None,
) -> None:
    """Run `module.<kernel>`, a gluon.jit function, once per program of `grid`, one after the other.

    `also`: further globals to replace (a planted bug, say). Raises SimError, or what a partition raised.
    """
    wrapped = {name: as_int(value) for name, value in args.items()}
    for pids in np.ndindex(*grid):
        sim = Sim(seed, timeout)
        rebinder = Rebinder(namespace(sim, pids, grid), also or {})
        try:
            rebinder.bind(getattr(module, kernel))(**wrapped)
        finally:
            sim.close()
        if sim.errors:
            raise sim.errors[0]
