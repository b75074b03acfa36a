"""Files of schedules and plans: one opener, for commands that verify and for those that go on."""

from dataclasses import replace

import pytest

from kit.commands import BOARD, BOARD_FILE, CHAIN, chain, write_graph
from poetmodel.case.case import Case
from poetmodel.case.opening import Checked, open_schedule
from poetmodel.case.solving import LoadedCase, Placing, solve_case
from poetmodel.errors import InputError, ScheduleError
from poetmodel.problem import Limits
from poetmodel.result import Status

CASE = Case(source=str(CHAIN), device=str(BOARD_FILE), limits=Limits(ram="304B", recompute=False))
UNKNOWN = replace(CASE, limits=Limits())


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Work in a folder with the graph and the board of the case."""
    monkeypatch.chdir(tmp_path)
    write_graph(CHAIN, chain())
    BOARD_FILE.write_text(BOARD)


@pytest.fixture
def file(tmp_path):
    """Return the file of the best schedule of a case."""
    path = tmp_path / "chain.schedule.json"
    solve_case(LoadedCase.read(CASE)).result.save(path)
    return path


def test_a_file_has_the_problem_that_it_states(file):
    """In the same way for commands that verify it and for those that go on with its schedule."""
    opened = [open_schedule(file, UNKNOWN, is_input=is_input) for is_input in (False, True)]
    for checked in opened:
        assert checked.problem.to_dict() == LoadedCase.read(CASE).problem.to_dict()
        assert checked.verdict.valid
        assert checked.require_valid() is checked
    first, second = (checked.with_plan() for checked in opened)
    assert first.planned.plan == second.planned.plan
    assert first.planned.arena is not None
    assert not first.planned.check.violations


def test_limits_of_the_caller_replace_those_of_the_file(file):
    """A violated one is in the verdict, and is an error where the schedule must be valid."""
    checked = open_schedule(file, replace(UNKNOWN, limits=Limits(ram=1)))
    assert "--ram: the limits of the file were not checked" in checked.notes
    assert not checked.verdict.valid
    with pytest.raises(ScheduleError, match=r"chain\.schedule\.json: is not valid: "):
        checked.require_valid()


def test_costs_are_needed_only_to_go_on(file, tmp_path):
    """Without costs, RAM is verified; the board of the file is not built-in."""
    alone = replace(UNKNOWN, device=None)
    text = file.read_text().replace(str(BOARD_FILE), "gone")
    other = tmp_path / "other.schedule.json"
    other.write_text(text)
    checked = open_schedule(other, alone)
    assert checked.costs is None
    assert checked.verdict.valid
    assert checked.with_plan().planned is None
    with pytest.raises(InputError, match="no costs"):
        open_schedule(other, alone, is_input=True)


def test_a_result_is_checked_as_its_file_is(file):
    """Without a file of it."""
    result = solve_case(LoadedCase.read(CASE)).result
    made = Checked.of_result(result, case=CASE, file=file.name)
    read = open_schedule(file, UNKNOWN)
    assert made.schedule.R == read.schedule.R
    assert made.document.stated_metrics.keys() == read.document.stated_metrics.keys()
    assert made.verdict.valid


def test_a_case_is_solved_with_its_addresses_or_explained():
    """By one function, without the command line."""
    answer = solve_case(LoadedCase.read(CASE), placing=Placing())
    assert answer.planned is None or answer.require_plan().require_arena().bytes <= 304
    tight = replace(CASE, limits=replace(CASE.limits, ram=1))
    answer = solve_case(LoadedCase.read(tight), explains=True)
    assert answer.result.status == Status.INFEASIBLE
    assert answer.explanation is not None
    (reason,) = answer.failure_reasons()
    assert reason.startswith("infeasible: ")
    assert "infeasible" in answer.to_dict()
