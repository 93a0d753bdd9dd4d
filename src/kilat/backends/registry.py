"""Backends by name, imported on first use."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilat.backends.protocol import Backend

PREFERENCE = ("gluon", "cutile", "triton", "cpu")
"""What backend="auto" tries, in this order."""

BY_NAME_ONLY = {"reference": "kilat.reference"}
"""Backends that are never chosen automatically, and the module of each."""

_found: dict[str, Backend | str] = {}


def names() -> tuple[str, ...]:
    """Every backend's name, those of `PREFERENCE` first."""
    return (*PREFERENCE, *BY_NAME_ONLY)


def get(name: str) -> Backend | str:
    """The backend called `name`, or the sentence why it cannot be loaded; ValueError for a name that nobody has."""
    found = _found.get(name)
    if found is None:
        if name not in names():
            raise ValueError(f"backend must be 'auto' or one of {', '.join(names())}; got backend={name!r}")
        found = _found[name] = _load(name, BY_NAME_ONLY.get(name, f"kilat.backends.{name}"))
    return found


def _load(name: str, module: str) -> Backend | str:
    if importlib.util.find_spec(module) is None:
        return f"the {name} backend is not part of this version of kilat"
    try:
        return importlib.import_module(module).BACKEND
    except ImportError as error:
        return f"the {name} backend cannot be imported: {error}"


def register(name: str, backend: Backend) -> None:
    """Make `backend` known under `name`; it is then chosen by name only, never by "auto".

    Raises ValueError if the name is taken.
    """
    if name in names():
        raise ValueError(f"a new backend's name must differ from {', '.join(names())}; got name={name!r}")
    BY_NAME_ONLY[name] = ""
    _found[name] = backend
