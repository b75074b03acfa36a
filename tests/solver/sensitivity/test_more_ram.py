"""What more RAM would save: by hand, and never more than is known."""

from dataclasses import replace

from kit.worked import skip_problem
from poetmodel.result import Termination
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import variants
from poetmodel.solver.sensitivity.more_ram import value_of_ram


def best(problem):
    """Return the best schedule of a problem."""
    return solve(problem, gap=0.0).require_schedule()


def test_byte_that_saves_a_recomputation_is_worth_it():
    """From 14 B, 1 B more saves the joule of computing a again; in 13 B it saves nothing."""
    problem = skip_problem(ram=14)
    for more in value_of_ram(problem, best(problem)):
        assert (more.more_bytes, more.saved_j, more.most_j) == (1, 1.0, 1.0)
        assert more.saved_j_per_kb == 1000.0
    assert value_of_ram(skip_problem(), best(skip_problem()))[0].saved_j == 0.0


def test_answers_out_of_time_or_after_ctrl_c_are_unknown(monkeypatch):
    """Only what every schedule pays is known then; an interrupted solve is the last one."""
    problem = skip_problem()
    schedule = best(problem)

    def late(problem, **options):
        return solve(problem, **options | {"time_limit": 1e-9})

    def interrupted(problem, **options):
        return replace(solve(problem, **options), termination=Termination.INTERRUPTED)

    monkeypatch.setattr(variants, "solve", late)
    assert value_of_ram(problem, schedule)[0].most_j == 1.0
    monkeypatch.setattr(variants, "solve", interrupted)
    assert [more.saved_j is None for more in value_of_ram(problem, schedule)] == [False, True]
