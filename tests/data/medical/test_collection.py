"""Tests of the types that a collection's images are stored in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pydist.data.medical.collection import as_stored
from pydist.errors import DataError


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
def test_values_are_rounded_to_integers_or_do_not_fit(dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    found = as_stored(np.array([0.6, 99.5, 2.0]), dtype, "x")
    assert found.dtype == dtype
    assert found.tolist() == [1, 100, 2]
    with pytest.raises(DataError, match=rf"x: NaN at \(1,\), which {dtype} does not have, as told"):
        as_stored(np.array([1.0, math.nan]), dtype, "x", ", as told")
    for value in (low - 1.0, 2.0 * high, math.inf):
        if value < low or not value <= high:  # -2**63 - 1 is -2**63 in float64
            with pytest.raises(DataError, match=f"x: values from .* do not fit {dtype}, as told"):
                as_stored(np.array([1.0, value]), dtype, "x", ", as told")
    narrow = np.array([low, high], dtype)
    assert as_stored(narrow, dtype, "x") is narrow


def test_floating_point_numbers_stay_as_they_are():
    np.testing.assert_array_equal(as_stored(np.array([0.5, -3]), "float32", "x"), [0.5, -3])
