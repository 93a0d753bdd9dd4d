"""What groups of a GPU suite's cells come to: speed beside peers, determinism, memory, host time, sustained runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kilat.bench.run import OURS, Row, is_peer, members
from kilat.bench.timing import geometric_mean

DETERMINISTIC = f"{OURS}-deterministic"

Summary = dict[str, object]


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One a group: all cells of a direction, those of a dtype too, those of a head_dim and mask too.

    - ratio, smallest, smallest_cell: best peer's time over kilat's, geometric mean and the least.
    - share_of_limit: of the matmul rate of the same run, geometric mean.
    - deterministic, deterministic_largest: the deterministic time over the default's.
    - extra_bytes, extra_share: the largest peak above inputs and outputs, and over the bytes of q, k, v and out.
    - host_seconds, host_largest: of kilat's Python call, median and largest; host_peer: the median of each best peer.
    - sustained: the best peer's sustained time over kilat's, geometric mean. None where nothing of it was measured.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.cell.direction} all", []).append(row)
    return [_summary(name, some) for name, some in {**groups, **members(rows)}.items()]


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    rated = {row.cell.name: row.ratio for row in rows if row.ratio is not None}
    least = min(rated, key=lambda cell: rated[cell], default=None)
    shares = [ours / row.limit for row in rows if row.limit and (ours := row.achieved(OURS)) is not None]
    slower = [
        row.timings[DETERMINISTIC].median / row.timings[OURS].median
        for row in rows
        if DETERMINISTIC in row.timings and OURS in row.timings
    ]
    extra = [(row.extra_bytes[OURS], row) for row in rows if OURS in row.extra_bytes]
    host = [row.host_seconds[OURS] for row in rows if OURS in row.host_seconds]
    peer = [row.host_seconds[row.best_peer] for row in rows if row.best_peer and row.best_peer in row.host_seconds]
    held = [ratio for row in rows if (ratio := sustained_ratio(row)) is not None]
    return {
        "name": name,
        "cells": len(rows),
        "measured": len(rated),
        "ratio": _mean(list(rated.values())),
        "smallest": None if least is None else rated[least],
        "smallest_cell": least,
        "share_of_limit": _mean(shares),
        "deterministic": _mean(slower),
        "deterministic_largest": max(slower, default=None),
        "extra_bytes": max((size for size, _ in extra), default=None),
        "extra_share": max((size / tensor_bytes(row) for size, row in extra), default=None),
        "host_seconds": statistics.median(host) if host else None,
        "host_largest": max(host, default=None),
        "host_peer": statistics.median(peer) if peer else None,
        "sustained": _mean(held),
    }


def tensor_bytes(row: Row) -> int:
    """Bytes of q, k, v and out, and of their gradients in a backward."""
    cell = row.cell
    tokens_q = sum(n for n, _ in cell.sequences) * cell.num_heads_q
    tokens_kv = sum(n for _, n in cell.sequences) * cell.num_heads_kv
    elements = (tokens_q + tokens_kv) * (cell.head_dim + cell.dim_v)
    return elements * (4 if cell.dtype == "float32" else 2) * (2 if cell.direction == "backward" else 1)


def sustained_ratio(row: Row) -> float | None:
    """The best peer's sustained time over kilat's."""
    peers = [one.seconds for name, one in row.sustained.items() if is_peer(name)]
    return min(peers) / row.sustained[OURS].seconds if peers and OURS in row.sustained else None


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None
