"""HiGHS: the wrong optimum of a model of seven binaries and seven rows, because of a tiny cost.

One cost is 1.9e-11, two are -234 and -149. With default options HiGHS returns -234 as optimal; the
optimum is -383. Costs of 0, or above 1e-7 in place of 1.9e-11, give -383.
"""

import highspy

ROWS = [
    ([-1, 1, -1, 0, -1, 0, 0], 0),
    ([0, -1, 0, -1, 0, -1, 0], -1),
    ([0, 0, 1, 0, 0, 0, -1], 0),
    ([0, 0, 1, 0, 1, 0, 0], 1),
    ([0, 0, 0, 1, 0, 1, 0], 1),
    ([1, 0, 1, 0, 1, 7 / 11, 0], 57 / 22),
    ([0, 1, 0, 7 / 23, 0, 7 / 23, 0], 57 / 46),
]
"""Coefficients, and the upper limit of their sum."""


def optimum(cost: float, presolve: str) -> float:
    """Return what HiGHS calls the optimum."""
    highs, infinity = highspy.Highs(), highspy.kHighsInf
    highs.setOptionValue("output_flag", False)  # noqa: FBT003
    highs.setOptionValue("presolve", presolve)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = 7, len(ROWS)
    model.col_cost_ = [-cost, 0, -234.04255319144406, -148.93617021273712, 0, 0, 0]
    model.col_lower_, model.col_upper_ = [0] * 7, [1] * 7
    model.row_lower_, model.row_upper_ = [-infinity] * len(ROWS), [most for _, most in ROWS]
    entries = [[(j, value) for j, value in enumerate(row) if value] for row, _ in ROWS]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = [sum(map(len, entries[:r])) for r in range(len(ROWS) + 1)]
    model.a_matrix_.index_ = [j for row in entries for j, _ in row]
    model.a_matrix_.value_ = [value for row in entries for _, value in row]
    model.integrality_ = [highspy.HighsVarType.kInteger] * 7
    highs.passModel(model)
    highs.run()
    return float(highs.getInfo().objective_function_value)


if __name__ == "__main__":
    for cost in (0, 1.935095110154792e-11, 1e-9, 9e-8, 1.1e-7, 1e-6):
        values = ", ".join(f"presolve {how} {optimum(cost, how):.4f}" for how in ("choose", "off"))
        print(f"cost {cost:.1e}: {values}")  # noqa: T201
