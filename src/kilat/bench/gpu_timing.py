"""Times on a GPU: events around each call, a cold L2, contenders in turn; host time, memory, and runs of seconds.

Everything that touches the GPU goes through `Device`, so that the arithmetic is tested without one.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kilat.bench.contenders import Contender
from kilat.bench.machine import nvidia_smi
from kilat.bench.timing import Timing

# Several times the largest L2; clearing it takes about FLUSH_SECONDS, in which the host gets ahead of the GPU.
FLUSH_BYTES, FLUSH_SECONDS = 256 << 20, 60e-6
MAX_FLUSHES = 16
HOST_TIME_SECONDS = 0.05
# Calls of a warm-up, but one only where a call takes so long.
WARMUP_CALLS, LONG_CALL_SECONDS = 3, 0.5
# A batch of rounds is enqueued before its events are read; short enough not to fill the launch queue.
ROUNDS_AHEAD = 10
SAMPLE_SECONDS = 0.05
# Two batches in a row that move no median by more than this are enough.
STABLE = 0.002
# At least so many rounds, unless one of them takes so long.
LONG_ROUND_SECONDS, FEW_ROUNDS = 2.0, 3


class Event(Protocol):
    """A point in the GPU's queue."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to a later one."""
        ...


class Device(Protocol):
    """What timing needs of a GPU."""

    def event(self) -> Event:
        """Put an event into the queue."""
        ...

    def flush(self) -> None:
        """Enqueue work that evicts the L2."""
        ...

    def synchronize(self) -> None:
        """Wait for the queue; raises RuntimeError if the device is lost."""
        ...

    def allocated(self) -> int:
        """Bytes that torch's allocator holds for tensors now; forgets the peak so far."""
        ...

    def peak(self) -> int:
        """The most bytes held since the last `allocated`."""
        ...

    def sensors(self) -> tuple[float, float] | None:
        """Clock in MHz and power in W, or None where they cannot be read."""
        ...


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def event(self) -> torch.cuda.Event:
        """Put an event into the current stream."""
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def flush(self) -> None:
        """Overwrite more memory than the L2 holds."""
        self._buffer.zero_()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes in use; the peak starts anew."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The most bytes in use since then."""
        return torch.cuda.max_memory_allocated()

    def sensors(self) -> tuple[float, float] | None:
        """Clock and power as NVML reports them, or nvidia-smi where NVML's Python package cannot be used."""
        try:
            return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
        except Exception:  # noqa: BLE001  NVML's own errors have no common type that is importable without it
            found = list(nvidia_smi(("clocks.sm", "power.draw")).values())
        return (float(found[0]), float(found[1])) if found and all(map(_is_number, found)) else None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


@dataclass(frozen=True)
class Cost:
    """Seconds of one call, in the GPU's queue and on the host."""

    gpu: float
    host: float


def cost_of(contender: Contender, device: Device) -> Cost:
    """Warm a contender up and see what a call takes, roughly."""
    with contender.context():
        begin = time.perf_counter()
        contender.call()
        device.synchronize()
        calls = WARMUP_CALLS if time.perf_counter() - begin < LONG_CALL_SECONDS else 1
        start, before = device.event(), time.perf_counter()
        for _ in range(calls):
            contender.call()
        host = (time.perf_counter() - before) / calls
        end = device.event()
    device.synchronize()
    return Cost(start.elapsed_time(end) * 1e-3 / calls, host)


def take_turns(
    contenders: Mapping[str, Contender], device: Device, costs: Mapping[str, Cost], *, reps: int, seconds: float
) -> dict[str, Timing]:
    """Time contenders in turn, about `seconds` each, in `reps` to 50 * reps rounds, every other one in reverse order.

    Fewer rounds where two batches of them have not moved any median, and three where a round takes seconds.
    As triton's do_bench does it: the L2 is flushed before each call, and events stand around it. The flush is repeated
    until it outlasts the slowest contender's host time, or a short kernel's time would be that of its launch.
    """
    slowest = max(cost.host for cost in costs.values())
    flushes = min(MAX_FLUSHES, 1 + math.ceil(slowest / FLUSH_SECONDS))
    round_seconds = sum(cost.gpu + flushes * FLUSH_SECONDS for cost in costs.values())
    least = min(reps, FEW_ROUNDS) if round_seconds > LONG_ROUND_SECONDS else reps
    rounds = max(least, min(50 * reps, int(seconds * len(contenders) / round_seconds)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    medians: list[list[float]] = []
    for first in range(0, rounds, ROUNDS_AHEAD):
        events: list[tuple[str, Event, Event]] = []
        for n in range(first, min(rounds, first + ROUNDS_AHEAD)):
            for name in names if n % 2 == 0 else reversed(names):
                events.append((name, *_timed(contenders[name], device, flushes)))
        device.synchronize()
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1e-3)
        medians.append([statistics.median(times) for times in samples.values()])
        if first + ROUNDS_AHEAD >= reps and _settled(medians[-3:]):
            break
    return {name: Timing(statistics.median(times), min(times), len(times)) for name, times in samples.items()}


def _settled(medians: list[list[float]]) -> bool:
    """Whether the medians of three batches in a row agree."""
    return len(medians) == 3 and all(max(some) <= (1.0 + STABLE) * min(some) for some in zip(*medians, strict=True))


def _timed(contender: Contender, device: Device, flushes: int) -> tuple[Event, Event]:
    with contender.context():
        for _ in range(flushes):
            device.flush()
        start = device.event()
        contender.call()
        return start, device.event()


def host_seconds(contender: Contender, device: Device, cost: Cost, calls: int = 20) -> float:
    """Median time from Python to the launch, without waiting for the GPU; fewer calls where they take it long."""
    least = 1 if cost.gpu > LONG_CALL_SECONDS else 5
    calls = max(least, min(calls, int(HOST_TIME_SECONDS / max(cost.gpu, 1e-6))))
    times: list[float] = []
    device.synchronize()
    with contender.context():
        for _ in range(calls):
            before = time.perf_counter()
            contender.call()
            times.append(time.perf_counter() - before)
    device.synchronize()
    return statistics.median(times)


def extra_bytes(contender: Contender, device: Device) -> int:
    """Peak of torch's allocator during one call, above what was there before it and what the call returned."""
    device.synchronize()
    before = device.allocated()
    with contender.context():
        returned = contender.call()
    device.synchronize()
    return max(0, device.peak() - before - _tensor_bytes(returned))


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(_tensor_bytes(item) for item in value)
    return 0


@dataclass(frozen=True)
class Sustained:
    """Calls back to back for seconds, without flushes: seconds a call, and mean clock (MHz) and power (W)."""

    seconds: float
    calls: int
    clock: float | None
    power: float | None


@dataclass
class _Sampler:
    """Reads the sensors in a thread until told to stop."""

    device: Device
    readings: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.wait(SAMPLE_SECONDS):
            reading = self.device.sensors()
            if reading is None:
                return
            self.readings.append(reading)


def sustain(
    contender: Contender,
    device: Device,
    cost: Cost,
    *,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Sustained:
    """Run a contender for `seconds`, and report on what comes after the first quarter, when the clock has settled."""
    batch = max(1, int(0.02 / max(cost.gpu, 1e-6)))
    sampler = _Sampler(device)
    thread = threading.Thread(target=sampler.run, daemon=True)
    events: list[Event] = []
    begin = clock()
    settled, settled_readings = 0, 0
    thread.start()
    with contender.context():
        while len(events) < settled + 2 or clock() - begin < seconds:
            events.append(device.event())
            for _ in range(batch):
                contender.call()
            device.synchronize()
            if clock() - begin < seconds / 4:
                settled, settled_readings = len(events), len(sampler.readings)
        events.append(device.event())
    device.synchronize()
    sampler.stop.set()
    thread.join()
    calls = batch * (len(events) - 1 - settled)
    elapsed = events[settled].elapsed_time(events[-1]) * 1e-3
    readings = sampler.readings[settled_readings:]
    clocks, powers = (statistics.mean(x) for x in zip(*readings, strict=True)) if readings else (None, None)
    return Sustained(elapsed / calls, calls, clocks, powers)
