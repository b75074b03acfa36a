"""Pyomo models to arrays and back."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo
import pytest
from pyomo.gdp import Disjunct, Disjunction

from kit.worked import chain_costs, training_chain
from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm
from poetmodel.errors import BackendError, ModelError
from poetmodel.model import build
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

INF = math.inf


@pytest.fixture
def model() -> pyo.ConcreteModel:
    """Return ``min x0 + 2 x1 + b``: reals x in 0..4, a binary b, no constraints."""
    model = pyo.ConcreteModel(name="mine")
    model.x = pyo.Var(range(3), bounds=(0, 4))
    model.b = pyo.Var(domain=pyo.Binary)
    model.cost = pyo.Objective(expr=model.x[0] + 2 * model.x[1] + model.b)
    return model


def test_columns_rows_and_costs(model: pyo.ConcreteModel) -> None:
    """Columns and rows come in the model's order, with names, bounds, sides, kinds and costs."""
    model.le = pyo.Constraint(expr=model.x[0] + 2 * model.x[1] <= 5)
    model.ge = pyo.Constraint(expr=model.x[1] - model.b >= -1)
    model.eq = pyo.Constraint(expr=3 * model.x[0] == 4 - model.b)
    form = compile_model(model)
    assert [form.column_name(j) for j in range(3)] == ["x[0]", "x[1]", "b"]
    assert [form.row_name(i) for i in range(3)] == ["le", "ge", "eq"]
    assert form.matrix.toarray().tolist() == [[1, 2, 0], [0, 1, -1], [3, 0, 1]]
    assert form.row_lower.tolist() == [-INF, -1, 4]
    assert form.row_upper.tolist() == [5, INF, 4]
    assert form.objective.tolist() == [1, 2, 1]
    assert (form.offset, form.sense) == (0.0, MINIMIZE)
    assert (form.lower.tolist(), form.upper.tolist()) == ([0, 0, 0], [4, 4, 1])
    assert form.integer.tolist() == [False, False, True]


def test_maximisation_and_constant(model: pyo.ConcreteModel) -> None:
    """The sense and the constant of the objective are the model's own."""
    model.cost.deactivate()
    model.gain = pyo.Objective(expr=7 - model.x[0], sense=pyo.maximize)
    form = compile_model(model)
    assert (form.sense, form.offset, form.objective.tolist()) == (MAXIMIZE, 7.0, [-1.0])


def test_range_is_one_row(model: pyo.ConcreteModel) -> None:
    """A range constraint is one row with two sides, its constant folded, its neighbours intact."""
    model.before = pyo.Constraint(expr=model.x[0] <= 1)
    model.range = pyo.Constraint(expr=pyo.inequality(-3, model.x[0] + model.x[1] + 1, 5))
    model.after = pyo.Constraint(expr=model.x[1] >= 2)
    form = compile_model(model)
    assert [form.row_name(i) for i in range(form.n_rows)] == ["before", "range", "after"]
    assert form.row_lower.tolist() == [-INF, -4, 2]
    assert form.row_upper.tolist() == [1, 4, INF]


def test_two_rows_of_one_kind_stay_two(model: pyo.ConcreteModel) -> None:
    """An upper and a lower row of different constraints are not taken for a range."""
    model.up = pyo.Constraint(expr=model.x[0] + model.x[1] <= 5)
    model.low = pyo.Constraint(expr=model.x[0] + model.x[1] >= 1)
    assert compile_model(model).n_rows == 2


def test_what_users_write(model: pyo.ConcreteModel) -> None:
    """Mutable parameters, lists, blocks, expressions, skipped and deactivated rows are followed."""
    model.p = pyo.Param(initialize=2.0, mutable=True)
    model.e = pyo.Expression(expr=model.p * model.x[0] + model.b)
    model.rows = pyo.ConstraintList()
    model.rows.add(model.e <= 3)
    model.rows.add(model.x[1] <= 3)
    model.rows[2].deactivate()
    model.some = pyo.Constraint(
        [1, 2], rule=lambda m, i: pyo.Constraint.Skip if i == 1 else m.x[0] >= i
    )
    model.own = pyo.Block()
    model.own.y = pyo.Var(domain=pyo.Integers, bounds=(-1.5, 1.5))
    model.own.link = pyo.Constraint(expr=model.own.y <= model.x[1])
    form = compile_model(model)
    names = [form.row_name(i) for i in range(form.n_rows)]
    assert names == ["rows[1]", "some[2]", "own.link"]
    assert form.matrix.toarray()[0].tolist() == [2, 0, 1, 0]
    assert (form.lower[3], form.upper[3]) == (-1, 1)
    model.p.set_value(5.0)
    assert compile_model(model).matrix.toarray()[0].tolist() == [5, 0, 1, 0]


def test_transformed_disjunction(model: pyo.ConcreteModel) -> None:
    """A disjunction is linear once it has been transformed."""
    model.low, model.high = Disjunct(), Disjunct()
    model.low.c = pyo.Constraint(expr=model.x[0] <= 1)
    model.high.c = pyo.Constraint(expr=model.x[0] >= 3)
    model.either = Disjunction(expr=[model.low, model.high])
    pyo.TransformationFactory("gdp.bigm").apply_to(model)
    assert compile_model(model).integer.sum() == 3


def test_fixed_variables_become_constants(model: pyo.ConcreteModel) -> None:
    """Fixed variables have no column; rows and objective carry their values."""
    model.x[0].fix(3)
    model.c = pyo.Constraint(expr=model.x[0] + model.x[1] <= 5)
    form = compile_model(model)
    assert [form.column_name(j) for j in range(form.n_columns)] == ["x[1]", "b"]
    assert (form.row_upper.tolist(), form.offset) == ([2], 3.0)


def test_fixed_variable_may_multiply_another(model: pyo.ConcreteModel) -> None:
    """A fixed variable is a number, in a product too."""
    model.x[0].fix(2.0)
    model.product = pyo.Constraint(expr=model.x[0] * model.x[1] <= 3)
    assert compile_model(model).matrix.toarray().tolist() == [[2.0, 0.0]]


def test_row_of_fixed_variables_only(model: pyo.ConcreteModel) -> None:
    """A row that fixing has emptied is found to hold or not."""
    model.x[0].fix(3)
    model.c = pyo.Constraint(expr=model.x[0] <= 3)
    assert compile_model(model).contradiction() is None
    model.x[0].fix(4)
    assert compile_model(model).contradiction() == "c: is violated whatever the variables are"


@pytest.mark.parametrize("cancel", [False, True])
def test_row_without_variables(model: pyo.ConcreteModel, *, cancel: bool) -> None:
    """A constraint that no variable can help is infeasibility under its name."""
    model.p = pyo.Param(initialize=5.0, mutable=True)
    model.c = pyo.Constraint(expr=(model.x[0] - model.x[0] if cancel else 0) + model.p <= 1)
    form = compile_model(model)
    assert form.contradiction() == "c: is violated whatever the variables are"
    assert form.n_columns == 0
    model.p.set_value(1.0)
    assert compile_model(model).contradiction() is None


def test_unused_variables_have_no_column(model: pyo.ConcreteModel) -> None:
    """Variables that nothing mentions are left out, and known to be."""
    form = compile_model(model)
    assert form.n_columns == 3
    assert [variable.name for variable in form.unused] == ["x[2]"]


@pytest.mark.parametrize("formulation", ["compact", "paper"])
def test_rows_are_those_of_pyomos_own_compiler(formulation: str) -> None:
    """Columns, rows, coefficients and sides are what Pyomo's standard form gives."""
    from pyomo.repn.plugins.standard_form import LinearStandardFormCompiler

    graph = training_chain([3] * 5)
    problem = Problem(graph, chain_costs(graph), ram="80%", deadline_counts="serial")
    model = build(problem, formulation)
    model.more = pyo.Constraint(expr=pyo.inequality(1, 2 + sum(model.M_out.values()) * 3, 20))
    form = compile_model(model)
    own = LinearStandardFormCompiler().write(model, mixed_form=True, set_sense=None)
    assert [id(variable) for variable in form.columns] == [id(column) for column in own.columns]
    matrix, sides = own.A.tocsr(), {}
    for place, (row, side) in enumerate(zip(own.rows, own.rhs, strict=True)):
        low, up, _ = sides.get(row.constraint.name, (-INF, INF, 0))
        low = side if row.bound_type <= 0 else low
        up = side if row.bound_type >= 0 else up
        sides[row.constraint.name] = (low, up, place)
    assert [row.name for row in form.rows] == list(sides)
    assert form.row_lower.tolist() == [low for low, _, _ in sides.values()]
    assert form.row_upper.tolist() == [up for _, up, _ in sides.values()]
    assert (form.matrix != matrix[[place for _, _, place in sides.values()]]).nnz == 0
    assert form.objective.tolist() == own.c.toarray().reshape(-1).tolist()
    assert form.offset == own.c_offset[0]


def test_order_is_reproducible(model: pyo.ConcreteModel) -> None:
    """Compiling twice gives the same arrays."""
    model.c = pyo.Constraint([0, 1], rule=lambda m, i: m.x[2 - i] + m.b >= i)
    first, second = compile_model(model), compile_model(model)
    assert [v.name for v in first.columns] == [v.name for v in second.columns]
    assert (first.matrix != second.matrix).nnz == 0


def test_form_keeps_the_model_alive() -> None:
    """Names and variables survive when the caller drops the model."""

    def made() -> Any:
        model = pyo.ConcreteModel()
        model.x = pyo.Var([7])
        model.cost = pyo.Objective(expr=model.x[7])
        return compile_model(model)

    form = made()
    gc.collect()
    assert form.column_name(0) == "x[7]"


def _curve(m: Any) -> None:
    m.curve = pyo.Constraint([1, 2], rule=lambda m, i: m.x[0] * m.x[1] <= i)
    m.kink = pyo.Constraint(expr=abs(m.x[0]) <= 1)


def _curved_cost(m: Any) -> None:
    m.cost.set_value(m.x[0] ** 2)


def _sos(m: Any) -> None:
    m.special = pyo.SOSConstraint(var=m.x, sos=1)


def _disjunction(m: Any) -> None:
    m.low, m.high = Disjunct(), Disjunct()
    m.either = Disjunction(expr=[m.low, m.high])


def _logic(m: Any) -> None:
    m.flag = pyo.BooleanVar(range(2))
    m.logic = pyo.LogicalConstraint(expr=m.flag[0].implies(m.flag[1]))


STRANGER = pyo.ConcreteModel(name="stranger")
STRANGER.far = pyo.Var(bounds=(0, 1))


def _foreign(m: Any) -> None:
    m.mixed = pyo.Constraint(expr=STRANGER.far + m.x[0] <= 1)


def _removed(m: Any) -> None:
    m.gone = pyo.Var()
    m.mixed = pyo.Constraint(expr=m.gone + m.x[0] <= 1)
    m.del_component(m.gone)


def _step(m: Any) -> None:
    m.stepped = pyo.Var(domain=pyo.RangeSet(0, 10, 5))
    m.c = pyo.Constraint(expr=m.stepped + m.x[0] <= 9)


def _half(m: Any) -> None:
    m.stepped = pyo.Var(domain=pyo.RangeSet(0.5, 3.5, 1))
    m.c = pyo.Constraint(expr=m.stepped + m.x[0] <= 9)


def _values(m: Any) -> None:
    m.stepped = pyo.Var(domain=pyo.Set(initialize=[1, 2, 7]))
    m.c = pyo.Constraint(expr=m.stepped + m.x[0] <= 9)


def _no_value(m: Any) -> None:
    m.x[1].fix()


def _not_finite(m: Any) -> None:
    m.c = pyo.Constraint(expr=math.nan * m.x[0] + m.x[1] <= 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_curve, r"curve\[1\], curve\[2\], kink: is not linear"),
        (_curved_cost, "cost: is not linear"),
        (_sos, "special: SOSConstraint is not linear; write it with binary variables"),
        (_disjunction, "either: Disjunction is not linear; apply .*gdp.bigm"),
        (_logic, "logic: LogicalConstraint is not linear; apply .*logical_to_linear"),
        (lambda m: m.cost.deactivate(), "'mine': expected one active objective, got 0;"),
        (
            lambda m: m.add_component("second", pyo.Objective(expr=m.x[0])),
            r"expected one active objective, got 2 \(cost, second\)",
        ),
        (_foreign, "far: belongs to another model"),
        (_removed, "gone: belongs to another model, or to none"),
        (_step, "stepped: the domain has gaps"),
        (_half, "stepped: the domain has gaps"),
        (_values, "stepped: the domain has gaps"),
        (_no_value, r"x\[1\]: is fixed but has no value"),
        (_not_finite, r"c: the coefficient of x\[0\] is not finite"),
    ],
)
def test_refused(model: pyo.ConcreteModel, spoil: Callable[[Any], None], said: str) -> None:
    """What no linear solver can take is refused by name, with the way out."""
    spoil(model)
    with pytest.raises(ModelError, match=said):
        compile_model(model)


def test_parameter_without_a_value(
    model: pyo.ConcreteModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter that was never set is named, on one line."""
    model.p = pyo.Param(mutable=True)
    model.c = pyo.Constraint(expr=model.p * model.x[0] <= 1)
    with (
        caplog.at_level("CRITICAL"),
        pytest.raises(ModelError, match=r"'mine': .*\(p\): The") as caught,
    ):
        compile_model(model)
    assert "\n" not in str(caught.value)


def test_many_faults_are_counted(model: pyo.ConcreteModel) -> None:
    """A long list of faults names the first ones and counts the rest."""
    model.curve = pyo.Constraint(range(25), rule=lambda m, i: m.x[0] * m.x[1] <= i)
    with pytest.raises(ModelError, match=r"curve\[9\] and 15 more: is not linear"):
        compile_model(model)


def test_integer_domains(model: pyo.ConcreteModel) -> None:
    """Domains that are all whole numbers or all reals of an interval are taken as they are."""
    domains = [pyo.NegativeIntegers, pyo.RangeSet(1, 10), pyo.UnitInterval, pyo.RangeSet(0, 3, 0)]
    model.y = pyo.Var(range(4), domain=lambda _, i: domains[i])
    model.c = pyo.Constraint(expr=sum(model.y[i] for i in range(4)) <= 5)
    form = compile_model(model)
    at = {form.column_name(j): j for j in range(form.n_columns)}
    found = [
        (form.lower[j], form.upper[j], form.integer[j]) for j in (at[f"y[{i}]"] for i in range(4))
    ]
    assert found == [(-INF, -1, True), (1, 10, True), (0, 1, False), (0, 3, False)]


def test_load_values_writes_back(model: pyo.ConcreteModel) -> None:
    """Values go to their variables, integers as integers."""
    form = compile_model(model)
    load_values(form, [1.5, 0.0, 0.9999999])
    assert (model.x[0].value, model.x[1].value, model.b.value) == (1.5, 0.0, 1)
    assert isinstance(model.b.value, int)
    assert pyo.value(model.cost) == form.value([1.5, 0.0, 1.0])


def test_load_values_gives_unused_variables_an_allowed_value() -> None:
    """Variables without a column keep an allowed value, and else get the one nearest to 0."""
    model = pyo.ConcreteModel()
    model.cost = pyo.Objective(expr=0.0)
    model.kept = pyo.Var(bounds=(0, 4), initialize=2.5)
    model.reset = pyo.Var(bounds=(3, 4), initialize=2.5)
    model.empty = pyo.Var(bounds=(None, -1.5))
    model.whole = pyo.Var(domain=pyo.Integers, bounds=(-3.5, -1.5))
    model.rounded = pyo.Var(domain=pyo.Integers, bounds=(0, 4), initialize=2.5)
    model.free = pyo.Var()
    model.fixed = pyo.Var(initialize=9.0)
    model.fixed.fix()
    load_values(compile_model(model), [])
    values = [variable.value for variable in model.component_data_objects(pyo.Var)]
    assert values == [2.5, 3, -1.5, -2, 0, 0, 9.0]


def test_load_values_checks_integers(model: pyo.ConcreteModel) -> None:
    """A solution that is not whole is not loaded."""
    form = compile_model(model)
    with pytest.raises(BackendError, match="b must be whole"):
        load_values(form, [1.0, 1.0, 0.5])
    assert model.b.value is None


def test_load_values_needs_a_model() -> None:
    """A form of arrays has no variables to load."""
    form = StandardForm.from_arrays([[1.0]], [1.0])
    with pytest.raises(ModelError, match="made of arrays"):
        load_values(form, [1.0])
