"""User-defined methods: how they are found, and that their results are verified."""

import sys

import pytest

import poetmodel as pm
from kit.commands import invoke
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import method, own, recompute_once, run
from poetmodel.errors import InputError, MethodNotApplicableError, UserMethodError
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all

MINE = '''"""Methods of a researcher."""

import neighbour
from poetmodel import Schedule
from poetmodel.baselines import recompute_once
from poetmodel.errors import MethodNotApplicableError


def half(problem):
    """Save every second tensor of the graph."""
    print("what a method prints")
    return recompute_once(problem.graph, range(0, len(problem.graph.tensors), neighbour.STEP))


def raises(problem):
    return inner({})


def inner(found):
    return found["absent"]


def number(problem):
    return 3


def broken(problem):
    return Schedule(R=((0, 0),))


def outside(problem):
    return Schedule(R=((0, 9_999),))


def pairs(problem):
    return Schedule(R=((0, 0, 0),))


def reason(problem):
    raise MethodNotApplicableError("it needs a full moon")


VALUE = 3


def leaves(problem):
    raise SystemExit(3)


def two(problem, more):
    return None


async def later(problem):
    return None
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a file of methods, which imports one beside it."""
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("STEP = 2\n", encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """Let no test leave a method behind."""
    monkeypatch.setattr(own, "_registered_methods", {})


def problem_of(ram="90%"):
    """Return a problem over a chain of six layers."""
    graph = training_chain([3] * 7)
    return Problem(graph, chain_costs(graph), ram=ram, deadline_counts="serial")


# -- where they come from --------------------------------------------------------------------------
def test_decorated_function_is_a_method_of_this_process():
    """It is found by its name, runs like any other, and stays the function that it was."""

    @pm.method("mine", source="me")
    def mine(problem):
        """Keep everything.

        More words.
        """
        return checkpoint_all(problem.graph)

    pm.method("mine", source="me")(mine)  # as a cell of a notebook that runs twice
    result = run(problem_of("100%"), "mine")
    assert (result.method, str(result.status), result.backend) == ("mine", "optimal", "")
    entry = method("mine")
    assert (entry.summary, entry.source) == ("Keep everything.", "me")
    assert own.registered_names() == ("mine",)
    assert mine(problem_of()) == checkpoint_all(problem_of().graph)
    assert own.hash_method_files(entry) != own.hash_method_files(method("rotor")) == ""


@pytest.mark.parametrize("name", ["", "rotor", "a b", "a,b", "dtr:mine", "x.py:f"])
def test_name_that_means_something_else_is_refused(name):
    """A shipped method keeps its name; lists and variants can be read."""
    with pytest.raises(InputError, match="expected a name without"):
        pm.method(name)


def test_function_of_a_file_is_a_method(mine):
    """The file may import modules of its folder, and is read again after a change.

    Other methods of its folder do not count: a sweep with a second method does not repeat the
    runs of the first.
    """
    name = f"{mine}:half"
    problem = problem_of("100%")
    result = run(problem, name)
    expected = recompute_once(problem.graph, range(0, len(problem.graph.tensors), 2))
    assert (result.method, result.schedule) == (name, expected)
    assert method(name).summary == "Save every second tensor of the graph."
    before = own.hash_method_files(method(name))
    mine.write_text(MINE.replace("every second", "each other"), encoding="utf-8")
    assert method(name).summary == "Save each other tensor of the graph."
    assert own.hash_method_files(method(name)) != before
    entry = method(f"{mine}:half")
    before = own.hash_method_files(entry)
    other = mine.with_name("other.py")
    other.write_text("def keep(problem):\n    return None\n", encoding="utf-8")
    assert own.hash_method_files(method(f"{other}:keep")) != before == own.hash_method_files(entry)


def test_unknown_name_lists_own_methods():
    """The error lists the registered methods, and the syntax of files.

    ``@pm.method`` without arguments is refused with its syntax.
    """
    pm.method("mine")(lambda problem: checkpoint_all(problem.graph))
    with pytest.raises(InputError, match=r"swap-advisor, mine, or FILE\.py:FUNCTION"):
        method("yours")
    with pytest.raises(InputError, match="give it a name"):
        pm.method(checkpoint_all)


# -- what they do wrong ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "refused", "said"),
    [
        ("raises", False, r"' raised KeyError: 'absent' \(mine\.py, line 20\)$"),
        ("pairs", False, r"' raised ScheduleError: R: expected pairs .*\(mine\.py, line 36\)$"),
        ("number", False, r"' returned int \(mine\.py, line 23\), not a Schedule$"),
        ("broken", True, r"its schedule is refused: R\[1,1\]: node .*; and \d+ more$"),
        ("outside", True, r"its schedule is refused: R\[0,9999\]: the graph has no such"),
        ("leaves", False, r"' raised SystemExit: 3 \(mine\.py, line 47\)$"),
        ("two", False, r"' raised TypeError: .* 'more' \(mine\.py, line 50\)$"),
        ("later", False, r"' returned coroutine \(mine\.py, line 54\), not a Schedule$"),
    ],
)
def test_fault_is_one_sentence_with_its_place(mine, function, refused, said):
    """For any exception of the function, the error names the method, and its line."""
    with pytest.raises(UserMethodError, match=said) as caught:
        run(problem_of(), f"{mine}:{function}")
    assert caught.value.refused == refused
    assert "\n" not in str(caught.value)


def test_limit_and_reason_are_those_of_any_method(mine):
    """A schedule above the budget does not apply, and the function may raise this itself."""
    with pytest.raises(MethodNotApplicableError, match="full moon"):
        run(problem_of(), f"{mine}:reason")
    pm.method("all")(lambda problem: checkpoint_all(problem.graph))
    with pytest.raises(MethodNotApplicableError, match="breaks a limit: peak RAM"):
        run(problem_of("75%"), "all")


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        ("def f(:\n", "f", r"cannot be imported: SyntaxError: .* \(bad\.py, line 1\)"),
        ("x = 1\n\n1 / 0\n", "f", r"imported: ZeroDivisionError: .* \(bad\.py, line 3\)"),
        ("def g(p): ...\n", "f", r"has no function 'f' \(it has g\)"),
        ("f = 3\n", "f", r"has no function 'f' \(it has none\)"),
    ],
)
def test_file_that_cannot_be_used(tmp_path, text, function, said):
    """Errors in a file are reported with their line."""
    path = tmp_path / "bad.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((InputError, UserMethodError), match=said):
        method(f"{path}:{function}")
    with pytest.raises(InputError, match="No such file"):
        method(f"{tmp_path / 'absent.py'}:f")
    with pytest.raises(InputError, match=r"name a function of the file: .*bad\.py:FUNCTION"):
        method(str(path))


# -- commands --------------------------------------------------------------------------------------
SOLVE = ("solve", "mlp", "--device", "rpi4b", "--ram", "100%", "--quiet")


def test_solve_takes_a_file(mine, tmp_path):
    """The schedule file names the method, and can be verified; a fault is no bug of the solver."""
    out = tmp_path / "mlp.json"
    found = invoke(*SOLVE, "--method", f"{mine}:half", "--out", str(out), "--json")
    assert (found.status, found.json["problem"]["method"]) == (0, f"{mine}:half")
    assert invoke("verify", str(out), "--device", "rpi4b", "--quiet").status == 0
    for function, status, said in (
        ("raises", 1, "raised KeyError: 'absent' (mine.py, line 20)"),
        ("broken", 6, "its schedule is refused"),
        ("absent", 2, "has no function 'absent'"),
    ):
        found = invoke(*SOLVE, "--method", f"{mine}:{function}")
        assert (found.status, said in found.err) == (status, True), found.err
        assert "please report" not in found.err


@pytest.mark.slow
def test_sweep_takes_a_file_and_runs_again_where_it_changed(mine, tmp_path):
    """A changed file is another method, although its name is the same."""
    out = tmp_path / "sweep"
    command = ("sweep", "mlp", "--devices", "rpi4b", "--ram", "100%", "--methods")
    for text, count in ((MINE, 1), (MINE, 1), (MINE + "\n", 2)):
        mine.write_text(text, encoding="utf-8")
        invoke(*command, f"{mine}:half", "--out", str(out), "--quiet", status=0)
        records = (out / "cells.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(records) == count
    (tmp_path / "neighbour.py").write_text("STEP = 2  # as before\n", encoding="utf-8")
    assert invoke(*command, f"{mine}:half", "--out", str(out), "--quiet").status == 0
    assert len((out / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == count + 1
    pm.method("mine")(lambda problem: checkpoint_all(problem.graph))
    refused = invoke(*command, "mine", "--out", str(out), "--quiet")
    assert (refused.status, "registered in this process only" in refused.err) == (2, True)
