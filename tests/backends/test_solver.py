"""The common part of a solve, with a solver whose results a test defines."""

import math
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from poetmodel.backends import Limits, RawSolution, SolverStatus, run_interruptibly
from poetmodel.backends.call import SolverCall, finite_or_none
from poetmodel.backends.highs import Highs
from poetmodel.backends.solver import Solver
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm
from poetmodel.clock import check_time_limit, limit_time
from poetmodel.errors import BackendError, BackendUnavailableError, InputError, TimeLimitError


class Puppet(Solver):
    """Returns the given outcomes, one per call."""

    name = "puppet"
    package = "math"
    remedy = "nothing"

    def __init__(self, *outcomes, during=bool):
        self._outcomes = iter(outcomes)
        self._during = during

    def versions(self):
        """Return no versions."""
        return {}

    def run(self, call):
        """Execute the action of the test, and return the next outcome."""
        self._during(call)
        return next(self._outcomes)


def form(**changes):
    """Return ``min x`` over whole numbers ``x >= 2``."""
    return StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0, integer=True, **changes)


def endless():
    """Return the same model as an unbounded maximisation."""
    return form(sense=MAXIMIZE)


INFEASIBLE = RawSolution(status=SolverStatus.INFEASIBLE)
OPEN = RawSolution(status=SolverStatus.INFEASIBLE_OR_UNBOUNDED)


@pytest.mark.parametrize("status", [SolverStatus.OTHER_LIMIT, SolverStatus.FAILED])
def test_proof_counts_only_if_its_confirmation_ends(status, monkeypatch):
    """A second search that stops at a limit of its options, or fails, confirms no proof."""
    highs = Highs()
    proof = RawSolution(status=SolverStatus.OPTIMAL, x=np.array([2.0]), bound=2.0)
    second = RawSolution(status=status, bound=1.0)
    monkeypatch.setattr(Highs, "_solve_once", lambda *_: (proof, None))
    monkeypatch.setattr(Highs, "_solve_without_presolve", lambda *_: second)
    found = highs.solve(form(), Limits())
    assert (found.status, found.bound) == (SolverStatus.OTHER_LIMIT, 1.0)


def test_exceptions_of_the_log_in_a_second_solve_are_raised():
    """The solve that distinguishes infeasible from unbounded passes log exceptions on."""

    def fail_later(call):
        if not call.form.objective.any():
            call.write_log("second")

    def refuse(_):
        raise RuntimeError("no log")

    puppet = Puppet(OPEN, INFEASIBLE, during=fail_later)
    with pytest.raises(RuntimeError, match="no log"):
        puppet.solve(endless(), Limits(log=refuse))


def test_ctrl_c_while_a_solver_is_loaded_is_no_missing_package(monkeypatch, tmp_path):
    """pybind11 reports an interrupted initialization of a module as an ImportError."""
    text = "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as error:\n"
    text += "    raise ImportError('initialization failed') from error\n"
    (tmp_path / "interrupted_solver.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Puppet, "package", "interrupted_solver")
    with pytest.raises(KeyboardInterrupt):
        Puppet().import_package()
    monkeypatch.setattr(Puppet, "package", "no_such_solver")
    with pytest.raises(BackendUnavailableError):
        Puppet().import_package()


@pytest.mark.parametrize(
    ("status", "x", "bound", "given", "result"),
    [
        pytest.param(SolverStatus.OPTIMAL, 2.0, 2.0000001, {}, (2.0, 2.0), id="rounded bound"),
        pytest.param(SolverStatus.TIME_LIMIT, 2.9999999, 2.0, {}, (3.0, 2.0), id="rounded x"),
        pytest.param(SolverStatus.TIME_LIMIT, 9.0, 8.0, {"cutoff": 5.0}, (9.0, 5.0), id="cutoff"),
        pytest.param(SolverStatus.TIME_LIMIT, 9.0, 2.0, {"start": 3.0}, (3.0, 2.0), id="start"),
    ],
)
def test_objective_and_bound(status, x, bound, given, result):
    """Solutions are whole, or the start where that is better; no bound passes them or a cutoff."""
    outcome = RawSolution(status=status, x=np.array([x]), bound=bound)
    start = np.array([given["start"]]) if "start" in given else None
    limits = Limits(objective_cutoff=given.get("cutoff"))
    found = Puppet(outcome).solve(form(), limits, start=start)
    assert (found.objective, found.bound) == result
    assert "cutoff" in given or found.x.tolist() == [found.objective]
    assert found.start_accepted is (True if given.get("start") else None)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (RawSolution(status=SolverStatus.OPTIMAL, x=np.array([2.5]), bound=2.0), "must be whole"),
        (RawSolution(status=SolverStatus.OPTIMAL), "without a result"),
        (RawSolution(status=SolverStatus.FAILED), "without a result"),
    ],
)
def test_no_result_is_an_error(outcome, words):
    """A failure, an optimum without values, and values that are not whole."""
    with pytest.raises(BackendError, match=words):
        Puppet(outcome).solve(form(), Limits())


def test_start_disproves_infeasibility():
    """If a solver reports that a model with a feasible start is infeasible, it solves it again.

    The second solve is without presolve; with the same answer, the start is the result, and
    nothing is proven. A start that is off by the tolerance proves nothing. A solver that fails
    because it was stopped counts as interrupted. If bounds limit the objective, the ambiguous
    answer means infeasible.
    """
    asked = []
    puppet = Puppet(INFEASIBLE, INFEASIBLE, during=lambda call: asked.append(call.limits.presolve))
    result = puppet.solve(form(), Limits(), start=np.array([2.0]))
    assert asked == [True, False]
    assert (result.status, result.objective) == (SolverStatus.OTHER_LIMIT, 2.0)
    assert (result.bound, result.is_infeasible, result.solved_again) == (None, False, True)
    model = StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0)
    start = np.array([2.0 - 1e-8])
    result = Puppet(INFEASIBLE).solve(model, Limits(), start=start)
    assert (result.is_infeasible, result.x, result.start_accepted) == (True, None, False)
    stop = threading.Event()
    puppet = Puppet(RawSolution(status=SolverStatus.FAILED), during=lambda _: stop.set())
    result = puppet.solve(form(), Limits(), stop=stop)
    assert result.status is SolverStatus.INTERRUPTED
    assert Puppet(OPEN).solve(form(), Limits()).is_infeasible


@pytest.mark.parametrize(
    ("found", "status", "infeasible"),
    [
        (SolverStatus.OPTIMAL, SolverStatus.UNBOUNDED, False),
        (SolverStatus.INFEASIBLE, SolverStatus.INFEASIBLE, True),
        (SolverStatus.TIME_LIMIT, SolverStatus.TIME_LIMIT, False),
    ],
)
def test_any_solution_settles_infeasible_or_unbounded(found, status, *, infeasible):
    """Otherwise, a solve without objective distinguishes the two."""
    result = Puppet(OPEN, RawSolution(status=found)).solve(endless(), Limits())
    assert (result.status, result.is_infeasible) == (status, infeasible)
    assert (result.x, result.bound) == (None, None)


@pytest.mark.parametrize(
    ("time_s", "status"), [(None, SolverStatus.INTERRUPTED), (1e-9, SolverStatus.TIME_LIMIT)]
)
def test_infeasible_or_unbounded_when_stopped_or_out_of_time(time_s, status):
    """The question stays open."""
    stop = threading.Event()
    puppet = Puppet(OPEN, during=lambda _: time_s or stop.set())
    assert puppet.solve(endless(), Limits(time_s=time_s), stop=stop).status is status


# -- limits of a solve, and what solvers report during it ------------------------------------------
def unlimited(sense=MINIMIZE):
    """Return a form of one integer column."""
    return StandardForm.from_arrays([[1.0]], [1.0], integer=True, sense=sense)


def at(value):
    """Return a solution of it."""
    return np.array([value])


@pytest.mark.parametrize(
    ("value", "kept"),
    [(1.5, 1.5), (-1e19, -1e19), (1e20, None), (-1e100, None), (np.inf, None), (np.nan, None)],
)
def test_finite(value, kept):
    """All representations of a missing value in solvers become None."""
    assert finite_or_none(value) == kept


@pytest.mark.parametrize(("sense", "values"), [(MINIMIZE, [5, 6, 4, 4]), (MAXIMIZE, [5, 4, 6, 6])])
def test_only_better_solutions_are_reported(sense, values):
    """Solvers repeat and deteriorate; listeners see improvements, rounded."""
    seen = []
    call = SolverCall(unlimited(sense), Limits(), seen.append)
    for value in values:
        call.report_solution(value, lambda value=value: at(value + 1e-7))
    assert [news.incumbent for news in seen] == [values[0], values[2]]
    assert [None if news.x is None else news.x[0] for news in seen] == [values[0], values[2]]


def test_bounds_never_slacken():
    """The best bound is seen, news without a solution a few times a second, time as it is."""
    seen = []
    call = SolverCall(unlimited(), Limits(), seen.append)
    for bound, objective in ((1.0, 9.0), (0.5, 8.0), (None, 7.0), (2.0, 6.0)):
        call.report_solution(objective, lambda: at(0.0), bound)
    assert [news.bound for news in seen] == [1.0, 1.0, 1.0, 2.0]
    seen.clear()
    call = SolverCall(unlimited(), Limits(), seen.append)
    for _ in range(100):
        call.report_progress(1.0)
    assert len(seen) < 10
    threading.Event().wait(0.15)
    call.report_progress(2.0)
    assert (seen[-1].bound, seen[-1].x) == (2.0, None)
    assert SolverCall(unlimited(), Limits()).remaining_s is None
    call = SolverCall(unlimited(), Limits(time_s=1e-9))
    assert call.elapsed_s > 0
    assert call.remaining_s == 0.0


@pytest.mark.parametrize(("sense", "bound"), [(MINIMIZE, 7.0), (MAXIMIZE, 3.0)])
def test_bounds_beyond_the_cutoff_prove_the_cutoff(sense, bound):
    """With a cutoff, a bound beyond it only proves that no solution is better than the cutoff."""
    seen = []
    call = SolverCall(unlimited(sense), Limits(objective_cutoff=5.0), seen.append)
    call.report_solution(9.0, lambda: at(0.0), bound)
    assert seen[0].bound == 5.0


NONSENSE = {
    "time_s": (0.0, -1.0, math.inf, math.nan),
    "rel_gap": (-1e-9, math.inf, math.nan),
    "abs_gap": (-1.0,),
    "threads": (0, 1.5, True, math.nan),
    "seed": (-1, 2**31),
    "objective_stop": (math.nan,),
    "objective_cutoff": (math.inf,),
    "tolerance": (0.0, 0.1),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values]
)
def test_limits_refuse(name, value):
    """Numbers that make no sense are refused by name and value."""
    with pytest.raises(InputError, match=f"^{name}: expected .*, got "):
        Limits(**{name: value})


def test_limits_gather_faults():
    """All faults are reported at once."""
    with pytest.raises(InputError) as caught:
        Limits(time_s=-1.0, threads=0, rel_gap=math.nan)
    assert len(caught.value.faults) == 3


# -- in a thread of its own ----------------------------------------------------------------------
def test_result_comes_back():
    """In a separate thread, Python's handler of Ctrl-C is unchanged; also in other threads.

    Exceptions of the solve are raised again; an open time limit ends it. A solve that ends too
    late is stopped, and not waited for.
    """
    stop, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def slow():
        threading.Event().wait(0.3)
        return threading.current_thread()

    assert run_interruptibly(slow, stop) is not threading.current_thread()
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as pool:  # one that may not touch signals
        assert pool.submit(run_interruptibly, slow, stop).result().name == "poetmodel-solve"
    assert not stop.is_set()

    def fail():
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        run_interruptibly(fail, threading.Event())
    with limit_time(-1), pytest.raises(TimeLimitError):
        run_interruptibly(check_time_limit, threading.Event())
    stop, over = threading.Event(), threading.Event()
    with pytest.raises(TimeLimitError):
        run_interruptibly(over.wait, stop, max_s=0.0)
    assert stop.is_set()
    over.set()


LEFT_BEHIND = """\
import threading, time
from poetmodel.backends import run_interruptibly, worker
from poetmodel.errors import TimeLimitError
def solve():
    time.sleep(0.5)
    print("ended")
def endless():
    threading.Event().wait()
if {solve} is endless:
    worker._MAX_EXIT_WAIT_S = 0.2
try:
    run_interruptibly({solve}, threading.Event(), max_s=0.0)
except TimeLimitError:
    print("left")
"""


@pytest.mark.parametrize(("solve", "said"), [("solve", ["left", "ended"]), ("endless", ["left"])])
def test_the_program_ends_with_what_was_left_behind(solve, said):
    """A solver that calls back into a Python that has ended would abort it: it is waited for.

    But not for ever: HiGHS has been seen in a loop without an end.
    """
    command = [sys.executable, "-c", LEFT_BEHIND.format(solve=solve)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, said), done.stderr


STUBBORN = """
import os, threading
from poetmodel.backends import run_interruptibly
stop = threading.Event()
def solve():
    print("running", flush=True)
    stop.wait()
    print("asked to stop", flush=True)
    if {obedient}:
        return "what there is"
    threading.Event().wait(60.0)
try:
    print(run_interruptibly(solve, stop), flush=True)
except KeyboardInterrupt:
    print("gave up", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("obedient", "end"),
    [(True, "what there is\n"), (False, "gave up\n")],
    ids=["obeys", "stubborn"],
)
def test_ctrl_c(*, obedient, end):
    """The first Ctrl-C stops the solver and waits for its end; a second one does not wait."""
    child = subprocess.Popen(
        [sys.executable, "-c", STUBBORN.format(obedient=obedient)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "asked to stop\n"
        if not obedient:
            child.send_signal(signal.SIGINT)
        assert child.stdout.read() == end


STRUCK = """
import os, signal, sys, threading
from poetmodel.backends import run_interruptibly, worker
worker._POLL_S = 1e-3
INSIDE = ("worker.py", "threading.py", "_base.py")

def struck_at(moment):
    passed, stop = 0, threading.Event()
    def trace(frame, event, _):
        nonlocal passed
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_filename.endswith(INSIDE):
            passed += 1
            if passed == moment:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return trace
    def solve():
        return stop.wait(20.0)
    sys.settrace(trace)
    try:
        return run_interruptibly(solve, stop)
    except KeyboardInterrupt:
        return "not begun"
    finally:
        sys.settrace(None)

def trace_opcodes(frame, event, _):
    frame.f_trace_opcodes = True
    return trace_opcodes

sys.settrace(trace_opcodes)  # CPython 3.12 traces opcodes only after a first frame has asked for it
(lambda: None)()
sys.settrace(None)
ends = [struck_at(moment) for moment in range(1, 500)]
begun = ends.index(True)
assert set(ends[:begun]) == {"not begun"} and set(ends[begun:]) == {True}, ends
"""


def test_ctrl_c_may_strike_anywhere():
    """At any point of the waiting thread, Ctrl-C stops the solver, and its answer is returned."""
    done = subprocess.run(
        [sys.executable, "-c", STRUCK], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
