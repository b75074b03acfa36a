"""``poetmodel verify`` on plans."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import Outcome, invoke
from kit.plans import plan
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import check_plan, encode
from poetmodel.schedule import GraphIdentity

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "c0 o0 c1 c2 w0 f0 c3 c4 f1 f2 f3 i0 w0 c5 f0 f4"
"""`chain`, with x on storage from h2 on: its peak is at g2, 304 B."""


@pytest.fixture
def plan_file(tmp_path: Path, chain_file: Path, board_file: Path) -> Path:
    """Return the file of a plan of `chain`."""
    path = tmp_path / "chain.plan.json"
    graph = Graph.load(chain_file)
    made = plan(
        PROGRAM,
        identity=GraphIdentity.of(graph),
        ram_budget_bytes=304,
        device=str(board_file),
    )
    made.save(path, check_plan(graph, Costs.estimate(graph, Device.load(board_file)), made))
    return path


def changed(path: Path, **changes: Any) -> Path:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def verify(path: Path, graph: Path, *arguments: object) -> Outcome:
    """Run the command."""
    return invoke("verify", path, "--graph", graph, *arguments)


def test_valid_plan(plan_file: Path, chain_file: Path) -> None:
    """Exit 0, and the figures of the walk."""
    done = verify(plan_file, chain_file)
    assert done.status == 0, done.out
    assert done.out.startswith("valid: ")
    assert "costs are the estimates of device" in done.err
    found = verify(plan_file, chain_file, "--json").json
    stated = json.loads(plan_file.read_text())
    assert (found["valid"], found["violations"]) == (True, [])
    for key in ("makespan_s", "stall_s", "compute_s", "transfer_s", "energy_j", "peak_ram_bytes"):
        assert found[key] == stated[key]
    assert found["makespan_s"] == pytest.approx(6.002)  # page-out beside h1, page-in is stall
    assert found["mode"] == "dma"


def test_broken_program_is_not_valid(plan_file: Path, chain_file: Path) -> None:
    """Leaving a wait out is told, with exit 3."""
    program = json.loads(plan_file.read_text())["program"]
    del program[12]
    done = verify(changed(plan_file, program=program), chain_file)
    assert done.status == 3
    assert "node 'g1' reads tensor 'x' before its page_in is done" in done.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ram_budget_bytes": 303}, "above the 303 B that tensors may use"),
        ({"makespan_s": 6.0}, "makespan_s: the file says 6.0"),
        ({"peak_ram_bytes": 305}, "peak_ram_bytes: the file says 305"),
    ],
)
def test_limits_and_stated_figures_are_checked(
    plan_file: Path, chain_file: Path, change: dict[str, Any], words: str
) -> None:
    """The budget holds, and what a file claims must be so."""
    done = verify(changed(plan_file, **change), chain_file)
    assert done.status == 3
    assert words in done.out


def test_without_costs_memory_is_checked(plan_file: Path, chain_file: Path) -> None:
    """A device that is not here leaves times unchecked, and says so."""
    changed(plan_file, device="elsewhere", makespan_s=1.0)
    done = verify(plan_file, chain_file, "--json")
    assert done.status == 0
    assert done.json["makespan_s"] is None
    assert done.json["peak_ram_bytes"] == 304
    assert "times and energies were not checked" in done.err


def test_profile_gives_costs(plan_file: Path, chain_file: Path, profile_file: Path) -> None:
    """Other costs give other times: 1 s a transfer, so that the file's own are wrong."""
    done = verify(plan_file, chain_file, "--profile", profile_file, "--json")
    assert done.status == 3
    assert done.json["makespan_s"] == 7.0


def test_coded_plan(plan_file: Path, chain_file: Path, board_file: Path) -> None:
    """Bytes are judged as the file that they stand for."""
    graph = Graph.load(chain_file)
    data = encode(graph, plan(PROGRAM, device=str(board_file)))
    plan_file.write_bytes(data)
    done = verify(plan_file, chain_file, "--json")
    assert done.status == 0, done.err
    assert done.json["peak_ram_bytes"] == 304
    assert "states no RAM budget" in done.err
    plan_file.write_bytes(data[:-3])
    cut = verify(plan_file, chain_file)
    assert (cut.status, f"{plan_file}: the coded plan is cut off" in cut.err) == (2, True)
    plan_file.write_bytes(data)
    assert verify(plan_file, "mlp").status == 2  # type: ignore[arg-type]


def test_unreadable_plans(plan_file: Path, chain_file: Path) -> None:
    """Unknown keys, other graphs, other names and broken JSON: exit 2, naming the file."""
    text = plan_file.read_text()
    for change, words in (
        ({"extra": 1}, "extra: unknown key"),
        ({"nodes": list("abcdef")}, "nodes: entry 0: expected 'x', got 'a'"),
        ({"tensors": list("abcdef")}, "tensors: entry 0: expected 'x', got 'a'"),
    ):
        done = verify(changed(plan_file, **change), chain_file)
        assert (done.status, words in done.err) == (2, True), done.err
        assert f"{plan_file}: " in done.err
        plan_file.write_text(text)
    assert verify(plan_file, "mlp").status == 2  # type: ignore[arg-type]
    plan_file.write_text(text[: len(text) // 2])
    assert "cut off" in verify(plan_file, chain_file).err


def test_name_of_the_format_elsewhere_makes_no_plan(tmp_path: Path, chain_file: Path) -> None:
    """A schedule file that holds the word is still a schedule file."""
    path = tmp_path / "x.json"
    path.write_text('{"format": "poetmodel-schedule", "device": "poetmodel-plan"}')
    done = verify(path, chain_file)
    assert (done.status, "R: " in done.err or "nodes: missing" in done.err) == (2, True)
