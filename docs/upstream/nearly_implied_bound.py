"""HiGHS: the wrong optimum of a model of three columns and two rows, by presolve.

Minimize ``p`` with ``k + m >= 1``, ``-p + k / 6 <= -0.25``, ``p`` in ``[0.25 + d, 1]``, `k` and `m`
binary. The optimum is ``0.25 + d`` with ``k = 0``. For `d` between a sixth of the feasibility
tolerance and the tolerance, HiGHS returns 0.41667 with ``k = 1``, as optimal.
"""

import highspy


def optimum(d: float, presolve: str) -> float:
    """Return what HiGHS calls the optimum."""
    highs, infinity = highspy.Highs(), highspy.kHighsInf
    highs.setOptionValue("output_flag", False)  # noqa: FBT003
    highs.setOptionValue("presolve", presolve)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = 3, 2
    model.col_cost_ = [1, 0, 0]
    model.col_lower_, model.col_upper_ = [0.25 + d, 0, 0], [1, 1, 1]
    model.row_lower_, model.row_upper_ = [1, -infinity], [infinity, -0.25]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = [0, 2, 4]
    model.a_matrix_.index_ = [1, 2, 0, 1]
    model.a_matrix_.value_ = [1, 1, -1, 1 / 6]
    kind = highspy.HighsVarType
    model.integrality_ = [kind.kContinuous, kind.kInteger, kind.kInteger]
    highs.passModel(model)
    highs.run()
    return float(highs.getInfo().objective_function_value)


if __name__ == "__main__":
    for d in (0, 1e-7, 2e-7, 5e-7, 9e-7, 1.1e-6):
        values = ", ".join(f"presolve {how} {optimum(d, how):.6f}" for how in ("choose", "off"))
        print(f"d = {d:.1e}: {values}")  # noqa: T201
