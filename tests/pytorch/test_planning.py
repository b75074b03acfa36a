"""Common parts of all plans: the search by its possible gain, and the message of a budget."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kit.traced_models import FunctionModule  # noqa: E402
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.graph import checkpoint_all_peak_bytes  # noqa: E402
from poetmodel.problem import Problem  # noqa: E402
from poetmodel.result import Termination  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.planning.reserves import Reserve, Reserves  # noqa: E402
from poetmodel.torch.planning.rounds import search_in_rounds  # noqa: E402
from poetmodel.torch.planning.task import LeastRam, RamTask, find_min_ram  # noqa: E402

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Found:
    """A result of a solve that ends at its limit."""

    value: float | None
    bound: float | None
    time_limit_s: float
    termination: Termination = Termination.TIME_LIMIT
    gap: float = 0.1
    schedule: str = "schedule"


def searched(steps, known=None, *, time_limit_s=60.0, **ends):
    """Return the result of a search, and the limits and starts of its rounds."""
    rounds = []

    def solve_within(limit_s, start):
        rounds.append((limit_s, start))
        value = 1.0 - 0.001 * len(rounds)
        return Found(value, 0.98, limit_s, **ends)

    return search_in_rounds(solve_within, known, steps=steps, time_limit_s=time_limit_s), rounds


def test_a_search_ends_when_it_costs_more_than_it_may_gain():
    """Each round has twice the time, and begins from the best schedule."""
    found, rounds = searched(10)
    assert rounds == [(1.0, None)]  # ten steps may gain 0.19 s, and the next round takes 2 s
    assert found.time_limit_s == 1.0
    found, rounds = searched(250)
    assert rounds == [(1.0, None), (2.0, "schedule"), (4.0, "schedule")]
    assert found.time_limit_s == 7.0
    found, rounds = searched(10**6, time_limit_s=6.0)
    assert [limit_s for limit_s, _ in rounds] == [1.0, 2.0, 3.0]
    found, rounds = searched(10**6, termination=Termination.PROVED)
    assert len(rounds) == 1


def test_a_known_result_is_enough_or_is_gone_on_from():
    """By the same rule, in a round that is as long as all before."""
    known = Found(0.99, 0.98, 7.0)
    assert searched(100, known) == (known, [])
    found, rounds = searched(1000, known)
    assert rounds == [(7.0, "schedule")]
    assert found.time_limit_s == 14.0


def test_a_refused_budget_is_told_with_its_share_and_reserves():
    """In bytes and percent, with a budget that suffices, one that never does, and the reserves."""
    task = RamTask(
        name="Net",
        problem=SimpleNamespace(),
        budget_bytes=500,
        reserves=Reserves((Reserve("inputs", 100), Reserve("results", 20), Reserve("none", 0))),
        keep_all_bytes=1000,
        is_fraction=True,
        notes=("a note",),
    )
    assert task.usable_bytes == 380
    assert str(task.make_error(LeastRam(801, 700))) == (
        "ram: 500 B (50%) is too little for Net: ram=801 (80.1%) is enough, and less than 700 B "
        "never is; 120 B of it are reserved: 100 B inputs + 20 B results; a note"
    )
    assert "the minimum is ram=801" in str(task.make_error(LeastRam(801, 801)))
    assert "a longer time_limit may find it" in str(
        task.make_error(LeastRam(None), is_proved=False)
    )


@pytest.mark.slow
def test_the_least_ram_of_a_recurrent_step_is_not_nearly_all():
    """Its many small operations leave a solver no time for a schedule with little RAM."""
    nn = torch.nn
    model = FunctionModule(
        lambda parts, x: parts[2](parts[1](parts[0](x))[0]).flatten(0, 1),
        nn.Embedding(100, 64),
        nn.GRU(64, 64, batch_first=True),
        nn.Linear(64, 100),
    )
    inputs = (torch.randint(0, 100, (8, 12)), torch.randint(0, 100, (96,)))
    loss_fn = nn.functional.cross_entropy
    graph = trace(model, loss_fn, inputs, measure_workspace=False).graph
    costs = Costs.estimate(graph, Device.load("rpi4b"))
    problem = Problem(graph, costs, ram="60%", minimize="time", paging=False)
    found = find_min_ram(problem, 0.01)
    keep_all_bytes = checkpoint_all_peak_bytes(graph)
    assert found.simulation.peak_ram_bytes < 0.85 * keep_all_bytes
    assert found.bound <= found.simulation.peak_ram_bytes
