"""Groups of calls in several processes on one GPU: one that dies or hangs costs the call that it was in, and no other.

A group is worked on by one process, in order, so that calls that share kernels compile them once.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOST = ("CUDA error", "illegal memory access", "unspecified launch failure")
"""What an error says after which a process can no longer use its GPU."""
HANG_SECONDS = 150.0
LOST_CODE = 3

Item = Any
Row = dict[str, Any]
Work = Callable[[Item], list[Row]]


def find_sources() -> None:
    """Make tests' modules and the package importable."""
    for folder in ("src", "tests"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))


def _serve(connection: Connection, work: Work) -> None:
    """A worker: groups come in, (place in the group, rows) go out; it ends itself once its GPU is lost."""
    find_sources()
    import torch

    torch.set_num_threads(1)
    while True:
        group = connection.recv()
        if group is None:
            return
        for number, item in enumerate(group):
            rows = work(item)
            connection.send((number, rows))
            if any(word in str(row.get("reason", "")) for row in rows for word in LOST):
                sys.exit(LOST_CODE)
        connection.send(None)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    group: list[Item]
    done: int = 0  # items of the group
    since: float = 0.0
    idle: bool = False  # the group is finished
    ended: str = ""  # why it is of no more use


def run(
    groups: Sequence[Sequence[Item]],
    work: Work,
    processes: int,
    deadline: float,
    *,
    hang: float = HANG_SECONDS,
) -> Iterator[tuple[Item, list[Row] | str]]:
    """(item, its rows) as they are done; instead of rows the reason, where the process ended or hung in the item.

    After `deadline`, of time.monotonic(), nothing more is waited for; what was not done by then is not yielded.
    """
    waiting = deque(list(group) for group in groups if group)
    workers: list[_Worker] = []
    try:
        while (workers or waiting) and time.monotonic() < deadline:
            while len(workers) < processes and waiting:
                workers.append(_start(work, waiting.popleft()))
            wait([worker.connection for worker in workers], timeout=0.2)
            for worker in list(workers):
                yield from _received(worker, hang)
                if worker.idle and waiting:
                    _give(worker, waiting.popleft())
                elif worker.idle or worker.ended:
                    _stop(worker)
                    workers.remove(worker)
                    left = worker.group[worker.done :]
                    if left and worker.ended != "lost":
                        yield left.pop(0), worker.ended
                    if left:
                        waiting.append(left)
    finally:
        for worker in workers:
            _stop(worker)


def _start(work: Work, group: list[Item]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, work), daemon=True)
    process.start()
    there.close()
    worker = _Worker(process, here, group)
    _give(worker, group)
    return worker


def _give(worker: _Worker, group: list[Item]) -> None:
    worker.group, worker.done, worker.since, worker.idle = group, 0, time.monotonic(), False
    worker.connection.send(group)


def _stop(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _received(worker: _Worker, hang: float) -> Iterator[tuple[Item, list[Row]]]:
    """What a worker has sent, to the last word of one that has ended."""
    alive = worker.process.is_alive()
    try:
        while worker.connection.poll():
            message = worker.connection.recv()
            worker.since = time.monotonic()
            if message is None:
                worker.idle = True
            else:
                number, rows = message
                worker.done = number + 1
                yield worker.group[number], rows
    except (EOFError, OSError):
        worker.process.join(10)
        alive = False
    if not alive:
        code = worker.process.exitcode
        worker.ended = "lost" if code == LOST_CODE else f"the process ended with {code}"
    elif time.monotonic() - worker.since > hang:
        worker.ended = f"no answer for {hang:.0f} s"
