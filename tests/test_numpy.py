"""NumPy arrays in, NumPy arrays out: the same bits as torch, no copy, no warning, no mixing."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import kilat
from kilat.numpy_door import as_tensor, int32_tensor


def make(dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, n, h, 8)).astype(dtype) for n, h in ((5, 4), (7, 2), (7, 2))]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_same_bits_as_torch(dtype: Any) -> None:
    args = make(dtype)
    out, lse = kilat.attention(*args, mask=kilat.Causal(), return_lse=True, backend="reference")
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    assert out.dtype == dtype
    tensors = [torch.from_numpy(x) for x in args]
    wanted = kilat.attention(*tensors, mask=kilat.Causal(), return_lse=True, backend="reference")
    assert np.array_equal(out, wanted[0].numpy())
    assert np.array_equal(lse, wanted[1].numpy())


def test_every_array_argument() -> None:
    rng = np.random.default_rng(1)
    lengths = np.array([3, 7])  # int64, as NumPy makes them
    given: dict[str, Any] = {
        "mask": kilat.Documents(np.array([0, 0, 0, 1, 1, 1, 1], np.int32)) & kilat.Dense(np.ones((5, 7), dtype=bool)),
        "scores": (kilat.Bias(rng.standard_normal((5, 7)).astype(np.float32)), kilat.Alibi(np.ones(4, np.float32))),
        "sink": np.ones(4, np.float32),
        "dropout": kilat.Dropout(0.5, keep=np.arange(7) % 3 != 0),
        "out_dtype": np.float32,
    }
    got = kilat.attention(*make(np.float16), seqlens_kv=lengths, **given, backend="reference")
    assert got.dtype == np.float32
    tensors = [torch.from_numpy(x) for x in make(np.float16)]
    given |= {"sink": torch.ones(4), "out_dtype": torch.float32}
    wanted = kilat.attention(*tensors, seqlens_kv=torch.from_numpy(lengths).int(), **given, backend="reference")
    assert np.array_equal(got, wanted.numpy())


def test_ragged_cached_merge_and_explain() -> None:
    q, k, v = (x[0] for x in make())
    cu_q, cu_kv = np.array([0, 2, 5]), np.array([0, 3, 7])
    out, lse = kilat.ragged_attention(q, k, v, cu_q, cu_kv, return_lse=True, backend="reference")
    assert (out.shape, lse.shape) == ((5, 4, 8), (4, 5))
    both = kilat.merge([out, out], [lse, lse])
    assert isinstance(both[0], np.ndarray)
    np.testing.assert_allclose(both[0], out, rtol=1e-6)
    np.testing.assert_allclose(both[1], lse + np.log(2.0), rtol=1e-6)
    assert kilat.explain(*make(), backend="reference").chosen == "reference"
    keys, values, lengths = (
        np.zeros((2, 9, 2, 8), np.float32),
        np.zeros((2, 9, 2, 8), np.float32),
        np.zeros(2, np.int32),
    )
    cache = kilat.ContiguousCache(keys, values, lengths).append(*make()[1:])
    assert np.array_equal(keys[:, :7], make()[1])
    assert lengths.tolist() == [7, 7]
    buffer = np.empty((2, 5, 4, 8), np.float32)
    got = kilat.cached_attention(make()[0], cache, out=buffer, backend="reference")
    assert np.shares_memory(got, buffer)
    np.testing.assert_allclose(got, kilat.attention(*make(), mask=kilat.Causal(), backend="reference"))


def test_memory_is_shared() -> None:
    array = make()[0]
    assert as_tensor("q", array).data_ptr() == array.ctypes.data
    view = array.transpose(0, 2, 1, 3)
    assert as_tensor("q", view).data_ptr() == array.ctypes.data
    lengths = np.zeros(3, np.int32)
    assert int32_tensor("lengths", lengths).data_ptr() == lengths.ctypes.data


def test_read_only_arrays_give_no_warning_and_stay() -> None:
    args = make()
    wanted = kilat.attention(*args, backend="reference")
    for x in args:
        x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(kilat.attention(*args, backend="reference"), wanted)
        assert as_tensor("q", args[0]).data_ptr() == args[0].ctypes.data
    cache = kilat.ContiguousCache(args[1], args[2], np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="writable"):
        cache.append(args[1][:, :1], args[2][:, :1])


def test_strides_and_byte_orders_that_torch_lacks() -> None:
    args = make()
    wanted = kilat.attention(*args, backend="reference")
    backwards = [np.ascontiguousarray(x[:, :, :, ::-1])[:, :, :, ::-1] for x in args]
    assert np.array_equal(kilat.attention(*backwards, backend="reference"), wanted)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in args]
    assert np.array_equal(kilat.attention(*swapped, backend="reference"), wanted)
    packed = np.zeros(args[0].shape, dtype=np.dtype([("pad", "i1"), ("x", "f4")]))
    packed["x"] = args[0]
    assert np.array_equal(kilat.attention(packed["x"], *args[1:], backend="reference"), wanted)


def test_mixing_and_other_dtypes_raise() -> None:
    q, k, v = make()
    with pytest.raises(TypeError, match="all torch tensors or all NumPy arrays; got ndarray, Tensor, ndarray"):
        kilat.attention(q, torch.from_numpy(k), v)
    with pytest.raises(TypeError, match="q must be float16"):
        kilat.attention(q.astype(np.int64), k.astype(np.int64), v.astype(np.int64))
    with pytest.raises(TypeError, match="q must have a dtype that torch has"):
        kilat.attention(q.astype(np.longdouble), k, v)
    with pytest.raises(ValueError, match="seqlens_kv must fit int32"):
        kilat.attention(q, k, v, seqlens_kv=np.array([2**40, 1]))
    with pytest.raises(TypeError, match="cache must hold either"):
        kilat.ContiguousCache(k, torch.from_numpy(v), np.zeros(2, np.int32))
    cache = kilat.ContiguousCache(k, v, np.zeros(2, np.int32))
    with pytest.raises(TypeError, match="a tensor and a cache of arrays"):
        kilat.cached_attention(torch.from_numpy(q), cache)
    with pytest.raises(TypeError, match="an array and a cache of tensors"):
        kilat.cached_attention(q, kilat.ContiguousCache(*(torch.from_numpy(x) for x in (k, v)), torch.zeros(2).int()))


def test_a_torch_bias_that_requires_grad_is_no_obstacle() -> None:
    bias = torch.zeros(5, 7, requires_grad=True)
    assert isinstance(kilat.attention(*make(), scores=(kilat.Bias(bias),), backend="reference"), np.ndarray)
