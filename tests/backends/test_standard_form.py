"""Forms of arrays: shapes, bounds, contradictions, rounding."""

import numpy as np
import pytest
from scipy.sparse import coo_array

from poetmodel.backends.standard_form import MAXIMIZE, StandardForm, round_integers
from poetmodel.errors import BackendError, ModelError

INF = np.inf


def form(**changes):
    """Return ``min x + 2 y + 3`` over ``1 <= x + y <= 4``, x integer in 0..3, y in 0..2.5."""
    fields = {
        "upper": [3.0, 2.5],
        "row_lower": 1.0,
        "row_upper": 4.0,
        "integer": [True, False],
        "offset": 3.0,
    }
    return StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], **fields | changes)


def test_sizes_and_defaults():
    """Sizes follow the matrix; single values apply to all; columns and rows may have names.

    Duplicates are summed, zeros dropped, indices sorted; a form is immutable.
    """
    made = StandardForm.from_arrays(np.ones((3, 2)), [1.0, 2.0])
    assert (made.n_rows, made.n_columns, made.is_mip) == (3, 2, False)
    assert made.lower.tolist() == [0.0, 0.0]
    assert made.upper.tolist() == [INF, INF]
    assert made.row_lower.tolist() == [-INF] * 3
    assert (list(made.columns), list(made.rows)) == ([0, 1], [0, 1, 2])
    assert (made.column_name(1), made.row_name(2)) == ("column 1", "row 2")
    assert made.model is None
    made = form(rows=["memory"], columns=["x", "y"])
    assert (made.row_name(0), made.column_name(1)) == ("memory", "y")
    matrix = coo_array(([1.0, 2.0, 5.0, 0.0], ([0, 0, 0, 0], [1, 1, 0, 2])), shape=(1, 3))
    made = StandardForm.from_arrays(matrix, np.zeros(3)).matrix
    assert made.indices.tolist() == [0, 1]
    assert made.data.tolist() == [5.0, 3.0]
    costs = np.array([1.0, 2.0])
    made = StandardForm.from_arrays([[1.0, 1.0]], costs)
    costs[0] = 9.0
    assert made.objective[0] == 1.0
    for array in (made.objective, made.lower, made.row_upper, made.integer, made.matrix.data):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_value_and_violation():
    """The objective includes the constant; the violation is the maximum of all parts.

    Fractional bounds of integers are tightened, rounding errors tolerated, reals unchanged. The
    relaxation differs only in integrality.
    """
    made = form()
    assert made.objective_value([1.0, 0.5]) == 5.0
    for x, violation in (
        ([1.0, 0.5], 0.0),
        ([0.0, 0.25], 0.75),  # row below 1
        ([3.0, 2.0], 1.0),  # row above 4
        ([2.25, 0.0], 0.25),  # x is an integer
        ([-2.0, 4.0], 2.0),  # x below 0, worse than y above 2.5
    ):
        assert made.max_violation(x) == violation
    assert StandardForm.from_arrays(np.zeros((0, 0)), []).max_violation([]) == 0.0
    made = form(lower=[0.2, 0.2], upper=[2.9999999999, 2.9])
    assert made.lower.tolist() == [1.0, 0.2]
    assert made.upper.tolist() == [3.0, 2.9]
    relaxed = form().linear_relaxation()
    assert not relaxed.is_mip
    assert relaxed.max_violation([2.5, 0.0]) == 0.0
    assert relaxed.matrix is not None
    assert form().is_mip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lower": [2.0, 3.0]}, "column 1: no value is between 3.0 and 2.5"),
        ({"row_lower": 4.5}, "row 0: no value is between 4.5 and 4.0"),
        ({"lower": [0.1, 0.0], "upper": [0.9, 1.0]}, "column 0: no value is between 1.0 and 0.0"),
    ],
)
def test_contradiction_is_named(changes, said):
    """A column or row without a feasible value is found without a solver."""
    assert form(**changes).describe_contradiction() == said


def test_contradiction_of_an_empty_row():
    """A row without coefficients is satisfied or not; bounds that differ by rounding are equal."""
    matrix = [[1.0], [0.0]]
    assert (
        StandardForm.from_arrays(matrix, [1.0], row_upper=[1.0, 0.0]).describe_contradiction()
        is None
    )
    broken = StandardForm.from_arrays(matrix, [1.0], row_upper=[1.0, -0.5])
    assert broken.describe_contradiction() == "row 1: is violated for all values of the variables"
    made = form(row_lower=0.1 + 0.2, row_upper=0.3)
    assert made.describe_contradiction() is None
    assert made.row_lower[0] == made.row_upper[0]


@pytest.mark.parametrize(
    ("changes", "bounded"),
    [
        ({}, True),
        ({"upper": INF}, True),  # costs are positive, lower bounds are 0
        ({"lower": [-INF, 0.0]}, False),
        ({"upper": INF, "sense": MAXIMIZE}, False),
        ({"lower": -INF, "sense": MAXIMIZE}, True),
    ],
)
def test_is_bounded(changes, *, bounded):
    """Whether the objective is bounded follows from column bounds in the direction of the costs."""
    assert form(**changes).is_bounded() is bounded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"upper": [1.0, 1.0, 1.0]}, "upper: expected 2 values, got 3"),
        ({"row_lower": [1.0, 1.0]}, "row_lower: expected 1 values, got 2"),
        ({"integer": [True]}, "integer: expected 2 values, got 1"),
        ({"rows": ["a", "b"]}, "rows: expected 1 of them, got 2"),
        ({"columns": ["a"]}, "columns: expected 2 of them, got 1"),
        ({"sense": 0}, "sense: expected 1"),
        ({"offset": np.nan}, "objective: the constant is nan"),
        ({"lower": [np.nan, 0.0]}, "column 0: bounds nan and 3.0 are not usable"),
        ({"row_upper": -INF}, "row 0: bounds 1.0 and -inf are not usable"),
    ],
)
def test_malformed_is_refused(changes, said):
    """Arrays that do not fit, and numbers that are none, are named."""
    with pytest.raises(ModelError, match=said):
        form(**changes)


def test_wild_coefficients_are_named():
    """Coefficients and costs have to be finite; there is one cost per column."""
    with pytest.raises(ModelError) as caught:
        StandardForm.from_arrays([[1.0, np.nan], [np.inf, 1.0]], [1.0, np.inf])
    assert caught.value.faults == (
        "row 0: the coefficient of column 1 is not finite",
        "row 1: the coefficient of column 0 is not finite",
        "objective: the coefficient of column 1 is not finite",
    )
    with pytest.raises(ModelError, match="objective: expected 2 values, got 3"):
        StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0, 3.0])


def test_round_binaries_rounds_integers_only():
    """Integers within tolerance become whole, reals stay, and no zero is negative."""
    rounded = round_integers([0.999999, 0.4], form())
    assert rounded.tolist() == [1.0, 0.4]
    assert np.signbit(round_integers([-1e-7, 0.4], form())[0]) == np.False_
    with pytest.raises(ValueError, match="read-only"):
        rounded[0] = 0.0


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([0.9999, 0.4], "column 0 must be whole within 1e-05, got 0.9999"),
        ([0.5, 0.4], "must be whole"),
        ([np.nan, 0.4], "column 0 has the value nan"),
        ([1.0, INF], "column 1 has the value inf"),
        ([1.0], "expected 2 values, one per column, got 1"),
    ],
)
def test_round_binaries_refuses(x, said):
    """A value that is not near a whole number is an error and never rounded."""
    with pytest.raises(BackendError, match=said):
        round_integers(x, form())
