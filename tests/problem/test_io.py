"""Files of user-defined constraints: their content, and all faults with their place."""

import pytest

from poetmodel.device import Costs
from poetmodel.errors import InputError
from poetmodel.graph import Graph, operation
from poetmodel.problem import USER_OBJECTIVE, Constraint, Problem
from poetmodel.problem.io import load_constraints


def graph():
    """Return a chain of three nodes; the name of one has characters of patterns."""
    nodes = [operation("conv1", output_bytes=100)]
    nodes.append(operation("conv2", output_bytes=60, inputs=("conv1",)))
    nodes.append(operation("pool[0]", output_bytes=40, inputs=("conv2",)))
    return Graph(name="net", nodes=tuple(nodes))


@pytest.fixture
def problem():
    """Return a problem with a pass of 6 s and 9 J; keep-all needs 160 B."""
    costs = Costs.from_arrays(graph(), compute_time_s=[1, 2, 3], compute_energy_j=[2, 3, 4])
    return Problem(graph(), costs, ram=200)


@pytest.fixture
def read(problem, tmp_path):
    """Return a function that reads the text of a file."""

    def load(text):
        path = tmp_path / "rows.toml"
        path.write_text(text)
        return load_constraints(path, problem)

    return load


@pytest.fixture
def faults(read, tmp_path):
    """Return a function that lists the faults of a text; all begin with the file's name."""

    def find(text):
        with pytest.raises(InputError) as caught:
            read(text)
        start = f"{tmp_path / 'rows.toml'}: "
        assert all(fault.startswith(start) for fault in caught.value.faults)
        return [fault.removeprefix(start) for fault in caught.value.faults]

    return find


def one(text):
    """Return a file with one constraint, called x."""
    return f'[[constraint]]\nname = "x"\n{text}\n'


@pytest.mark.parametrize(
    ("text", "terms", "lower", "upper"),
    [
        ("sum = {bytes_written = 1}\nat_most = 400", {"bytes_written": 1}, None, 400),
        ('sum = {"recomputations:conv1" = 1}\nequals = 0', {"recomputations:conv1": 1}, 0, 0),
        (
            'sum = {"recomputations:conv1" = 1, "recomputations:conv2" = -1}\nequals = 0',
            {"recomputations:conv1": 1, "recomputations:conv2": -1},
            0,
            0,
        ),
        (
            'sum = {"page_ins:conv*" = 2}\nat_least = 1\nat_most = 5',
            {"page_ins:conv1": 2, "page_ins:conv2": 2},
            1,
            5,
        ),
        (
            'sum = {"page_outs:*" = 1, "page_outs:conv1" = 0.5}\nat_most = 3',
            {"page_outs:conv1": 1.5, "page_outs:conv2": 1, "page_outs:pool[0]": 1},
            None,
            3,
        ),
        ('sum = {"page_outs:pool[0]" = 1}\nat_most = 0', {"page_outs:pool[0]": 1}, None, 0),
        ('sum = {"page_outs:?onv[2-9]" = 1}\nat_most = 0', {"page_outs:conv2": 1}, None, 0),
        (
            'sum = {"page_ins@2:conv*" = 1}\nat_most = 1',
            {"page_ins@2:conv1": 1, "page_ins@2:conv2": 1},
            None,
            1,
        ),
    ],
)
def test_a_sum_names_totals(read, text, terms, lower, upper):
    """A pattern stands for the sum over its matches; the name of a graph item is that item."""
    expected = Constraint(name="x", terms=terms, lower=lower, upper=upper)
    assert read(one(text)).constraints == (expected,)


@pytest.mark.parametrize(
    ("total", "amount", "upper"),
    [
        ("bytes_written", "0.4kB", 400),
        ("bytes_read", "50%", 80),
        ("compute_s", "7500ms", 7.5),
        ("transfer_s", "110%", 6.6),
        ("energy_j", "10mWh", 36),
        ("energy_j", "200%", 18),
    ],
)
def test_amounts_have_units(read, total, amount, upper):
    """Bytes, times and energies are written as in options; percentages likewise."""
    (row,) = read(one(f'sum = {{{total} = 1}}\nat_most = "{amount}"')).constraints
    assert row.upper == pytest.approx(upper, rel=1e-12)


def test_each_states_a_row_for_every_match(read):
    """The rows are named by their items; a constraint without a name is numbered."""
    text = "[[constraint]]\nsum = {bytes_read = 1}\nat_most = 9\n[[constraint]]\n"
    rows = read(text + 'each = "recomputations:conv*"\nat_most = 1').constraints
    assert [row.name for row in rows] == [
        "constraint 1",
        "constraint 2[conv1]",
        "constraint 2[conv2]",
    ]
    assert rows[2].to_dict() == {
        "name": "constraint 2[conv2]",
        "terms": {"recomputations:conv2": 1},
        "lower": None,
        "upper": 1,
    }


def test_an_objective_replaces_what_is_minimized(read):
    """Weights of totals, and a constant; without constraints, too."""
    problem = read("[objective]\nsum = {energy_j = 1, bytes_written = 2e-6, constant = 3}\n")
    assert problem.minimize == USER_OBJECTIVE
    assert dict(problem.user_objective) == {"energy_j": 1, "bytes_written": 2e-6, "constant": 3}


def test_rows_of_a_file_join_those_of_the_problem(read, tmp_path):
    """A second file adds to the first; a used name is refused."""
    text = one("sum = {bytes_read = 1}\nat_most = 9")
    path = tmp_path / "rows.toml"
    first = read(text)
    path.write_text(text)
    with pytest.raises(InputError, match="the problem already has the name 'x'"):
        load_constraints(path, first)
    path.write_text(text.replace('"x"', '"y"'))
    assert [row.name for row in load_constraints(path, first).constraints] == ["x", "y"]


PLACE = "constraint[0] ('x')"
AFTER = "\nat_most = 1"
FAULTS = {
    "empty": ("", "expected [[constraint]] or [objective], got neither"),
    "unknown table": ("[constraints]", "constraints: unknown key; did you mean constraint?"),
    "one table": (
        "[constraint]\nname = 1",
        "constraint: expected a list of tables, [[constraint]], got [constraint]",
    ),
    "no table": ("constraint = [3]", "constraint[0]: expected a table, got 3"),
    "no such stage": (
        one(f'sum = {{"page_ins@99:conv1" = 1}}{AFTER}'),
        f"{PLACE}.sum: 'page_ins@99:conv1': expected a stage after @, a number from 0 to 2",
    ),
    "at least in a stage": (
        one('sum = {"page_ins@1:conv1" = 1}\nat_least = 1'),
        "constraint 'x': a per-stage constraint can only have an upper limit, and no negative "
        "coefficients; a model of pm.build(problem, reductions=False) can state it",
    ),
    "unknown key": (
        one("sum = {bytes_read = 1}\nat_most = 3\nmost = 4"),
        f"{PLACE}.most: unknown key; did you mean at_most?",
    ),
    "no sum": (
        one("at_most = 3"),
        f"{PLACE}: expected sum = {{\"bytes_written\" = 1}} or each = 'recomputations:conv*', "
        "got neither",
    ),
    "sum and each": (
        one('sum = {bytes_read = 1}\neach = "page_ins:*"\nat_most = 3'),
        f"{PLACE}: expected sum = {{\"bytes_written\" = 1}} or each = 'recomputations:conv*', "
        "got both",
    ),
    "text for a sum": (
        one('sum = "bytes_read"' + AFTER),
        f"{PLACE}.sum: expected a table such as {{\"bytes_written\" = 1}}, got 'bytes_read'",
    ),
    "no total": (
        one("sum = {wear = 1}" + AFTER),
        f"{PLACE}.sum: 'wear': expected one of bytes_written, bytes_read, energy_j, compute_s, "
        "transfer_s, recomputations:NAME, page_ins:NAME, page_outs:NAME, resident:NAME, "
        "recomputations@STAGE:NAME, page_ins@STAGE:NAME",
    ),
    "no match": (
        one('sum = {"recomputations:bn*" = 1}' + AFTER),
        f"{PLACE}.sum: 'recomputations:bn*': no node of graph 'net' has this name",
    ),
    "weight": (
        one("sum = {bytes_read = true}" + AFTER),
        f"{PLACE}.sum: 'bytes_read': expected a finite number other than 0, got true",
    ),
    "each total": (
        one('each = "bytes_read"' + AFTER),
        f"{PLACE}.each: expected a pattern such as 'recomputations:conv*'; 'bytes_read' is one "
        "total: write sum = {bytes_read = 1}",
    ),
    "each list": (
        one("each = []" + AFTER),
        f"{PLACE}.each: expected a pattern such as 'recomputations:conv*', got a list",
    ),
    "no limit": (
        one("sum = {bytes_read = 1}"),
        f"{PLACE}: expected at_most, at_least or both, or equals alone; got none",
    ),
    "too many limits": (
        one("sum = {bytes_read = 1}\nequals = 1\nat_most = 2"),
        f"{PLACE}: expected at_most, at_least or both, or equals alone; got at_most and equals",
    ),
    "NaN limit": (
        one("sum = {bytes_read = 1}\nat_most = nan"),
        f"{PLACE}.at_most: expected a finite number, got nan",
    ),
    "limit without a unit": (
        one('sum = {"page_ins:*" = 1}\nat_most = "3kB"'),
        f"{PLACE}.at_most: expected a number, got '3kB': a sum has a unit only if all "
        "its terms are bytes, all are times, or all are energies",
    ),
    "wrong unit": (
        one('sum = {energy_j = 1}\nat_most = "3kB"'),
        f"{PLACE}.at_most: expected an energy such as 2.5J, 300mJ, 1.2Wh or 105%; '3kB' has the "
        "unit 'kB', which is none of uJ, mJ, J, kJ, mWh, Wh, nJ",
    ),
    "crossing limits": (
        one("sum = {bytes_read = 1}\nat_least = 5\nat_most = 3"),
        "constraint 'x': at least 5 and at most 3 contradict each other",
    ),
    "name": (
        "[[constraint]]\nname = 3\nsum = {bytes_read = 1}\nat_most = 3",
        "constraint[0].name: expected a non-empty string, got 3",
    ),
    "taken name": (
        one("sum = {bytes_read = 1}\nat_most = 3") * 2,
        "constraint[1] ('x').name: constraint[0] ('x') already has the name 'x'",
    ),
    "objective": ("objective = 3", "objective: expected a table, [objective], got 3"),
    "objective key": (
        "[objective]\nsum = {energy_j = 1}\nmaximize = true",
        "objective.maximize: unknown key; accepted are sum",
    ),
    "objective sum": (
        "[objective]",
        'objective.sum: expected a table such as {"bytes_written" = 1}, got nothing',
    ),
}


def test_sums_beyond_floats_and_endless_stages_are_faults(faults):
    """They are errors of the file, not of Python."""
    large = 10**308
    (sentence,) = faults(
        one(f'sum = {{"page_ins:conv1" = {large}, "page_ins:*" = {large}}}{AFTER}')
    )
    assert "the sum of its terms is too large" in sentence
    (sentence,) = faults(one(f'sum = {{"page_ins@{"9" * 5000}:conv1" = 1}}{AFTER}'))
    assert "stage" in sentence


def test_bound_is_checked_beside_another_fault_of_its_table(faults):
    """Only a sum with faults has no unit."""
    found = faults(one('nmae = "x"\nsum = {bytes_written = 1}\nat_most = "2foo"'))
    assert len(found) == 2


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named_with_their_place(case, faults):
    """One fault, one sentence."""
    text, sentence = FAULTS[case]
    assert faults(text) == [sentence]


def test_all_faults_are_named_at_once(faults):
    """Those of a constraint, and those of the next ones."""
    text = one("sum = {bytes_red = 1}\nat_most = inf\nfoo = 1") + "[[constraint]]\n"
    found = faults(text)
    assert [fault.partition(":")[0] for fault in found] == [
        f"{PLACE}.foo",
        f"{PLACE}.sum",
        f"{PLACE}.at_most",
        "constraint[1] ('constraint 2')",
        "constraint[1] ('constraint 2')",
    ]


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1" * 400, '"1e400 J"', "-1e999", '"' + "9" * 500 + 'kB"', "1979-05-27"]
)
def test_no_number_breaks_the_reader(value, faults):
    """Numbers beyond numbers are faults like others."""
    assert faults(one(f"sum = {{bytes_read = 1}}\nat_most = {value}"))
    assert faults(one(f"sum = {{bytes_read = {value}}}\nat_most = 1"))
