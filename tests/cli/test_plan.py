"""``poetmodel plan``, and ``solve --plan`` and ``--plot``."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.commands import BOARD, BOARD_FILE, CHAIN, PROFILE, invoke, invoke_refused, write_solved
from kit.pages import read_page
from kit.rotation import mark_seeds_except
from kit.trace_events import check_trace
from kit.worked import skip_problem
from poetmodel.cli.plan import save_plan_and_map
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import Arena, Plan, check_arena, check_plan, decode
from poetmodel.result import Status, Termination
from poetmodel.schedule import Schedule, simulate
from poetmodel.solver import solve
from poetmodel.solver.facade import execute

SCHEDULE = Path("chain.schedule.json")
"""File of a schedule of `chain` that pages one tensor, in 304 B."""


@pytest.fixture(autouse=True)
def _schedule():
    """Write it."""
    write_solved(SCHEDULE.name, "--ram", "304B", "--no-recompute")


def plan(schedule, graph, *arguments, **due):
    """Run the command."""
    return invoke("plan", schedule, "--graph", graph, *arguments, **due)


def restated(path, **changes):
    """Change keys of a JSON file; those of ``problem`` inside it."""
    document = json.loads(path.read_text())
    document["problem"].update(changes.pop("problem", {}))
    path.write_text(json.dumps(document | changes))


def test_plan_file_is_written_and_judged(told):
    """Costs and mode are of the device in the file."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--out", out, status=0)
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


def test_binary_is_the_same_plan():
    """The table states the size of the bytes, which hold the plan of the JSON file."""
    out, binary = Path("chain.plan.json"), Path("chain.plan")
    plan(SCHEDULE, CHAIN, "--out", out, status=0)
    done = plan(SCHEDULE, CHAIN, "--format", "binary", "--out", binary, status=0)
    data = binary.read_bytes()
    assert decode(data, Graph.load(CHAIN)) == Plan.load(out)
    assert f"binary size    {len(data)} B" in done.out


def test_trace_goes_to_the_file_or_to_stdout():
    """Both have the same trace events, with the figures of the plan."""
    out = Path("chain.trace.json")
    plan(SCHEDULE, CHAIN, "--format", "trace", "--out", out, status=0)
    done = plan(SCHEDULE, CHAIN, "--format", "trace", status=0)
    assert json.loads(done.out) == json.loads(out.read_text())
    assert check_trace(json.loads(done.out))
    assert json.loads(done.out)["otherData"]["peak_ram_bytes"] == 304


@pytest.mark.parametrize("more", [(), ("--arena", "--out", "x")])
def test_binary_needs_a_file_and_has_no_addresses(more):
    """Bytes are not printed, and addresses are not left out in silence."""
    command = ("plan", SCHEDULE, "--graph", CHAIN, "--format", "binary")
    assert "--format binary" in invoke_refused(*command, *more)
    assert not Path("x").exists()


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_goes_to_the_file_goes_to_stdout(form, told):
    """The same text either way, alone."""
    out = Path("chain.out")
    shown = ("--json",) if form == "json" else ("--format", form)
    done = plan(SCHEDULE, CHAIN, *shown)
    assert plan(SCHEDULE, CHAIN, "--format", form, "--out", out).status == done.status == 0
    if form == "json":
        assert done.json == json.loads(out.read_text())
        return
    assert done.out == out.read_text()
    told(done.out)


def test_default_mode_is_the_devices_or_the_schedules():
    """A device with DMA has dma plans; without a device, an overlap schedule is for DMA."""
    board = Path("dma.toml")
    board.write_text(BOARD.replace('"blocking"', '"dma"'))
    with_device, without = ("--device", board, "--json"), ("--profile", PROFILE, "--json")
    assert plan(SCHEDULE, CHAIN, *with_device).json["mode"] == "dma"
    forced = plan(SCHEDULE, CHAIN, *with_device, "--mode", "blocking")
    assert forced.json["mode"] == "blocking"
    restated(SCHEDULE, device=None)
    assert plan(SCHEDULE, CHAIN, *without).json["mode"] == "blocking"
    restated(SCHEDULE, problem={"deadline_counts": "overlap"})
    assert plan(SCHEDULE, CHAIN, *without).json["mode"] == "dma"


def test_blocking_device_is_told_to_an_overlap_schedule(told):
    """A blocking plan of a schedule whose counted time has overlap causes a warning."""
    restated(SCHEDULE, problem={"deadline_counts": "overlap"}, makespan_s=None)
    done = plan(SCHEDULE, CHAIN, "--json")
    assert done.json["mode"] == "blocking"
    told(done.err)
    assert "--mode dma" not in plan(SCHEDULE, CHAIN, "--mode", "blocking").err


def test_budget_is_a_limit(told):
    """A plan that does not fit, or not with an alignment of 256 B, is reported and not written."""
    out = Path("x.plan.json")
    told(plan(SCHEDULE, CHAIN, "--ram", "303B", "--out", out, status=3).err)
    assert not out.exists()
    assert plan(SCHEDULE, CHAIN, "--ram", "100%", "--json").json["ram_budget_bytes"] == 404
    done = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 256, "--out", out, status=3)
    told(done.err, "aligned")
    assert not out.exists()


def test_resident_bytes_are_left_out_of_the_budget(told):
    """A file whose budget counts parameters leaves the rest to tensors."""
    graph = json.loads(CHAIN.read_text())
    graph["resident_bytes"] = {"parameters": 96}
    CHAIN.write_text(json.dumps(graph))
    document = json.loads(SCHEDULE.read_text())
    document["graph"]["sha256"] = Graph.load(CHAIN).sha256
    SCHEDULE.write_text(json.dumps(document))
    restated(SCHEDULE, problem={"count_parameters": True, "ram_budget_bytes": 400})
    assert plan(SCHEDULE, CHAIN, "--json").json["ram_budget_bytes"] == 304
    told(plan(SCHEDULE, CHAIN, "--ram", "96B", status=2).err)


def test_files_must_differ(told):
    """Outputs must differ from inputs; a schedule that cannot be planned is reported: exit 2."""
    assert plan(SCHEDULE, CHAIN, "--out", SCHEDULE).status == 2
    picture = Path("x.html")
    told(plan(SCHEDULE, CHAIN, "--out", picture, "--plot", picture, status=2).err)
    assert plan(SCHEDULE, CHAIN, "--plot", Path("x.jpg")).status == 2
    told(invoke("plan", SCHEDULE).err, "no graph")
    other = plan(SCHEDULE, "mlp")  # type: ignore[arg-type]
    assert other.status == 2
    told(other.err, "other")
    restated(SCHEDULE, S_RAM=[])
    told(plan(SCHEDULE, CHAIN, status=2).err, "broken")
    restated(SCHEDULE, device="elsewhere")
    told(plan(SCHEDULE, CHAIN).err, "no costs")
    assert plan(Path("none.json"), CHAIN).status == 2


def test_plot_is_drawn(told):
    """``--plot`` writes a picture beside everything else."""
    pytest.importorskip("plotly")
    picture = Path("chain.html")
    told(plan(SCHEDULE, CHAIN, "--plot", picture, status=0).err)
    charts = json.loads(read_page(picture.read_text()).scripts["charts"])["charts"]
    assert [chart["type"] for chart in charts] == ["timeline"]
    assert "o" in charts[0]["ops"]


@pytest.mark.parametrize("form", mark_seeds_except(["pdf", "svg", "png"], ["pdf"], ["svg", "png"]))
def test_still_pictures_are_drawn_for_papers(form):
    """The timeline of ``plan`` and the map of ``solve`` are still pictures by their suffix."""
    pytest.importorskip("matplotlib")
    plan(SCHEDULE, CHAIN, "--plot", f"plan.{form}", status=0)
    solved = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B")
    invoke(*solved, "--plot", f"map.{form}", status=0)
    assert all(Path(f"{name}.{form}").stat().st_size > 1000 for name in ("plan", "map"))


def test_solve_writes_plan_and_map():
    """``solve --plan`` and ``--plot`` write the same files as ``plan``, and the map."""
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


def test_solve_checks_its_targets_first(told):
    """An unwritable output ends the command before the solve.

    An infeasible problem leaves no files.
    """
    command = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B")
    assert invoke(*command, "--plot", "x.bmp").status == 2
    assert invoke(*command, "--plan", "none/x.json").status == 2
    done = invoke(*command, "--out", "x.json", "--plan", Path.cwd() / "x.json", status=2)
    told(done.err.replace(str(Path.cwd()), ""))
    assert list(Path().glob("x.*")) == []
    command = ("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--ram", "303B")
    before = set(Path().iterdir())
    assert invoke(*command, "--plan", "p.json", "--plot", "m.html").status == 3
    assert set(Path().iterdir()) == before


def test_plan_of_a_rejected_schedule_is_not_written(capsys, told):
    """For a rejected schedule, no program is written; the map has its content."""
    pytest.importorskip("plotly")
    result = replace(solve(skip_problem()), violations=("R[1,1]: made up",))
    made, picture = Path("p.json"), Path("m.html")
    assert list(save_plan_and_map(result, plan=made, plot=picture)) == [picture]
    told(capsys.readouterr().err)
    assert (made.exists(), picture.exists()) == (False, True)


# -- addresses ---------------------------------------------------------------------------------
def test_addresses_are_part_of_the_plan_file(told):
    """Figures, offsets in the file and in the listing; 'verify' walks them again."""
    out = Path("chain.plan.json")
    done = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--out", out, status=0)
    told(done.lines_from("arena"))
    graph, made, arena = Graph.load(CHAIN), Plan.load(out), Arena.load(out)
    assert (arena.bytes, arena.alignment) == (304, 4)
    assert check_arena(graph, made, arena).violations == ()
    shown = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--json").json
    assert shown == json.loads(out.read_text())
    listed = plan(SCHEDULE, CHAIN, "--arena", "--alignment", 4, "--format", "text")
    told("\n".join(line for line in listed.out.splitlines() if " at " in line), "listed")
    verified = invoke("verify", out, "--graph", CHAIN, "--json", status=0)
    assert verified.json["arena_bytes"] == 304
    assert verified.json["arena_fragmentation"] == 0.0
    damaged = json.loads(out.read_text())
    damaged["arena"]["offsets"][1][3] = damaged["arena"]["offsets"][0][3]
    out.write_text(json.dumps(damaged))
    verified = invoke("verify", out, "--graph", CHAIN, "--json", status=3)
    assert any("overlaps" in violation for violation in verified.json["violations"])


@pytest.mark.parametrize(
    "arguments", [("--alignment", 8), ("--arena", "--alignment", 12), ("--arena", "--alignment", 0)]
)
def test_options_of_addresses_are_checked(arguments, told):
    """Invalid alignments, and those without ``--arena``, are refused."""
    told(plan(SCHEDULE, CHAIN, *arguments, status=2).err)


def test_solve_finds_a_schedule_whose_addresses_fit(told):
    """Four tensors of 100 B and 4 B more are above 404 B in multiples of 16 B; three fit."""
    out, made = Path("chain.json"), Path("chain.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--ram", "404B")
    done = invoke("solve", *given, "--out", out, "--plan", made, "--arena", status=0)
    assert "Addresses" in done.out
    arena = Arena.load(made)
    assert arena.bytes <= 404
    assert json.loads(out.read_text())["problem"]["ram_budget_bytes"] == 404
    for path in (out, made):
        assert invoke("verify", path, "--graph", CHAIN).status == 0
    told(invoke_refused("solve", *given, "--arena"))


def test_a_solve_that_was_cut_short_goes_on_from_what_fits(monkeypatch):
    """The rest of the time is used to improve the schedule."""
    starts = []

    def hurried(problem, request, start):
        starts.append(start)
        result = execute(problem, request, start)
        if start is not None:
            return result
        return replace(result, status=Status.FEASIBLE, termination=Termination.TIME_LIMIT)

    monkeypatch.setattr("poetmodel.solver.facade.execute", hurried)
    path = Path("chain.plan.json")
    invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, "--plan", path, "--arena", status=0)
    assert [start is not None for start in starts] == [False, True]
    assert Arena.load(path)


def test_solve_says_that_no_addresses_fit(told):
    """Tensors fit in 304 B, but not in multiples of 16 B; the core here waits for each transfer."""
    path = Path("chain.plan.json")
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--ram", "304B", "--no-recompute")
    done = invoke("solve", *given, "--plan", path, "--arena", status=3)
    told(done.err)
    assert done.err.count("the minimum RAM is 352 B") == 1
    assert not path.exists()
    less = invoke("solve", *given[:-2], "303B", "--no-recompute", "--plan", path, "--arena")
    assert "feasible from 304 bytes of RAM" in less.err  # of tensors alone, as that hint says
    assert "hint: these changes ignore addresses" in less.err
    given = ("--graph", CHAIN, "--device", BOARD_FILE, "--deadline-counts", "overlap")
    told(invoke_refused("solve", *given, "--deadline", "1h", "--plan", path, "--arena"), "overlap")
    assert not path.exists()
