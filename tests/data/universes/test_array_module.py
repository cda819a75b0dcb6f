"""Tests of the generator's shared code on arrays with CuPy's rules.

They find GPU faults without a GPU: a function missing in CuPy, a host array mixed with device
arrays, a host function called on a device array. `Device` is a NumPy array that refuses all of
these, and a module of such functions replaces CuPy.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pydist.data import UniverseOptions
from pydist.data.universes.simulate import choose_array_module, simulate

KNOWN = (
    "arange asarray asnumpy bincount broadcast_to cbrt cos empty exp floor log log1p maximum ones "
    "ones_like sin sinc sqrt where zeros zeros_like"
).split()
"""Functions of CuPy that the generator may use; each was checked in CuPy's reference."""


class Device(np.ndarray):
    """Array on an imaginary device."""

    __module__ = "cupy"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        outputs = options.pop("out", ())
        check(*inputs, *outputs)
        if outputs:
            options["out"] = tuple(host(o) for o in outputs)
        result = getattr(ufunc, method)(*(host(i) for i in inputs), **options)
        return outputs[0] if outputs else device(result)

    def __array_function__(self, function: Callable[..., Any], *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a device array")

    def __setitem__(self, key: Any, value: Any) -> None:
        check(key, value)
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        check(key)
        return device(host(self)[host(key)])


def host(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Device) else value


def device(value: Any) -> Any:
    return np.asarray(value).view(Device)


def check(*values: Any) -> None:
    for value in values:
        if type(value) is np.ndarray:
            raise TypeError("a host array was mixed with device arrays")


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if function is not np.asarray:
            check(*args, *options.values())
        options = {name: host(value) for name, value in options.items()}
        return device(function(*(host(a) for a in args), **options))

    return call


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("cupy")
    for name in KNOWN:
        setattr(module, name, host if name == "asnumpy" else on_device(getattr(np, name)))
    module.fft = SimpleNamespace(rfftn=on_device(np.fft.rfftn), irfftn=on_device(np.fft.irfftn))
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 1))
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(
    "options",
    [
        {"transfer": "no-wiggle"},
        {"transfer": "full", "assignment": "cic", "dtype": "float32"},
        {"transfer": "bbks", "redshifts": (1.0,)},
    ],
)
def test_universe_from_a_device_equals_that_of_the_host(
    cupy: ModuleType, options: dict[str, Any]
) -> None:
    on_host = simulate(UniverseOptions(width=12, device="cpu", **options), 3)
    from_device = simulate(UniverseOptions(width=12, device="gpu", **options), 3)
    assert type(from_device) is np.ndarray
    np.testing.assert_array_equal(from_device, on_host)


def test_a_gpu_is_chosen_where_there_is_one(cupy: ModuleType) -> None:
    assert choose_array_module("auto") is cupy
    assert choose_array_module("cpu") is np
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert choose_array_module("auto") is np


def test_the_stand_in_refuses_what_cupy_refuses(cupy: ModuleType) -> None:
    array = cupy.arange(3)
    for wrong in (
        lambda: array + np.arange(3),
        lambda: np.concatenate([array, array]),
        lambda: cupy.sqrt(np.arange(3)),
        lambda: array[np.arange(3)],
    ):
        with pytest.raises(TypeError):
            wrong()


def test_memory_is_a_dozen_fields() -> None:
    """Memory is 10 live fields and the counts of 4 redshifts: 512^3 takes 6.5 GB."""
    options = UniverseOptions(width=96, box_width=96)
    tracemalloc.start()
    simulate(options, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # NumPy 1 transforms every input in double precision.
    fields = 13 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 18
    assert peak < fields * 4 * 96**3
