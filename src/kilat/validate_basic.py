"""The smallest checks: one argument, one expectation, one message that names both and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def fail(kind: type[Exception], expectation: str, **values: Any) -> NoReturn:
    """Raise `kind` with "expectation; got name=value, ..."."""
    got = ", ".join(f"{name}={_show(name, value)}" for name, value in values.items())
    raise kind(f"{expectation}; got {got}")


def _show(name: str, value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    return repr(value) if isinstance(value, str) and name != "type" else str(value)


def check_tensor(name: str, value: Any) -> Tensor:
    """`value`, if it is a tensor with strides; TypeError otherwise."""
    if not isinstance(value, Tensor):
        remedies = {"list": " (torch.tensor makes one)", "ndarray": " (torch.from_numpy makes one)"}
        kind = type(value).__name__
        fail(TypeError, f"{name} must be a torch tensor{remedies.get(kind, '')}", type=kind)
    if value.layout is not torch.strided:
        fail(TypeError, f"{name} must be a strided tensor", layout=value.layout)
    return value


def check_rank(name: str, value: Tensor, axes: Sequence[str]) -> None:
    """ValueError unless `value` has one axis per name in `axes`."""
    if value.dim() != len(axes):
        fail(ValueError, f"{name} must be [{', '.join(axes)}]", shape=value.shape)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """ValueError unless `value` is on `device`."""
    if value.device != device:
        fail(ValueError, f"{name} must be on q's device {device}", device=value.device)


def check_host_int(name: str, value: Any, minimum: int) -> None:
    """TypeError unless an integer (a symbolic one will do), ValueError below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        fail(TypeError, f"{name} must be an integer or None", type=type(value).__name__, value=value)
    if value < minimum:
        fail(ValueError, f"{name} must be at least {minimum}", **{name: value})


def check_flag(name: str, value: Any) -> None:
    """TypeError unless a bool."""
    if not isinstance(value, bool):
        fail(TypeError, f"{name} must be True or False", type=type(value).__name__)


def check_int32(name: str, value: Any, shape: Sequence[Any], axes: str, device: torch.device) -> None:
    """Raises unless `value` is an int32 tensor of `shape`, whose axes are named in `axes`, on `device`."""
    check_tensor(name, value)
    if value.dtype != torch.int32:
        fail(TypeError, f"{name} must be int32 (use .to(torch.int32))", dtype=value.dtype)
    if value.dim() != len(shape) or any(a != b for a, b in zip(value.shape, shape, strict=True)):
        fail(ValueError, f"{name} must be [{axes}] = {[plain(x) for x in shape]}", shape=value.shape)
    check_device(name, value, device)


def plain(size: Any) -> Any:
    """A size as a message shows it: symbolic ones by name."""
    return size if isinstance(size, int) else str(size)
