"""Pyomo models to arrays and back."""

import gc
import math

import pyomo.environ as pyo
import pytest
from pyomo.gdp import Disjunct, Disjunction

from kit.worked import chain_costs, training_chain
from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm
from poetmodel.errors import BackendError, ModelError
from poetmodel.model import build
from poetmodel.problem import Problem

INF = math.inf


@pytest.fixture
def model():
    """Return ``min x0 + 2 x1 + b``: reals x in 0..4, a binary b, no constraints."""
    model = pyo.ConcreteModel(name="mine")
    model.x = pyo.Var(range(3), bounds=(0, 4))
    model.b = pyo.Var(domain=pyo.Binary)
    model.cost = pyo.Objective(expr=model.x[0] + 2 * model.x[1] + model.b)
    return model


def test_a_row_of_fixed_columns_holds_within_rounding_errors(model):
    """0.1 + 0.2 differs from 0.3 by 6e-17; 0.1 + 0.2 differs from 0.4 by more than rounding."""
    model.x[2].fix(0.1 + 0.2)
    model.equal = pyo.Constraint(expr=model.x[2] == 0.3)
    assert compile_model(model).describe_contradiction() is None
    model.different = pyo.Constraint(expr=model.x[2] == 0.4)
    assert "different" in compile_model(model).describe_contradiction()


def test_columns_rows_and_costs(model):
    """Columns and rows are in the order of the model, with names, bounds, kinds and costs.

    Unused variables are omitted and listed as unused.
    """
    model.le = pyo.Constraint(expr=model.x[0] + 2 * model.x[1] <= 5)
    model.ge = pyo.Constraint(expr=model.x[1] - model.b >= -1)
    model.eq = pyo.Constraint(expr=3 * model.x[0] == 4 - model.b)
    form = compile_model(model)
    assert [form.column_name(j) for j in range(3)] == ["x[0]", "x[1]", "b"]
    assert [variable.name for variable in form.unused] == ["x[2]"]
    assert [form.row_name(i) for i in range(3)] == ["le", "ge", "eq"]
    assert form.matrix.toarray().tolist() == [[1, 2, 0], [0, 1, -1], [3, 0, 1]]
    assert form.row_lower.tolist() == [-INF, -1, 4]
    assert form.row_upper.tolist() == [5, INF, 4]
    assert form.objective.tolist() == [1, 2, 1]
    assert (form.offset, form.sense) == (0.0, MINIMIZE)
    assert (form.lower.tolist(), form.upper.tolist()) == ([0, 0, 0], [4, 4, 1])
    assert form.integer.tolist() == [False, False, True]


def test_range_is_one_row(model):
    """A range constraint is one row with two bounds and without a constant; other rows stay.

    An upper and a lower row of different constraints are not joined to a range.
    """
    model.before = pyo.Constraint(expr=model.x[0] <= 1)
    model.range = pyo.Constraint(expr=pyo.inequality(-3, model.x[0] + model.x[1] + 1, 5))
    model.low = pyo.Constraint(expr=model.x[1] >= 2)
    model.up = pyo.Constraint(expr=model.x[1] <= 3)
    model.cost.deactivate()
    model.gain = pyo.Objective(expr=7 - model.x[0], sense=pyo.maximize)
    form = compile_model(model)
    assert [form.row_name(i) for i in range(form.n_rows)] == ["before", "range", "low", "up"]
    assert form.row_lower.tolist() == [-INF, -4, 2, -INF]
    assert form.row_upper.tolist() == [1, 4, INF, 3]
    assert (form.sense, form.offset, form.objective.tolist()) == (MAXIMIZE, 7.0, [-1.0, 0.0])


def test_what_users_write(model):
    """Parameters, lists, blocks, expressions, skipped and deactivated rows are followed.

    A disjunction is linear once it has been transformed.
    """
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
    model.low, model.high = Disjunct(), Disjunct()
    model.low.c = pyo.Constraint(expr=model.x[0] <= 1)
    model.high.c = pyo.Constraint(expr=model.x[0] >= 3)
    model.either = Disjunction(expr=[model.low, model.high])
    pyo.TransformationFactory("gdp.bigm").apply_to(model)
    assert compile_model(model).integer.sum() == 4


def test_fixed_variables_become_constants(model):
    """They have no column; rows and objective carry their values, in a product too.

    A row that fixing has emptied is found to hold or not.
    """
    model.x[0].fix(3)
    model.c = pyo.Constraint(expr=model.x[0] + model.x[1] <= 5)
    model.product = pyo.Constraint(expr=model.x[0] * model.x[1] <= 3)
    model.empty = pyo.Constraint(expr=model.x[0] <= 3)
    form = compile_model(model)
    assert [form.column_name(j) for j in range(form.n_columns)] == ["x[1]", "b"]
    assert form.matrix.toarray()[:2].tolist() == [[1.0, 0.0], [3.0, 0.0]]
    assert (form.row_upper.tolist()[:2], form.offset) == ([2, 3], 3.0)
    assert form.describe_contradiction() is None
    model.x[0].fix(4)
    assert (
        compile_model(model).describe_contradiction()
        == "empty: is violated for all values of the variables"
    )


@pytest.mark.parametrize("cancel", [False, True])
def test_row_without_variables(model, *, cancel):
    """A constraint that no variable can help is infeasibility under its name."""
    model.p = pyo.Param(initialize=5.0, mutable=True)
    model.c = pyo.Constraint(expr=(model.x[0] - model.x[0] if cancel else 0) + model.p <= 1)
    form = compile_model(model)
    assert form.describe_contradiction() == "c: is violated for all values of the variables"
    assert form.n_columns == 0
    model.p.set_value(1.0)
    assert compile_model(model).describe_contradiction() is None


@pytest.mark.parametrize("formulation", ["compact", "paper"])
def test_rows_are_those_of_pyomos_own_compiler(formulation):
    """Columns, rows, coefficients and bounds equal those of Pyomo's standard form."""
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


def test_form_keeps_the_model_alive():
    """Names and variables survive when the caller drops the model."""

    def made():
        model = pyo.ConcreteModel()
        model.x = pyo.Var([7])
        model.cost = pyo.Objective(expr=model.x[7])
        return compile_model(model)

    form = made()
    gc.collect()
    assert form.column_name(0) == "x[7]"


def _curve(m):
    m.curve = pyo.Constraint([1, 2], rule=lambda m, i: m.x[0] * m.x[1] <= i)
    m.kink = pyo.Constraint(expr=abs(m.x[0]) <= 1)


def _disjunction(m):
    m.low, m.high = Disjunct(), Disjunct()
    m.either = Disjunction(expr=[m.low, m.high])


def _logic(m):
    m.flag = pyo.BooleanVar(range(2))
    m.logic = pyo.LogicalConstraint(expr=m.flag[0].implies(m.flag[1]))


STRANGER = pyo.ConcreteModel(name="stranger")
STRANGER.far = pyo.Var(bounds=(0, 1))


def _foreign(m):
    m.mixed = pyo.Constraint(expr=STRANGER.far + m.x[0] <= 1)


def _removed(m):
    m.gone = pyo.Var()
    m.mixed = pyo.Constraint(expr=m.gone + m.x[0] <= 1)
    m.del_component(m.gone)


def _gapped(domain):
    def spoil(m):
        m.stepped = pyo.Var(domain=domain)
        m.c = pyo.Constraint(expr=m.stepped + m.x[0] <= 9)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_curve, r"curve\[1\], curve\[2\], kink: is not linear"),
        (lambda m: m.cost.set_value(m.x[0] ** 2), "cost: is not linear"),
        (
            lambda m: m.add_component("special", pyo.SOSConstraint(var=m.x, sos=1)),
            "special: SOSConstraint is not linear",
        ),
        (_disjunction, "either: Disjunction is not linear; apply .*gdp.bigm"),
        (_logic, "logic: LogicalConstraint is not linear; apply .*logical_to_linear"),
        (lambda m: m.cost.deactivate(), "'mine': expected one active objective, got 0;"),
        (
            lambda m: m.add_component("second", pyo.Objective(expr=m.x[0])),
            r"expected one active objective, got 2 \(cost, second\)",
        ),
        (_foreign, "far: belongs to another model"),
        (_removed, "gone: belongs to another model, or to none"),
        (_gapped(pyo.RangeSet(0, 10, 5)), "stepped: the domain is neither"),
        (_gapped(pyo.RangeSet(0.5, 3.5, 1)), "stepped: the domain is neither"),
        (_gapped(pyo.Set(initialize=[1, 2, 7])), "stepped: the domain is neither"),
        (lambda m: m.x[1].fix(), r"x\[1\]: is fixed but has no value"),
        (
            lambda m: m.add_component("c", pyo.Constraint(expr=math.nan * m.x[0] + m.x[1] <= 1)),
            r"c: the coefficient of x\[0\] is not finite",
        ),
    ],
)
def test_refused(model, spoil, said):
    """Expressions that no linear solver supports are refused; the error names them and a remedy."""
    spoil(model)
    with pytest.raises(ModelError, match=said):
        compile_model(model)


def test_parameter_without_a_value(model, caplog):
    """A parameter that was never set is named, on one line; of many faults the first ones."""
    model.p = pyo.Param(mutable=True)
    model.c = pyo.Constraint(expr=model.p * model.x[0] <= 1)
    with (
        caplog.at_level("CRITICAL"),
        pytest.raises(ModelError, match=r"'mine': .*\(p\): The") as caught,
    ):
        compile_model(model)
    assert "\n" not in str(caught.value)
    model.c.deactivate()
    model.curve = pyo.Constraint(range(25), rule=lambda m, i: m.x[0] * m.x[1] <= i)
    with pytest.raises(ModelError, match=r"curve\[9\] and 15 more: is not linear"):
        compile_model(model)


def test_integer_domains(model):
    """Domains that are all whole numbers or all reals of an interval are supported."""
    domains = [pyo.NegativeIntegers, pyo.RangeSet(1, 10), pyo.UnitInterval, pyo.RangeSet(0, 3, 0)]
    model.y = pyo.Var(range(4), domain=lambda _, i: domains[i])
    model.c = pyo.Constraint(expr=sum(model.y[i] for i in range(4)) <= 5)
    form = compile_model(model)
    at = {form.column_name(j): j for j in range(form.n_columns)}
    found = [
        (form.lower[j], form.upper[j], form.integer[j]) for j in (at[f"y[{i}]"] for i in range(4))
    ]
    assert found == [(-INF, -1, True), (1, 10, True), (0, 1, False), (0, 3, False)]


def test_load_values_writes_back(model):
    """Values are assigned to their variables, integers as integers; fractions of them are refused.

    A form of arrays has no variables.
    """
    form = compile_model(model)
    load_values(form, [1.5, 0.0, 0.9999999])
    assert (model.x[0].value, model.x[1].value, model.b.value) == (1.5, 0.0, 1)
    assert isinstance(model.b.value, int)
    assert pyo.value(model.cost) == form.objective_value([1.5, 0.0, 1.0])
    with pytest.raises(BackendError, match="b must be whole"):
        load_values(form, [1.0, 1.0, 0.5])
    assert (model.x[0].value, model.b.value) == (1.5, 1)
    with pytest.raises(ModelError, match="made from arrays"):
        load_values(StandardForm.from_arrays([[1.0]], [1.0]), [1.0])


def test_load_values_gives_unused_variables_an_allowed_value():
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
