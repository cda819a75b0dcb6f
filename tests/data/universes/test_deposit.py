"""Tests of mass assignment: conservation, and known exact results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.data.universes.deposit import deposit
from pydist.errors import UsageError


def lattice(width: int) -> np.ndarray:
    return np.stack(np.meshgrid(*[np.arange(width, dtype=float)] * 3, indexing="ij"))


@pytest.mark.parametrize("assignment", ["ngp", "cic"])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_lattice_gives_one_everywhere(assignment: str, width: int) -> None:
    np.testing.assert_array_equal(deposit([lattice(width)], width, np, assignment), 1)


@pytest.mark.parametrize("assignment", ["ngp", "cic"])
def test_lattice_moved_by_whole_boxes_is_the_lattice(assignment: str) -> None:
    moved = lattice(6) + np.array([6.0, -12.0, 60.0]).reshape(3, 1, 1, 1)
    np.testing.assert_array_equal(deposit([moved], 6, np, assignment), 1)


def test_particle_on_a_corner_is_shared_by_eight_cells() -> None:
    found = deposit([np.array([[3.5], [0.5], [-0.5]])], 4, np, "cic")
    expected = np.zeros((4, 4, 4))
    expected[np.ix_([3, 0], [0, 1], [3, 0])] = 0.125
    np.testing.assert_array_equal(found, expected)


def test_cloud_weights_are_linear() -> None:
    found = deposit([np.array([[1.25], [2.0], [2.0]])], 4, np, "cic")
    assert (found[1, 2, 2], found[2, 2, 2]) == (0.75, 0.25)


@given(
    seed=st.integers(0, 1000),
    width=st.integers(2, 9),
    spread=st.floats(0, 30),
    assignment=st.sampled_from(["ngp", "cic"]),
)
def test_mass_is_conserved_and_slabs_do_not_matter(
    seed: int, width: int, spread: float, assignment: str
) -> None:
    noise = np.random.default_rng(seed).normal(scale=spread, size=(3, width, width, width))
    positions = lattice(width) + noise
    whole = deposit([positions], width, np, assignment)
    assert whole.sum() == pytest.approx(width**3, rel=1e-12)
    slabs = deposit((positions[:, i : i + 1] for i in range(width)), width, np, assignment)
    np.testing.assert_allclose(slabs, whole, atol=1e-12)


def test_nearest_grid_point_equals_a_plain_histogram() -> None:
    positions = np.random.default_rng(0).uniform(-20, 20, size=(3, 500))
    expected = np.zeros((7, 7, 7), int)
    for x, y, z in np.floor(positions.T + 0.5).astype(int) % 7:
        expected[x, y, z] += 1
    np.testing.assert_array_equal(deposit([positions], 7, np), expected)


def test_unknown_assignment_is_refused() -> None:
    with pytest.raises(UsageError, match="ngp, cic"):
        deposit([], 4, np, "tsc")
