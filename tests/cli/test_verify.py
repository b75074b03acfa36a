"""``poetmodel verify``: schedules and plans that are valid, not valid, or not readable."""

import json
from pathlib import Path

import pytest

from kit.commands import (
    BOARD,
    BOARD_FILE,
    CHAIN,
    PROFILE,
    chain,
    invoke,
    invoke_refused,
    write_graph,
    write_solved,
)
from kit.plans import parse_plan
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph
from poetmodel.plan import check_plan, encode
from poetmodel.schedule import GraphIdentity, checkpoint_all

SOLVED = Path("x.schedule.json")
"""The schedule of the chain in 350 B, which pages x out and in."""


@pytest.fixture(autouse=True)
def _solved():
    """Write it."""
    write_solved(SOLVED.name, "--ram", "350", "--deadline", "200%")


def verify(*options, status=None, **keys):
    """Run the command on that file, with keys changed and more options."""
    document = json.loads(SOLVED.read_text())
    for key, value in keys.items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    SOLVED.write_text(json.dumps(document))
    return invoke("verify", SOLVED, "--graph", CHAIN, *options, status=status)


def test_solved_schedule_is_valid(told):
    """`verify` accepts the file of `solve` with equal numbers; the default device is the file's."""
    outcome = verify("--device", BOARD_FILE, "--json", status=0)
    assert outcome.err == ""
    assert outcome.json["valid"] is True
    assert outcome.json["violations"] == []
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert outcome.json["peak_ram_bytes"] == 304
    assert outcome.json["written_bytes"] == outcome.json["read_bytes"] == 100
    table = verify("--device", BOARD_FILE, status=0)
    told(table.out)
    outcome = verify("--json", status=0)
    assert outcome.json["energy_j"] == pytest.approx(6.004, rel=1e-9)
    assert str(BOARD_FILE) in outcome.err


def test_without_costs_the_rest_is_checked(told):
    """Without costs, rules and bytes are checked, and the output lists the unchecked properties."""
    outcome = verify("--json", device="gone.toml", status=0)
    told(outcome.err)
    assert outcome.json["energy_j"] is None
    assert outcome.json["time_s"] is None
    assert outcome.json["peak_ram_bytes"] == 304
    tight = verify("--json", problem={"ram_budget_bytes": 303}, peak_ram_bytes=303, status=3)
    assert len(tight.json["violations"]) == 2


@pytest.mark.parametrize(
    "keys",
    [{"M_in": []}, {"problem": {"ram_budget_bytes": 303}}, {"energy_j": 6.0}, {"bound_j": 7.0}],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_broken_is_named_and_exits_3(keys, told):
    """Each broken rule, limit and figure is a line in plain words."""
    outcome = verify("--device", BOARD_FILE, **keys, status=3)
    told(outcome.verdict)
    found = verify("--device", BOARD_FILE, "--json").json
    assert found["valid"] is False
    for violation in found["violations"]:
        assert violation in outcome.out.splitlines()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (("--ram", "304"), None),
        (("--ram", "303"), "peak RAM 304 B"),
        (("--deadline", "100%"), "is above the deadline"),
        (("--energy-budget", "6J"), "energy 6.004 J is above the budget"),
        (("--aux", "99"), "storage used 100 B is above the limit of 99 B"),
        (("--no-paging",), "the problem allows no paging"),
    ],
)
def test_given_limits_replace_those_of_the_file(limits, words):
    """Violations of the given limits are named; without any, the stated ``infeasible`` is a bug."""
    options = ("--device", BOARD_FILE, *limits)
    # Under limits of its own the file is no answer, nor are its bound and its gap.
    keys = {"problem": {"ram_budget_bytes": 1, "deadline_s": 0.1}, "objective": {"bound": 99.0}}
    found = verify(*options, **keys, status=3 if words else 0)
    assert (words or "Please report this bug") in found.out
    assert "the limits of the file were not checked" in found.err
    assert verify("--device", BOARD_FILE).status == 3


def test_resident_bytes_count_where_the_file_says_so():
    """A file solved with --count-parameters is judged with them."""
    document = chain() | {"resident_bytes": {"parameters": 1000}}
    graph = write_graph(Path("g.json"), document)
    path = Path("x.schedule.json")
    arguments = ("--device", BOARD_FILE, "--ram", "1350", "--count-parameters", "--out", path)
    assert invoke("solve", graph, *arguments).status == 0
    assert invoke("verify", path, "--graph", graph).status == 0
    changed = json.loads(path.read_text())
    changed["problem"]["ram_budget_bytes"] = 1303
    path.write_text(json.dumps(changed))
    assert invoke("verify", path, "--graph", graph).status == 3


def test_measured_costs_are_checked_with_the_profile(told):
    """A profile has the costs of the file; estimates alone are other costs.

    The idle power is the device's.
    """
    path = Path("x.schedule.json")
    costs = ("--device", BOARD_FILE, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    assert invoke("verify", path, "--graph", CHAIN, *costs).status == 0
    assert invoke("verify", path, "--graph", CHAIN, "--profile", PROFILE).status == 0
    told(invoke("verify", path, "--graph", CHAIN, status=0).err)
    board = Path("idle.toml")
    board.write_text(BOARD.replace("[compute]", "idle_power_w = 0.5\n[compute]"))
    costs = ("--device", board, "--profile", PROFILE)
    assert invoke("solve", CHAIN, *costs, "--ram", "350", "--out", path).status == 0
    arguments = ("verify", path, "--graph", CHAIN, "--profile", PROFILE)
    assert invoke(*arguments).status == 0
    assert invoke(*arguments, "--json").json["baseline_energy_j"] == pytest.approx(15.0)


def test_bare_relations_are_judged_by_the_rules_alone(told):
    """A file without a problem has no limits, which is printed; one of another graph is refused."""
    path = Path("bare.schedule.json")
    checkpoint_all(Graph.load(CHAIN)).save(path)
    outcome = invoke("verify", path, "--graph", CHAIN, "--json", status=0)
    assert outcome.json["peak_ram_bytes"] == 404
    told(outcome.err)
    other = write_graph(Path("other.json"), chain() | {"name": "other"})
    outcome = invoke("verify", SOLVED, "--graph", other)
    assert (outcome.status, outcome.out) == (2, "")
    assert SOLVED.name in outcome.err
    told(outcome.err, "another graph")


@pytest.mark.parametrize(
    "keys",
    [{"R": [[0, -1]]}, {"nodes": ["x"]}],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_malformed_file_exits_2_and_names_the_field(keys, told):
    """A schedule file that breaks its format is refused with its name and the field."""
    outcome = verify(**keys, status=2)
    assert outcome.out == ""
    told(outcome.err)


# -- files across versions -----------------------------------------------------------------------
def without(path, *keys):
    """Remove keys of a JSON file."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: values[key] for key in values if key not in keys}))
    return path


def slow_board():
    """Return the file of a device like the board, with 1.5 times its computation time."""
    path = Path("slow.toml")
    rate, power = "flops_per_s = ", "power_w = "
    lines = [
        f"{rate}{float(line.removeprefix(rate)) / 1.5}" if line.startswith(rate) else line
        for line in BOARD.splitlines()
    ]
    assert any(line.startswith(power) for line in lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_metrics_of_other_costs_are_reported():
    """Both values are shown, and rules and limits are judged with the costs of today."""
    slow = slow_board()
    found = verify("--device", slow, "--json", status=0).json
    stated = json.loads(SOLVED.read_text())
    assert found["violations"] == []
    notes = [note for note in found["notes"] if note.startswith("computed with other costs: ")]
    for key in ("energy_j", "compute_s", "makespan_s"):
        assert found[key] > stated[key]
        note = f"computed with other costs: {key}: the file says {stated[key]!r}, the simulation "
        assert f"{note}gives {found[key]!r}" in notes
    assert "status and bounds of its file are not used" in found["notes"][-len(notes) - 1]
    late = verify("--device", slow, "--json", problem={"deadline_s": 6.1}, status=3).json
    assert [fault.split()[0] for fault in late["violations"]] == ["time"]
    forged = verify("--device", slow, peak_ram_bytes=303, problem={"deadline_s": None}, status=3)
    assert "peak_ram_bytes: the file says 303" in forged.out


def test_forged_metrics_of_equal_costs_are_violations():
    """False metrics are violations; if the file has no hash of its costs, a note is added."""
    remark = "costs may have changed"
    forged = verify("--device", BOARD_FILE, energy_j=5.0, status=3)
    assert "energy_j: the file says 5.0" in forged.out
    assert remark not in forged.err
    without(SOLVED, "costs", "written_by")
    forged = verify("--device", BOARD_FILE, energy_j=5.0, status=3)
    assert "energy_j: the file says 5.0" in forged.out
    assert remark in forged.err
    stated = verify("--device", BOARD_FILE, "--json").json["energy_j"]
    true = verify("--device", BOARD_FILE, energy_j=stated, status=0)
    assert remark not in true.err


def test_a_file_of_other_costs_proves_nothing(tmp_path):
    """Explain, diff, report and plan print this, and show no status or bound of the file."""
    slow = ("--device", slow_board())
    page = tmp_path / "r.html"
    commands = {
        ("explain", SOLVED): lambda values: values["status"],
        ("diff", SOLVED, SOLVED): lambda values: values["schedules"][0]["status"],
        ("report", SOLVED, "--out", page): lambda values: values["schedules"][0]["status"],
        ("plan", SOLVED): lambda _: "feasible",
    }
    for words, status_of in commands.items():
        done = invoke(*words, "--graph", CHAIN, *slow, "--json", status=0)
        assert "computed with other costs: energy_j: the file says 6.004" in done.err
        assert status_of(done.json) == "feasible"
        done = invoke(*words, "--graph", CHAIN, "--json", status=0)
        assert "other costs" not in done.err


def test_keys_of_later_versions_are_noted(plan_file):
    """Each command reads such files, graph files included, and lists the ignored keys."""
    later = {"colour": 1, "written_by": "poetmodel 0.3.0"}
    note = "unknown key 'colour' ignored: the file was written by poetmodel 0.3.0"
    for path, words in (
        (plan_file, ("verify", plan_file)),
        (SOLVED, ("verify", SOLVED)),
        (SOLVED, ("explain", SOLVED)),
        (SOLVED, ("diff", SOLVED, SOLVED)),
        (SOLVED, ("report", SOLVED, "--out", "later.html")),
        (SOLVED, ("plan", SOLVED)),
        (CHAIN, ("inspect",)),
    ):
        original = path.read_text()
        changed_plan(path, **later)
        assert note in invoke(*words, "--graph", CHAIN, status=0).err
        assert note not in invoke("-q", *words, "--graph", CHAIN).err
        changed_plan(path, version=9)
        refused = invoke(*words, "--graph", CHAIN, status=2).err
        assert "the file was written by poetmodel 0.3.0, this is poetmodel" in refused
        path.write_text(original)


# -- plans ---------------------------------------------------------------------------------------
PROGRAM = "c0 o0 c1 c2 w0 f0 c3 c4 f1 f2 f3 i0 w0 c5 f0 f4"
"""`chain`, with x on storage from h2 on: its peak is at g2, 304 B."""


@pytest.fixture
def plan_file():
    """Return the file of a plan of `chain`."""
    path = Path("chain.plan.json")
    graph = Graph.load(CHAIN)
    made = parse_plan(
        PROGRAM,
        identity=GraphIdentity.from_graph(graph),
        ram_budget_bytes=304,
        device=str(BOARD_FILE),
    )
    made.save(path, check_plan(graph, Costs.estimate(graph, Device.load(BOARD_FILE)), made))
    return path


def changed_plan(path, **changes):
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def verify_plan(path, graph, *arguments, **due):
    """Run the command."""
    return invoke("verify", path, "--graph", graph, *arguments, **due)


def test_storage_is_that_of_the_option(plan_file):
    """A plan solved for another storage than the device's: x needs 100 B there."""
    small = BOARD_FILE.read_text().replace("aux_bytes = 1_000_000", "aux_bytes = 99")
    Path("small.toml").write_text(small)
    given = ("--device", "small.toml")
    less = verify_plan(plan_file, CHAIN, *given, "--json")
    assert (less.status, less.json["violations"]) == (
        3,
        ["storage used 100 B is above the limit of 99 B"],
    )
    assert verify_plan(plan_file, CHAIN, *given, "--aux", "100B").status == 0
    assert verify_plan(plan_file, CHAIN, "--aux", "99").status == 3
    assert verify_plan(plan_file, CHAIN, "--aux", "much").status == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (("--ram", "304", "--deadline", "6.1s"), None),
        (("--ram", "303"), "peak RAM 304 B is 1 B above the 303 B that tensors may use"),
        (("--deadline", "6s"), "makespan 6.002 s is above the deadline of 6 s"),
    ],
)
def test_given_limits_replace_those_of_the_plan(plan_file, limits, words):
    """A plan is held against RAM, storage and deadline; other limits are those of schedules."""
    found = verify_plan(plan_file, CHAIN, *limits, "--json", status=3 if words else 0)
    assert all(words in fault for fault in found.json["violations"])
    assert len(found.json["violations"]) == bool(words)
    assert verify_plan(plan_file, CHAIN, "--no-paging").status == 2


def test_valid_plan(plan_file, told):
    """Exit 0, and the figures of the walk."""
    done = verify_plan(plan_file, CHAIN, status=0)
    told(done.out)
    told(done.err, "then")
    found = verify_plan(plan_file, CHAIN, "--json").json
    stated = json.loads(plan_file.read_text())
    assert (found["valid"], found["violations"]) == (True, [])
    for key in ("makespan_s", "stall_s", "compute_s", "transfer_s", "energy_j", "peak_ram_bytes"):
        assert found[key] == stated[key]
    assert found["makespan_s"] == pytest.approx(6.002)  # page-out beside h1, page-in is stall
    assert found["mode"] == "dma"


def test_binary_plan_is_checked_as_its_file():
    """The graph is the given one, or the built-in one with its hash; damage is named."""
    graph, binary = Graph.load(CHAIN), Path("chain.plan")
    made = parse_plan(PROGRAM, device=str(BOARD_FILE))
    data = encode(made, graph)
    binary.write_bytes(data)
    done = verify_plan(binary, CHAIN, "--json", status=0)
    assert done.json["peak_ram_bytes"] == 304
    assert "states no RAM budget" in done.err
    assert verify_plan(binary, "mlp").status == 2
    assert "missing graph" in invoke_refused("verify", binary)
    binary.write_bytes(data[:-3])
    assert "chain.plan: the binary plan is cut off" in verify_plan(binary, CHAIN, status=2).err


@pytest.mark.parametrize(
    "change", [{"ram_budget_bytes": 303}, {"makespan_s": 6.0}, {"program": 12}]
)
def test_broken_programs_limits_and_figures_are_named(plan_file, change, told):
    """The budget is checked, all stated values are compared, and no wait may be missing."""
    if "program" in change:
        program = json.loads(plan_file.read_text())["program"]
        change = {"program": program[:12] + program[13:]}
    done = verify_plan(changed_plan(plan_file, **change), CHAIN, status=3)
    told(done.verdict)


def test_without_costs_memory_is_checked(plan_file, told):
    """Without costs, times are not checked, with a note; metrics of other costs are reported."""
    changed_plan(plan_file, device="elsewhere", makespan_s=1.0)
    done = verify_plan(plan_file, CHAIN, "--json", status=0)
    assert done.json["makespan_s"] is None
    assert done.json["peak_ram_bytes"] == 304
    told(done.err)
    done = verify_plan(plan_file, CHAIN, "--profile", PROFILE, "--json", status=0)
    assert done.json["makespan_s"] == 7.0
    note = "computed with other costs: makespan_s: the file says 1.0, the simulation gives 7.0"
    assert note in done.json["notes"]
    changed_plan(plan_file, peak_ram_bytes=303)
    done = verify_plan(plan_file, CHAIN, "--profile", PROFILE, "--json", status=3)
    assert len(done.json["violations"]) == 1
    assert "peak_ram_bytes: the file says 303" in done.json["violations"][0]


def test_unreadable_plans(plan_file, told):
    """Names not of the graph, another graph, a cut file: exit 2; the word elsewhere is no plan."""
    assert verify_plan(plan_file, "mlp").status == 2
    told(verify_plan(changed_plan(plan_file, nodes=list("abcdef")), CHAIN, status=2).err)
    plan_file.write_text(plan_file.read_text()[:40])
    told(verify_plan(plan_file, CHAIN).err, "cut off")
    path = Path("x.json")
    path.write_text('{"format": "poetmodel-schedule", "device": "poetmodel-plan"}')
    done = verify_plan(path, CHAIN)
    assert (done.status, "R: " in done.err or "nodes: missing" in done.err) == (2, True)


def test_a_percentage_of_a_plan_in_tiles_is_that_of_the_whole_graph(tmp_path):
    """As in ``solve``: 70 % of the keep-all peak without tiles, for the schedule and its plan."""
    schedule, plan = tmp_path / "t.schedule.json", tmp_path / "t.plan.json"
    given = ("--state", "sgd", "--tile", "2KiB", "--in-place", "--device", "mkr1000")
    limits = (*given, "--ram", "70%")
    invoke("solve", "mlp", *limits, "--time-limit", "20", "--out", schedule, "--plan", plan)
    for file in (schedule, plan):
        invoke("verify", file, "--graph", "mlp", *limits, status=0)
    again = invoke("plan", schedule, "--graph", "mlp", *limits, "--json", status=0)
    assert again.json["peak_ram_bytes"] <= again.json["ram_budget_bytes"]
