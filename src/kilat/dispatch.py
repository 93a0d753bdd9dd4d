"""Which backend does a Problem, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kilat.backends import registry

if TYPE_CHECKING:
    from kilat.backends.protocol import Backend
    from kilat.problem import Problem


class UnsupportedError(NotImplementedError):
    """No backend that was allowed can do the problem; the message holds every reason."""


@dataclass(frozen=True)
class Report:
    """What dispatch does with a Problem: the chosen backend (None if none can) and each one's reasons against it."""

    problem: Problem
    asked: str
    chosen: str | None
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)  # empty tuple: the backend can do it

    def __str__(self) -> str:
        lines = [self.problem.short_id(), f"backend={self.asked!r} chooses {self.chosen or 'nothing'}"]
        width = max(len(name) for name in self.reasons)
        for name, reasons in self.reasons.items():
            verdict = "; ".join(reasons) if reasons else _verdict(name, self.chosen)
            lines.append(f"  {name:<{width}}  {verdict}")
        return "\n".join(lines)


def _verdict(name: str, chosen: str | None) -> str:
    if name == chosen:
        return "chosen"
    return "able, by name only" if name not in registry.PREFERENCE else "able, but lower in preference"


def reasons_against(name: str, problem: Problem) -> list[str]:
    """Every reason why the backend called `name` cannot do the problem."""
    backend = registry.get(name)
    if isinstance(backend, str):
        return [backend]
    reasons = backend.unsupported(problem)
    if problem.ring_first is not None and not getattr(backend, "reads_rings", False):
        return [*reasons, f"ring_first={problem.ring_first}: the {name} backend reads no ring caches"]
    return reasons


def choose(problem: Problem, name: str = "auto") -> Backend:
    """The first backend of `PREFERENCE` that can do the problem, or the one asked for by name.

    Raises UnsupportedError with every reason if there is none, ValueError for an unknown name. Never falls back from a
    backend asked for by name.
    """
    against: dict[str, list[str]] = {}
    for candidate in registry.PREFERENCE if name == "auto" else (name,):
        against[candidate] = reasons_against(candidate, problem)
        if not against[candidate]:
            backend = registry.get(candidate)
            if not isinstance(backend, str):
                return backend
    listed = "; ".join(f"{who}: {', '.join(reasons)}" for who, reasons in against.items())
    raise UnsupportedError(f"no backend for {problem.short_id()} with backend={name!r}: {listed}")


def explain(problem: Problem, name: str = "auto") -> Report:
    """The Report of every backend, including those that `name` does not allow."""
    reasons = {who: tuple(reasons_against(who, problem)) for who in registry.names()}
    if name != "auto" and name not in reasons:
        registry.get(name)  # raises, naming those there are
    allowed = registry.PREFERENCE if name == "auto" else (name,)
    chosen = next((who for who in allowed if not reasons[who]), None)
    return Report(problem, name, chosen, reasons)
