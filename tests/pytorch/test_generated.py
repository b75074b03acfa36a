"""Generated programs: whatever the plan, the step is the one that PyTorch runs."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from eager_steps import differing  # noqa: E402
from poetmodel.plan import Instruction, Op, Plan  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.generated import Generated  # noqa: E402
from poetmodel.torch.runtime import Runner  # noqa: E402
from random_programs import random_plan  # noqa: E402
from small_networks import ARCHITECTURES  # noqa: E402
from traced_models import STEPS, residual  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from small_networks import Step

pytestmark = pytest.mark.torch


def check_random(step: Step, mode: str, folder: Path, seeds: range) -> None:
    """Run random plans of a step, and compare each with eager."""
    model, loss_fn, inputs = step
    traced = trace(model, loss_fn, inputs, measure_workspace=False)
    flat = traced.joint.flat_inputs
    for seed in seeds:
        plan = random_plan(traced.graph, Random(seed), mode, page=0.3)  # noqa: S311
        runner = Runner(traced, plan, range(len(traced.parts.storages)), folder=folder)
        assert differing(lambda *given, r=runner: r(flat(given)), *step) == [], seed
        runner.close()


@pytest.mark.parametrize("mode", ["blocking", "dma"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_plans_run_as_eager(name: str, mode: str, tmp_path: Path) -> None:
    """Recomputing and paging at random changes no bit of any result, gradients adding up."""
    torch.manual_seed(1)
    check_random(ARCHITECTURES[name](), mode, tmp_path, range(3))


@pytest.mark.parametrize("name", STEPS)
def test_random_plans_of_all_kinds_of_modules(name: str, tmp_path: Path) -> None:
    """Frozen, tied, unused, random, low-precision and other parts run as eager."""
    torch.manual_seed(1)
    check_random(STEPS[name](), "blocking", tmp_path, range(2))


def test_kept_storages_are_no_part_of_the_plan() -> None:
    """A plan of the large tensors alone runs; small ones are kept as long as they are read."""
    torch.manual_seed(1)
    step = residual()
    traced = trace(*step, measure_workspace=False)
    numbers = [storage.index for storage in traced.parts.storages if storage.bytes >= 512]
    assert 0 < len(numbers) < len(traced.parts.storages)
    program = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    runner = Runner(traced, Plan(program=tuple(program), mode="blocking"), numbers)
    assert differing(lambda *given: runner(traced.joint.flat_inputs(given)), *step) == []


def test_the_source_is_straight_down() -> None:
    """One function, no loop, no branch, and every scheduled tensor freed where the plan says."""
    traced = trace(*residual(), measure_workspace=False)
    plan = random_plan(traced.graph, Random(0), "blocking", page=0.0, drop=0.0)  # noqa: S311
    numbers = range(len(traced.parts.storages))
    generated = Generated(traced, plan.program, numbers)
    lines = generated.source.splitlines()
    assert lines[0] == "def step(arguments, emit, pages):"
    assert all(line.startswith("    ") and line[4] != " " for line in lines[1:])
    frees = [step.index for step in plan.program if step.op == Op.FREE]
    freed = [line.strip() for line in lines if line.strip().startswith("del t")]
    assert freed == [f"del t{index}" for index in frees]
    names = [emission.result.name for emission in generated.held.values()]
    assert names.count("loss") == 1
    assert "mutation of 1.bn.running_mean" in names
    assert "get_state" not in generated.source


def test_random_operations_keep_their_state_only_where_needed() -> None:
    """The state of the generator is saved before an operation that is computed again."""
    traced = trace(*residual(), measure_workspace=False)
    (dropout,) = (unit.index for unit in traced.parts.units if unit.random)
    once = [Instruction(Op.COMPUTE, k) for k in range(len(traced.graph.nodes))]
    twice = [*once[: dropout + 1], once[dropout], *once[dropout + 1 :]]
    numbers = range(len(traced.parts.storages))
    source = Generated(traced, tuple(twice), numbers).source
    assert source.count(f"g{dropout} = get_state()") == 1
    assert source.count(f"set_state(g{dropout})") == 1
    assert source.count("set_state(now)") == 1
