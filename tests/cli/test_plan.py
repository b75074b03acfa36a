"""``poetmodel plan``, and ``solve --plan`` and ``--plot``."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import BOARD, BOARD_FILE, CHAIN, PROFILE, Outcome, invoke, write_solved
from kit.pages import read_page
from kit.trace_events import check_trace
from kit.worked import skip_problem
from poetmodel.cli.plan import save_beside
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import Arena, Plan, check_arena, check_plan, decode
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import Schedule, simulate
from poetmodel.solver import solve

if TYPE_CHECKING:
    from kit.messages import Told
    from poetmodel.problem import Problem


SCHEDULE = Path("chain.schedule.json")
"""File of a schedule of `chain` that pages one tensor, in 304 B."""


@pytest.fixture(autouse=True)
def _schedule() -> None:
    """Write it."""
    write_solved(SCHEDULE.name, "--ram", "304B", "--no-recompute")


def plan(schedule: Path, graph: Path, *arguments: object) -> Outcome:
    """Run the command."""
    return invoke("plan", schedule, "--graph", graph, *arguments)


def restated(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; those of ``problem`` inside it."""
    document = json.loads(path.read_text())
    document["problem"].update(changes.pop("problem", {}))
    path.write_text(json.dumps(document | changes))


def test_plan_file_is_written_and_judged(told: Told) -> None:
    """The device named in the file gives costs and mode; figures are those of the schedule."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--out", out)
    assert done.status == 0, done.err
    told(done.err)
    told(done.out, "table")
    graph, made = Graph.load(CHAIN), Plan.load(out)
    costs = Costs.estimate(graph, Device.load(BOARD_FILE))
    simulation = simulate(graph, costs, Schedule.load(SCHEDULE))
    stated = json.loads(out.read_text())
    assert made.mode == stated["mode"] == "blocking"
    assert stated["ram_budget_bytes"] == 304
    assert stated["device"] == str(BOARD_FILE)
    for key in ("energy_j", "peak_ram_bytes", "makespan_s", "compute_s", "transfer_s"):
        assert stated[key] == getattr(simulation, key)
    check = check_plan(graph, costs, made)
    assert (check.violations, stated["stall_s"]) == ((), 0.0)


def test_json_is_the_content_of_the_file() -> None:
    """``--json`` prints the same object, alone."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--out", out, "--json", "--mode", "dma")
    assert done.status == 0
    assert done.json == json.loads(out.read_text())
    assert done.json["mode"] == "dma"
    assert done.json["program"][0] == ["compute", 0]


def test_text_goes_to_the_file_or_to_stdout(told: Told) -> None:
    """The same listing either way."""
    done = plan(SCHEDULE, CHAIN, "--format", "text")
    assert done.status == 0
    told(done.out)
    out = Path("chain.txt")
    assert plan(SCHEDULE, CHAIN, "--format", "text", "--out", out).status == 0
    assert out.read_text() == done.out


def test_binary_is_the_same_plan() -> None:
    """The bytes decode to the plan of the JSON file."""
    out, coded = Path("chain.plan.json"), Path("chain.plan")
    assert plan(SCHEDULE, CHAIN, "--out", out).status == 0
    done = plan(SCHEDULE, CHAIN, "--format", "binary", "--out", coded)
    assert done.status == 0
    data = coded.read_bytes()
    assert decode(Graph.load(CHAIN), data) == Plan.load(out)
    assert f"binary size    {len(data)} B" in done.out


def test_trace_goes_to_the_file_or_to_stdout() -> None:
    """The same trace events either way, with the figures of the plan."""
    out = Path("chain.trace.json")
    assert plan(SCHEDULE, CHAIN, "--format", "trace", "--out", out).status == 0
    done = plan(SCHEDULE, CHAIN, "--format", "trace")
    assert done.status == 0
    assert done.out == out.read_text()
    events = check_trace(json.loads(done.out))
    stated = plan(SCHEDULE, CHAIN, "--json").json
    ram = [event["args"]["bytes"] for event in events if event["name"] == "RAM"]
    assert max(ram) == stated["peak_ram_bytes"]
    assert any(event.get("cat") == "page_out" for event in events)


def test_snapshot_has_the_addresses_of_the_plan() -> None:
    """With ``--arena`` those of the plan file, as aligned; without, as `place` has them."""
    out, found = Path("chain.pickle"), Path("chain.plan.json")
    command = (SCHEDULE, CHAIN, "--arena", "--alignment", 1)
    assert plan(*command, "--out", found).status == 0
    assert plan(*command, "--format", "memory-viz", "--out", out).status == 0
    (trace,) = pickle.loads(out.read_bytes())["device_traces"]  # noqa: S301 - our own bytes
    placed = sorted(one.offset for one in Arena.load(found).offsets)
    assert sorted(entry["addr"] for entry in trace if entry["action"] == "alloc") == placed
    command = (SCHEDULE, CHAIN, "--format", "memory-viz")
    assert plan(*command, "--out", out).status == 0
    (trace,) = pickle.loads(out.read_bytes())["device_traces"]  # noqa: S301 - our own bytes
    assert len([entry for entry in trace if entry["action"] == "alloc"]) == len(placed)
    assert all(entry["addr"] % 16 == 0 for entry in trace)


@pytest.mark.parametrize("form", ["binary", "memory-viz"])
def test_bytes_need_a_file(form: str, told: Told) -> None:
    """They are not for a terminal; the message says what to give."""
    done = plan(SCHEDULE, CHAIN, "--format", form)
    assert done.status == 2
    told(done.err)


def test_default_mode_is_the_devices() -> None:
    """A device with DMA gives dma plans; the option goes before it."""
    board = Path("dma.toml")
    board.write_text(BOARD.replace('"blocking"', '"dma"'))
    command = (SCHEDULE, CHAIN, "--device", board, "--json")
    assert plan(*command).json["mode"] == "dma"
    assert plan(*command, "--mode", "blocking").json["mode"] == "blocking"


def test_default_mode_without_device_is_the_schedules() -> None:
    """With a profile alone, an overlap schedule is for DMA, any other one not."""
    restated(SCHEDULE, device=None)
    command = (SCHEDULE, CHAIN, "--profile", PROFILE, "--json")
    assert plan(*command).json["mode"] == "blocking"
    restated(SCHEDULE, problem={"deadline_counts": "overlap"})
    assert plan(*command).json["mode"] == "dma"


def test_blocking_device_is_told_to_an_overlap_schedule(told: Told) -> None:
    """A plan that does not keep the meaning of the schedule's time says so."""
    restated(SCHEDULE, problem={"deadline_counts": "overlap"}, makespan_s=None)
    done = plan(SCHEDULE, CHAIN, "--json")
    assert done.json["mode"] == "blocking"
    told(done.err)
    assert "--mode dma" not in plan(SCHEDULE, CHAIN, "--mode", "blocking").err


def test_budget_is_a_limit(told: Told) -> None:
    """A plan that does not fit is told, and not written."""
    out = Path("x.plan.json")
    done = plan(SCHEDULE, CHAIN, "--ram", "303B", "--out", out)
    assert done.status == 3
    told(done.err)
    assert not out.exists()
    assert plan(SCHEDULE, CHAIN, "--ram", "100%", "--json").json["ram_budget_bytes"] == 404


def test_resident_bytes_are_left_out_of_the_budget(told: Told) -> None:
    """A file whose budget counts parameters leaves the rest to tensors."""
    graph = json.loads(CHAIN.read_text())
    graph["resident_bytes"] = {"parameters": 96}
    CHAIN.write_text(json.dumps(graph))
    document = json.loads(SCHEDULE.read_text())
    document["graph"]["sha256"] = Graph.load(CHAIN).sha256
    SCHEDULE.write_text(json.dumps(document))
    restated(SCHEDULE, problem={"count_parameters": True, "ram_budget_bytes": 400})
    assert plan(SCHEDULE, CHAIN, "--json").json["ram_budget_bytes"] == 304
    done = plan(SCHEDULE, CHAIN, "--ram", "96B")
    assert done.status == 2
    told(done.err)


def test_bad_input_is_told(told: Told) -> None:
    """No graph, another graph, a schedule that cannot run, no costs: exit 2 and the reason."""
    told(invoke("plan", SCHEDULE).err)
    other = plan(SCHEDULE, "mlp")  # type: ignore[arg-type]
    assert other.status == 2
    told(other.err, "other")
    restated(SCHEDULE, S_RAM=[])
    broken = plan(SCHEDULE, CHAIN)
    assert broken.status == 2
    told(broken.err, "broken")
    restated(SCHEDULE, device="elsewhere")
    told(plan(SCHEDULE, CHAIN).err, "no costs")
    assert plan(Path("none.json"), CHAIN).status == 2


def test_files_must_differ(told: Told) -> None:
    """No output may take the place of an input or of another output."""
    assert plan(SCHEDULE, CHAIN, "--out", SCHEDULE).status == 2
    picture = Path("x.svg")
    done = plan(SCHEDULE, CHAIN, "--out", picture, "--plot", picture)
    assert done.status == 2
    told(done.err)
    assert plan(SCHEDULE, CHAIN, "--plot", Path("x.pdf")).status == 2


def test_plot_is_drawn(told: Told) -> None:
    """``--plot`` writes the picture beside everything else."""
    pytest.importorskip("plotly")
    picture = Path("chain.html")
    done = plan(SCHEDULE, CHAIN, "--plot", picture)
    assert done.status == 0
    told(done.err)
    charts = json.loads(read_page(picture.read_text()).scripts["charts"])["charts"]
    assert [chart["type"] for chart in charts] == ["timeline"]
    assert "o" in charts[0]["ops"]


def test_solve_writes_plan_and_map() -> None:
    """``solve --plan`` and ``--plot`` write what ``plan`` would, and the map."""
    pytest.importorskip("plotly")
    schedule, made, picture = (Path(name) for name in ("s.json", "p.json", "m.html"))
    done = invoke(
        *("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B"),
        *("--out", schedule, "--plan", made, "--plot", picture, "--json"),
    )
    assert done.status == 0, done.err
    assert done.json["status"] == "optimal"  # stdout has the schedule alone
    assert [line for line in done.err.splitlines() if line.startswith("wrote")] == [
        f"wrote {path}" for path in (schedule, made, picture)
    ]
    again = plan(schedule, CHAIN, "--json")
    assert again.json == json.loads(made.read_text())
    charts = json.loads(read_page(picture.read_text()).scripts["charts"])["charts"]
    assert [chart["type"] for chart in charts] == ["map"]


def test_solve_without_schedule_writes_neither() -> None:
    """An infeasible problem leaves no files."""
    made, picture = Path("p.json"), Path("m.svg")
    done = invoke(
        *("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "303B"),
        *("--plan", made, "--plot", picture),
    )
    assert done.status == 3
    assert not made.exists()
    assert not picture.exists()


def test_solve_checks_its_targets_first(tmp_path: Path, told: Told) -> None:
    """A picture of unknown kind, or a folder that is missing, ends it before it solves."""
    command = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B")
    assert invoke(*command, "--plot", tmp_path / "x.bmp").status == 2
    assert invoke(*command, "--plan", tmp_path / "none" / "x.json").status == 2
    done = invoke(*command, "--out", tmp_path / "x.json", "--plan", tmp_path / "x.json")
    assert done.status == 2
    told(done.err)
    again = invoke(*command, "--out", "x.json", "--plan", Path.cwd() / "x.json")
    assert again.status == 2
    assert "--out already names this file" in again.err
    assert list(tmp_path.glob("x.*")) == []
    assert not Path("x.json").exists()


def test_plan_of_a_rejected_schedule_is_not_written(
    capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    """Where the verifier rejects the schedule there is no program; the map shows what it holds."""
    pytest.importorskip("plotly")
    result = replace(solve(skip_problem()), violations=("R[1,1]: made up",))
    made, picture = Path("p.json"), Path("m.html")
    assert list(save_beside(result, plan=made, plot=picture)) == [picture]
    told(capsys.readouterr().err)
    assert (made.exists(), picture.exists()) == (False, True)


# -- addresses ---------------------------------------------------------------------------------


def test_addresses_are_part_of_the_plan_file(told: Told) -> None:
    """Figures, offsets in the file and in the listing; 'verify' walks them again."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--out", out)
    assert done.status == 0, done.err
    told(done.lines_from("arena"))
    graph, made, arena = Graph.load(CHAIN), Plan.load(out), Arena.load(out)
    assert (arena.bytes, arena.alignment) == (304, 4)
    assert check_arena(graph, made, arena).violations == ()
    shown = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--json").json
    assert shown == json.loads(out.read_text())
    listed = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--format", "text")
    told("\n".join(line for line in listed.out.splitlines() if " at " in line), "listed")
    verified = invoke("verify", out, "--graph", CHAIN, "--json")
    assert verified.status == 0, verified.err
    assert verified.json["arena_bytes"] == 304
    assert verified.json["arena_fragmentation"] == 0.0
    damaged = json.loads(out.read_text())
    damaged["arena"]["offsets"][1][3] = damaged["arena"]["offsets"][0][3]
    out.write_text(json.dumps(damaged))
    verified = invoke("verify", out, "--graph", CHAIN, "--json")
    assert verified.status == 3
    assert any("overlaps" in violation for violation in verified.json["violations"])


def test_a_block_above_the_budget_is_an_error(told: Told) -> None:
    """With 256 B as alignment no tensor of the peak leaves room for another."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 256, "--out", out)
    assert done.status == 3
    told(done.err)
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--alignment", 8),
        ("--plot-arena", "x.png"),
        ("--arena", "--alignment", 12),
        ("--arena", "--format", "binary", "--out", "x"),
    ],
)
def test_options_of_addresses_are_checked(arguments: tuple[object, ...], told: Told) -> None:
    """What says nothing together is told."""
    done = plan(SCHEDULE, CHAIN, *arguments)
    assert done.status == 2
    told(done.err)


def test_map_of_addresses_is_drawn(told: Told) -> None:
    """A picture of its own, named in the output."""
    pytest.importorskip("matplotlib")
    path = Path("chain.svg")
    done = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--plot-arena", path)
    assert done.status == 0, done.err
    told(done.err)
    assert "copies and workspaces in 304 B" in path.read_text()
    assert plan(SCHEDULE, CHAIN, "--arena", "--plot-arena", Path("x")).status == 2


def test_solve_finds_a_schedule_whose_addresses_fit(told: Told) -> None:
    """Four tensors of 100 B and 4 B more are above 404 B in multiples of 16 B; three fit."""
    out, made = Path("chain.json"), Path("chain.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--ram", "404B")
    done = invoke("solve", *given, "--out", out, "--plan", made, "--arena")
    assert done.status == 0, done.err
    assert "Addresses" in done.out
    arena = Arena.load(made)
    assert arena.bytes <= 404
    assert json.loads(out.read_text())["problem"]["ram_budget_bytes"] == 404
    for path in (out, made):
        assert invoke("verify", path, "--graph", CHAIN).status == 0
    none = invoke("solve", *given, "--arena")
    assert none.status == 2
    told(none.err)


def test_a_solve_that_was_cut_short_goes_on_from_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the time goes into a better schedule."""
    starts = []

    def hurried(problem: Problem, *, start: Schedule | None, **stated: Any) -> SolveResult:
        starts.append(start)
        result = solve(problem, start=start, **stated)
        if start is not None:
            return result
        return replace(result, status=Status.FEASIBLE, termination=Termination.TIME_LIMIT)

    monkeypatch.setattr("poetmodel.solver.solve", hurried)
    path = Path("chain.plan.json")
    done = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--plan", path, "--arena")
    assert done.status == 0, done.err
    assert [start is not None for start in starts] == [False, True]
    assert Arena.load(path)


def test_addresses_are_of_plans_that_the_deadline_counts(told: Told) -> None:
    """The core of this device waits for each transfer."""
    path = Path("chain.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--deadline-counts", "overlap")
    done = invoke("solve", *given, "--deadline", "1h", "--plan", path, "--arena")
    assert done.status == 2
    told(done.err)
    assert not path.exists()


def test_solve_says_that_no_addresses_fit(told: Told) -> None:
    """Its tensors fit in 304 B, but not in multiples of 16 B."""
    path = Path("chain.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B", "--no-recompute")
    done = invoke("solve", *given, "--plan", path, "--arena")
    assert done.status == 3, (done.out, done.err)
    told(done.err)
    assert done.err.count("the minimum RAM is 352 B") == 1
    assert not path.exists()
    less = invoke("solve", *given[:-2], "303B", "--no-recompute", "--plan", path, "--arena")
    assert "feasible from 304 bytes of RAM" in less.err  # of tensors alone, as that hint says
    assert "hint: these changes leave addresses aside" in less.err
