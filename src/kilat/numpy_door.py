"""NumPy arrays in, NumPy arrays out, sharing memory wherever torch can address it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilat.validate_basic import fail


class _Writable:
    """The memory of a read-only array, declared writable, so that torch takes it without a warning; nobody writes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array  # keeps the memory alive


def as_tensor(name: str, value: Any) -> Tensor:
    """A tensor over an array's memory; a copy for strides and byte orders that torch does not have.

    Raises TypeError for what is no array, and for dtypes that torch does not have.
    """
    if not isinstance(value, np.ndarray):
        fail(TypeError, f"{name} must be a tensor or an array", type=type(value).__name__)
    array: np.ndarray[Any, Any] = value
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 or stride % max(array.itemsize, 1) for stride in array.strides):
        array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(f"{name} must have a dtype that torch has; got dtype={array.dtype}") from error


def int32_tensor(name: str, value: Any) -> Tensor:
    """A tensor of integers over an array's memory, or an int32 copy where the array has other integers that fit."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype != np.int32:
        if value.size and (value.min() < -(2**31) or value.max() >= 2**31):
            fail(ValueError, f"{name} must fit int32", min=value.min(), max=value.max())
        value = value.astype(np.int32)
    return as_tensor(name, value)


def is_numpy(*values: Any) -> bool:
    """Whether q, k, v (or those given) are NumPy arrays; TypeError if only some are."""
    arrays = [isinstance(x, np.ndarray) for x in values]
    if True in arrays and not all(arrays):
        kinds = ", ".join(type(x).__name__ for x in values)
        raise TypeError(f"q, k and v must be all torch tensors or all NumPy arrays; got {kinds}")
    return arrays[0]


def as_tensors(arrays: dict[str, Any]) -> list[Tensor | None]:
    """Tensors over the arrays' memory, None where None."""
    return [None if x is None else as_tensor(name, x) for name, x in arrays.items()]


def as_int32(arrays: dict[str, Any]) -> list[Tensor | None]:
    """int32 tensors, over the arrays' memory where they are int32, None where None."""
    return [None if x is None else int32_tensor(name, x) for name, x in arrays.items()]


def as_numpy(result: Any) -> Any:
    """A tensor, or a tuple of tensors, as arrays over the same memory; a graph that a torch bias left is dropped."""
    if isinstance(result, tuple):
        return tuple(as_numpy(x) for x in result)
    return result.detach().numpy()


def torch_dtype(dtype: Any) -> Any:
    """A torch dtype from a NumPy one; torch dtypes and None as they are. TypeError for other dtypes."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = np.dtype(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        fail(TypeError, "out_dtype must be a dtype that torch has", out_dtype=dtype)
    return found
