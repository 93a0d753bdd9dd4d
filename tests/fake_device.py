"""A GPU whose clock is made up, for tests of timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kilat.bench.contenders import Contender


@dataclass
class FakeEvent:
    """A moment of the fake queue, in milliseconds."""

    at: float

    def elapsed_time(self, end: Any) -> float:
        return end.at - self.at


@dataclass
class FakeDevice:
    """A GPU whose calls take the times that they say themselves, and which may be lost."""

    now: float = 0.0
    flushes: int = 0
    bytes: int = 100
    most: int = 0
    lost: bool = False
    log: list[str] = field(default_factory=list[str])

    def event(self) -> FakeEvent:
        return FakeEvent(self.now)

    def flush(self) -> None:
        self.flushes += 1
        self.now += 0.06

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def allocated(self) -> int:
        self.most = self.bytes
        return self.bytes

    def peak(self) -> int:
        return self.most

    def sensors(self) -> tuple[float, float]:
        return 1980.0, 650.0

    def call(self, name: str, milliseconds: float, extra: int = 0) -> Contender:
        """A contender that takes so long, and `extra` bytes beside what it returns."""
        returned = torch.zeros(8)

        def work() -> Tensor:
            self.log.append(name)
            self.now += milliseconds
            self.most = max(self.most, self.bytes + extra + 32)
            return returned

        return Contender(work, dict)


class Ticking:
    """A device on whose clock every event is later than the one before."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def event(self) -> FakeEvent:
        self.device.now += 1.0
        return self.device.event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)
