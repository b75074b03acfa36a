"""``--constraints``: own rows and objectives, from their file to the files that commands write."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke, invoke_refused

WEAR = '[[constraint]]\nname = "wear"\nsum = {"bytes_written" = 1}\nat_most = "0.1kB"\n'
"""At most one of the tensors of 100 B may be written."""


def solve(text, *arguments, **due):
    """Run the command on the chain and the board, with the text of a file of constraints."""
    path = Path("rows.toml")
    path.write_text(text)
    problem = ("--graph", CHAIN, "--device", BOARD_FILE, "--constraints", path)
    return invoke("solve", *problem, *arguments, **due)


def test_faults_of_the_file_end_with_status_2(told):
    """A line for each, with the file and the place, and no traceback; it is not written over."""
    outcome = solve('[[constraint]]\nname = "wear"\nsum = {"byte_written" = 1}\nmost = 3\n')
    assert (outcome.status, outcome.out) == (2, "")
    file = Path("rows.toml")
    assert outcome.err.splitlines() == [
        f"error: {file}: constraint[0] ('wear').most: unknown key; did you mean at_most?",
        f"error: {file}: constraint[0] ('wear').sum: 'byte_written': did you mean bytes_written?",
        f"error: {file}: constraint[0] ('wear'): expected at_most, at_least or both, or equals "
        "alone; got none",
    ]
    told(solve(WEAR, "--ram", "350", "--out", Path("rows.toml"), status=2).err)
    assert (Path("rows.toml")).read_text() == WEAR


def test_several_files_add_up(told):
    """Rows of all files count; two objectives contradict each other."""
    more = Path("more.toml")
    more.write_text(WEAR.replace("wear", "bus").replace("bytes_written", "bytes_read"))
    document = solve(WEAR, "--constraints", more, "--ram", "350", "--json").json
    assert document["problem"]["constraints"] == [
        {"name": "wear", "terms": {"bytes_written": 1}, "lower": None, "upper": 100},
        {"name": "bus", "terms": {"bytes_read": 1}, "lower": None, "upper": 100},
    ]
    assert "weights" not in document["problem"]
    more.write_text('[objective]\nsum = {"bytes_read" = 1}\n')
    told(solve('[objective]\nsum = {"energy_j" = 1}\n', "--constraints", more, status=2).err)


def test_an_objective_excludes_minimize(told):
    """Two of them would contradict each other, also where the option names the default."""
    text = '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-6}\n'
    told(solve(text, "--minimize", "energy", status=2).err)
    document = solve(text, "--ram", "400", "--json").json
    assert document["problem"]["minimize"] == "own"
    assert document["problem"]["weights"] == {"energy_j": 1, "bytes_written": 1e-06}
    assert document["objective"]["minimize"] == "own"


EACH = WEAR + '\n[[constraint]]\neach = "recomputations:h*"\nat_most = 1\n'


def test_the_table_has_each_row_with_its_value_and_limit():
    """The table has each row with its value and limit, and an own objective with its weights."""
    lines = solve(EACH, "--ram", "350").out.splitlines()
    rows = {line.split("  ")[0]: line.split(maxsplit=1)[1] for line in lines if "at most" in line}
    assert rows["wear"].split("  ")[-1].strip() == "at its limit: at most 100 B"
    assert rows["constraint 2[h1]"].endswith("at most 1")
    assert "at its limit" not in rows["constraint 2[h1]"]
    text = '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-4}\n'
    out = solve(text, "--ram", "350").out
    rows = out.splitlines()
    line, gap = (row for row in rows if "user-defined objective" in row)
    assert "6.014" in line
    assert "gap" in gap
    assert "energy_j + 0.0001 bytes_written; bound 6.014" in " ".join(out.split())
    document = solve(text.replace("1e-4", "2e-2"), "--ram", "350", "--json").json
    assert document["objective"]["value"] == pytest.approx(7.0)
    assert document["M_out"] == []


@pytest.fixture
def schedule_file():
    """Return the file of the schedule that pages the sample, with the row about wear."""
    path = Path("c.schedule.json")
    assert solve(EACH, "--ram", "350", "--out", path).status == 0
    return path


def rewrite(path, **limits):
    """Change the first row of a schedule file."""
    document = json.loads(path.read_text())
    document["problem"]["constraints"][0] |= limits
    path.write_text(json.dumps(document))


def test_verify_holds_a_file_to_its_rows(schedule_file, told):
    """A broken row is a violation by its name: exit 3; of times only where there are costs."""
    command = ("verify", schedule_file, "--graph", CHAIN)
    outcome = invoke(*command, status=0)
    told(outcome.out)
    (first, *_) = invoke(*command, "--json").json["constraints"]
    assert (first["name"], first["value"], first["at_limit"]) == ("wear", 100, True)
    rewrite(schedule_file, upper=99)
    outcome = invoke(*command, status=3)
    told(outcome.verdict, "then")
    told(outcome.lines_from("wear"), "row")
    rewrite(schedule_file, upper=100)
    document = json.loads(schedule_file.read_text())
    document["device"] = "unknown board"
    timed = {"name": "late", "terms": {"compute_s": 1}, "lower": 100, "upper": None}
    document["problem"]["constraints"].append(timed)
    schedule_file.write_text(json.dumps(document))
    assert invoke(*command).status == 0
    rewrite(schedule_file, upper=99)
    assert invoke(*command).status == 3


@pytest.mark.parametrize("claim", [{"value": 1.0}, {"bound": 1e9}])
def test_verify_holds_a_file_to_its_own_objective(claim, told):
    """The stated value of a user-defined objective is compared with the simulation."""
    path = Path("own.schedule.json")
    text = '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-6}\n'
    assert solve(text, "--ram", "350", "--out", path).status == 0
    command = ("verify", path, "--graph", CHAIN, "--device", BOARD_FILE)
    assert invoke(*command).status == 0
    document = json.loads(path.read_text())
    document["objective"] |= claim
    path.write_text(json.dumps(document))
    outcome = invoke(*command, status=3)
    told(outcome.verdict)
    del document["problem"]["weights"]
    path.write_text(json.dumps(document))
    told(invoke_refused(*command), "then")


@pytest.mark.parametrize("changed", [{"terms": {"page_ins:h9": 1}}, {"name": "constraint 2[h1]"}])
def test_faulty_rows_of_a_file_are_named(changed, schedule_file, told):
    """Faults are reported with file and row: exit 2."""
    rewrite(schedule_file, **changed)
    for command in ("verify", "explain"):
        told(invoke_refused(command, schedule_file, "--graph", CHAIN), command)


def test_diff_and_explain_and_report_carry_the_rows(schedule_file, told):
    """Values beside each other, in JSON, and on the page."""
    about = ("--graph", CHAIN)
    told(invoke("diff", schedule_file, schedule_file, *about).out)
    (one, other) = invoke("diff", schedule_file, schedule_file, *about, "--json").json["schedules"]
    assert one["constraints"] == other["constraints"]
    explained = invoke("explain", schedule_file, *about, "--json").json
    assert [row["name"] for row in explained["constraints"]] == [
        "wear",
        "constraint 2[h1]",
        "constraint 2[h2]",
    ]
    page = Path("r.html")
    reported = invoke("report", schedule_file, *about, "--out", page, "--json").json
    assert reported["schedules"][0]["constraints"] == explained["constraints"]
    text = page.read_text()
    assert "User-defined constraints" in text
    assert "100 B; at its limit: at most 100 B" in text
    assert "3 user-defined constraints met" in text


def test_the_report_says_how_to_solve_again():
    """Its commands write the file of constraints and have the same schedule, objective included."""
    path = Path("c.schedule.json")
    text = EACH + '[objective]\nsum = {"energy_j" = 1, "bytes_written" = 1e-06, "constant" = 2}\n'
    assert solve(text, "--ram", "350", "--out", path).status == 0
    before = path.read_text()
    about = ("--graph", CHAIN, "--out", Path("r.html"))
    found = invoke("report", path, *about, "--json").json["schedules"][0]["commands"]
    written, again, _ = found
    subprocess.run(["sh", "-c", written], check=True)
    path.unlink()
    assert invoke(*shlex.split(again)[1:]).status == 0
    after = path.read_text()
    keys = ("problem", "objective", "R", "M_out")
    one, other = ({key: json.loads(each)[key] for key in keys} for each in (before, after))
    assert one == other


def test_a_method_that_breaks_a_row_ends_with_status_4(told):
    """The reason names the row; a method that keeps it has a schedule."""
    strict = WEAR.replace("0.1kB", "99B")
    told(solve(strict, "--ram", "350", "--method", "lru-paging", status=4).err)
    told(solve(strict, "--ram", "350", "--method", "paging-only", status=4).err, "then")
    document = solve(strict, "--ram", "404", "--method", "checkpoint-all", "--json").json
    assert document["problem"]["constraints"][0]["upper"] == 99


def test_limits_keep_the_rows():
    """The limits include the rows: without a page-out, the minimum is keep-all, 404 B."""
    path = Path("rows.toml")
    path.write_text(WEAR.replace("0.1kB", "0B"))
    problem = ("--graph", CHAIN, "--device", BOARD_FILE, "--constraints", path)
    found = invoke("limits", *problem, "--no-recompute", "--json").json
    assert found["ram"]["page"]["value"] == 304
    assert found["ram"]["stated"]["value"] == 404
    _, found, rest = invoke("limits", *problem, "--no-recompute").out.partition("RAM, all limits")
    assert found
    assert "1 user-defined constraint" in " ".join(rest.split())


def test_infeasible_rows_are_named_with_the_nearest_limit():
    """Hints on stderr and in JSON name the rows, exit 3; the recommended limit is feasible."""
    strict = WEAR.replace("0.1kB", "0.05kB")
    outcome = solve(strict, "--ram", "350", "--no-recompute", "--json", status=3)
    first, *hints = outcome.err.splitlines()
    assert "'wear' (at most 50 B)" in first
    assert hints == [
        "hint: constraint 'wear' cannot be met together with the RAM budget and no recomputation",
        "hint: feasible from 404 bytes of RAM, which 'g2' takes with x, h1, h2 and 2 more in RAM",
        "hint: feasible with recomputation",
        "hint: feasible with constraint 'wear' at most 100 bytes",
    ]
    answer = outcome.json["infeasible"]
    assert answer["constraints"] == ["wear"]
    assert answer["limits"] == ["the RAM budget", "no recomputation"]
    assert answer["changes"][-1]["nearest"] == 100
    assert solve(strict.replace("0.05kB", "100B"), "--ram", "350", "--no-recompute").status == 0


def test_no_innocent_constraint_is_named():
    """A constraint outside the conflict is not in the output, not even in a larger set."""
    harmless = '[[constraint]]\nname = "harmless"\nsum = {"bytes_read" = 1}\nat_most = 1000000\n'
    strict = WEAR.replace("0.1kB", "0.05kB") + harmless
    limits = ("--ram", "350", "--no-recompute", "--deadline", "1h", "--json")
    outcome = solve(strict, *limits, status=3)
    assert "'wear' (at most 50 B)" in outcome.err
    assert "harmless" not in outcome.err + str(outcome.json["infeasible"])
    assert "the deadline" not in outcome.err
