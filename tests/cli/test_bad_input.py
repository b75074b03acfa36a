"""Whatever is wrong with the input: a sentence that names it, the right status, nothing written."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import (
    BOARD,
    chain,
    invoke,
    node,
    profile_rows,
    training_step,
    write_csv,
    write_graph,
)
from poetmodel.graph import Graph
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PRECIOUS = b"what was here before\x00\xff"
"""Content of the output file that no failure may touch."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return an output path where a file lies already."""
    path = tmp_path / "results" / "old.schedule.json"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


def check(out: Path, arguments: list[object], *fragments: str, status: int = 2) -> str:
    """Run ``solve --out``; check status, sentences and the old file; return stderr."""
    outcome = invoke("solve", *arguments, "--out", out)
    assert outcome.status == status, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    assert lines
    assert lines[0].startswith("error: ")
    assert all(line.startswith(("error: ", "hint: ", "and ")) for line in lines)
    for fragment in fragments:
        assert fragment in outcome.err
    assert out.read_bytes() == PRECIOUS
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return outcome.err


# -- graphs ------------------------------------------------------------------------------------


def changed(k: int, **keys: Any) -> Callable[[], dict[str, Any]]:
    """Return a maker of `chain` with other keys at node `k`."""

    def make() -> dict[str, Any]:
        document = chain()
        document["nodes"][k] |= keys
        return document

    return make


def top(**keys: Any) -> Callable[[], dict[str, Any]]:
    """Return a maker of `chain` with other keys at the top."""
    return lambda: chain() | keys


GRAPHS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "wrong format": (top(format="something-else"), ("format", "poetmodel-graph")),
    "wrong version": (top(version=99), ("version", "99", "expected 1")),
    "cycle": (changed(1, inputs=["g1"]), ("'h1'", "inputs", "cycle")),
    "duplicate node": (changed(2, name="h1"), ("nodes[2]", "'h1'", "name")),
    "unknown input": (changed(2, inputs=["h7"]), ("nodes[2]", "inputs", "'h7'")),
    "later input": (changed(1, inputs=["h2"]), ("nodes[1]", "inputs", "'h2'")),
    "own output": (changed(1, inputs=["h1"]), ("nodes[1]", "inputs", "'h1'")),
    "negative bytes": (changed(1, output_bytes=-1), ("nodes[1]", "output_bytes", "-1")),
    "fractional bytes": (changed(1, output_bytes=1.5), ("nodes[1]", "output_bytes", "1.5")),
    "NaN bytes": (changed(1, output_bytes=float("nan")), ("nodes[1]", "output_bytes", "nan")),
    "infinite bytes": (changed(1, output_bytes=float("inf")), ("nodes[1]", "output_bytes", "inf")),
    "huge bytes": (changed(1, output_bytes=10**30), ("nodes[1]", "output_bytes", "2^53")),
    "huge float": (changed(1, output_bytes=1e30), ("nodes[1]", "output_bytes", "2^53")),
    "bool bytes": (changed(1, output_bytes=True), ("nodes[1]", "output_bytes")),
    "text bytes": (changed(1, output_bytes="100"), ("nodes[1]", "output_bytes", "'100'")),
    "negative flops": (changed(1, flops=-1), ("nodes[1]", "flops", "-1")),
    "NaN flops": (changed(1, flops=float("nan")), ("nodes[1]", "flops", "nan")),
    "huge flops": (changed(1, flops=10**30), ("nodes[1]", "flops", "10^18")),
    "negative workspace": (changed(1, workspace_bytes=-1), ("nodes[1]", "workspace_bytes")),
    "unknown phase": (changed(1, phase="sideways"), ("nodes[1]", "phase", "forward", "sideways")),
    "unknown node key": (changed(1, colour="red"), ("nodes[1]", "colour", "unknown key")),
    "unknown top key": (top(colour="red"), ("colour", "unknown key")),
    "unknown resident": (top(resident_bytes={"cake": 1}), ("resident_bytes", "cake")),
    "no nodes": (top(nodes=[]), ("nodes", "at least 1")),
    "no node list": (top(nodes="many"), ("nodes", "list", "many")),
    "node is no object": (top(nodes=["x"]), ("nodes[0]", "object")),
    "one node": (top(nodes=[node("x")]), ("'chain'", "1 node", "at least 2")),
    "no outputs": (changed(1, outputs=[]), ("nodes[1]", "output_bytes or outputs")),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_bad_graph_exits_2_and_names_file_and_field(
    case: str, tmp_path: Path, board_file: Path, out: Path
) -> None:
    """A graph that breaks a rule is refused with its file, the place and what is accepted."""
    make, fragments = GRAPHS[case]
    path = write_graph(tmp_path / "bad.graph.json", make())
    if case != "one node":  # the file is fine then
        fragments += ("bad.graph.json",)
    check(out, ["--graph", path, "--device", board_file], *fragments)


def changed_step(**nodes: dict[str, Any]) -> dict[str, Any]:
    """Return `training_step` with other keys at some nodes; a key of None is left out."""
    document = training_step()
    document["nodes"] = [
        {
            key: value
            for key, value in (entry | nodes.get(entry["name"], {})).items()
            if value is not None
        }
        for entry in document["nodes"]
    ]
    return document


def replaces(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    """Return outputs that replace state tensors, with their bytes."""
    return [{"name": f"{old}+", "bytes": size, "replaces": old} for old, size in pairs]


STEPS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "replaced twice": (
        changed_step(u1={"inputs": ["dw1", "w1", "w2"], "outputs": replaces(("w2", 300))}),
        ("'u1'", "'w2'", "already"),
    ),
    "reader after the replacement": (
        changed_step(g1={"inputs": ["dr", "r", "w2"]}),
        ("'g1'", "'w2'", "read after", "last reader"),
    ),
    "reader of the replacement": (
        changed_step(g1={"inputs": ["dr", "r", "w2+"]}),
        ("'g1'", "'w2+'", "no node may read it in the same step"),
    ),
    "bytes that differ": (
        changed_step(u2={"outputs": replaces(("w2", 299))}),
        ("'u2'", "differ in bytes", "299", "300"),
    ),
    "recomputable update": (
        changed_step(u2={"recomputable": None}),
        ("'u2'", "recomputable", "expected false"),
    ),
    "in-place pairs that share an input": (
        changed_step(
            g1={
                "output_bytes": None,
                "outputs": [{"name": "g1", "bytes": 100}, {"name": "g0", "bytes": 100}],
                "in_place": {"g1": "dr", "g0": "dr"},
            }
        ),
        ("'g1'", "in_place", "takes over 'dr' already"),
    ),
    "in place of what is not read": (
        changed_step(g1={"in_place": {"g1": "x"}}),
        ("'g1'", "in_place", "'x' is no input"),
    ),
    "state with inputs": (
        changed_step(w2={"inputs": ["r"]}),
        ("'w2'", "inputs", "reads nothing"),
    ),
    "state with flops": (changed_step(w2={"flops": 0}), ("'w2'", "flops", "leave the key out")),
    "replaces no state": (
        changed_step(g1={"output_bytes": None, "outputs": replaces(("dr", 100))}),
        ("'g1'", "'dr'", "no state tensor"),
    ),
    "version 1 with keys of version 2": (
        training_step() | {"version": 1},
        ("'w1'", "'r'", "'u1'", '"version": 2', "says 1"),
    ),
}


@pytest.mark.parametrize("command", ["inspect", "solve", "verify"])
@pytest.mark.parametrize("case", STEPS)
def test_bad_state_exits_2_and_names_node_and_tensor(
    case: str, command: str, tmp_path: Path, board_file: Path, out: Path
) -> None:
    """What a graph with state or operators in place may not say is a sentence of every command."""
    document, fragments = STEPS[case]
    path = write_graph(tmp_path / "bad.graph.json", document)
    if command == "solve":
        check(out, ["--graph", path, "--device", board_file], "bad.graph.json", *fragments)
        return
    schedule = tmp_path / "good.schedule.json"
    graph = Graph.load(write_graph(tmp_path / "good.graph.json", training_step()))
    checkpoint_all(graph).save(schedule)
    words = ["inspect"] if command == "inspect" else ["verify", schedule]
    outcome = invoke(*words, "--graph", path)
    assert outcome.status == 2, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for fragment in ("error: ", "bad.graph.json", *fragments):
        assert fragment in outcome.err


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--count-parameters"], ("count_parameters", "'step'", "state")),
        (["--formulation", "paper"], ("paper", "state", "in-place", "lazy")),
    ],
)
def test_options_that_state_does_not_allow_exit_2(
    options: list[str], fragments: tuple[str, ...], tmp_path: Path, board_file: Path, out: Path
) -> None:
    """State counts in any case, and the formulation of the paper has none."""
    path = write_graph(tmp_path / "step.graph.json", training_step())
    board = ["--device", board_file, "--ram", "90%"]
    check(out, ["--graph", path, *board, *options], *fragments)


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"", ("empty",)),
        (b"\x00\xff\xfe\x80", ("binary",)),
        (b'{"format": "poetmodel-graph", "version": 1, "na', ("cut off",)),
        (b"[" * 100_000, ("nested",)),
        (b"[1, 2]", ("object",)),
        (
            b'{"format": "poetmodel-graph", "version": 1, "name": "a", "name": "b"}',
            ("name", "twice"),
        ),
        (b'{"version": 1' + b"0" * 5000 + b"}", ("digits",)),
        (b"hello", ("line 1", "JSON")),
    ],
    ids=["empty", "binary", "truncated", "nested", "list", "repeated key", "digits", "text"],
)
@pytest.mark.parametrize("how", ["option", "argument"])
def test_graph_file_that_is_none_exits_2(
    how: str,
    content: bytes,
    fragments: tuple[str, ...],
    tmp_path: Path,
    board_file: Path,
    out: Path,
) -> None:
    """A damaged graph file is refused by name, as an option and as an argument."""
    path = tmp_path / "bad.graph.json"
    path.write_bytes(content)
    graph = ["--graph", path] if how == "option" else [path]
    check(out, [*graph, "--device", board_file], "bad.graph.json", *fragments)


def test_many_faults_of_a_graph_come_one_a_line_and_the_rest_counted(
    tmp_path: Path, board_file: Path, out: Path
) -> None:
    """Of twenty faults the first eight are told, one a line, then how many more there are."""
    document = chain()
    document["nodes"] += [node(f"bad{k}", size=-1) for k in range(20)]
    path = write_graph(tmp_path / "bad.graph.json", document)
    lines = check(out, ["--graph", path, "--device", board_file], "bad0", "bad7").splitlines()
    assert len(lines) == 9
    assert lines[-1] == "and 12 more"


# -- devices -----------------------------------------------------------------------------------

DEVICES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "negative RAM": ("ram_bytes = 1_000_000", "ram_bytes = -1", ("ram_bytes", "-1")),
    "fractional RAM": ("ram_bytes = 1_000_000", "ram_bytes = 1.5", ("ram_bytes", "whole", "1.5")),
    "huge RAM": ("ram_bytes = 1_000_000", f"ram_bytes = {10**30}", ("ram_bytes", "2^53")),
    "no RAM": ("ram_bytes = 1_000_000", "", ("ram_bytes",)),
    "NaN rate": ("flops_per_s = 1e6", "flops_per_s = nan", ("flops_per_s", "finite", "nan")),
    "infinite rate": ("flops_per_s = 1e6", "flops_per_s = inf", ("flops_per_s", "finite", "inf")),
    "rate of 0": ("flops_per_s = 1e6", "flops_per_s = 0", ("flops_per_s", "> 0")),
    "negative latency": ("latency_s = 0.001", "latency_s = -1", ("page_in", "latency_s", "-1")),
    "unknown mode": ('mode = "blocking"', 'mode = "magic"', ("mode", "blocking", "dma", "magic")),
    "unknown key": ('core = "one core"', "cores = 4", ("cores", "unknown key")),
    "text for a number": ("flops_per_s = 1e6", 'flops_per_s = "fast"', ("flops_per_s", "fast")),
    "truncated": ("[storage.page_out]", "[storage.page_out", ("TOML",)),
    "binary": ("name", "\x00\x01", ("TOML",)),
}


@pytest.mark.parametrize("case", DEVICES)
def test_bad_device_exits_2_and_names_file_and_field(
    case: str, tmp_path: Path, chain_file: Path, out: Path
) -> None:
    """A device file that breaks a rule is refused with its name and the field."""
    old, new, fragments = DEVICES[case]
    assert old in BOARD
    path = tmp_path / "bad.toml"
    path.write_text(BOARD.replace(old, new))
    check(out, ["--graph", chain_file, "--device", path], "bad.toml", *fragments)


# -- profiles ----------------------------------------------------------------------------------


def with_cell(row: int, column: int, text: str) -> list[list[str]]:
    """Return the good profile with one other cell."""
    rows = profile_rows()
    rows[row][column] = text
    return rows


PROFILES: dict[str, tuple[list[list[str]], tuple[str, ...]]] = {
    "missing node": (profile_rows()[:-1], ("'g1'", "row")),
    "extra node": ([*profile_rows(), ["ghost", *"111111"]], ("'ghost'",)),
    "node twice": ([*profile_rows(), profile_rows()[1]], ("'x'",)),
    "missing column": ([row[:-1] for row in profile_rows()], ("page_out_energy_j",)),
    "extra column": ([[*row, "colour"] for row in profile_rows()], ("colour",)),
    "negative": (with_cell(1, 1, "-1"), ("compute_time_s", "-1")),
    "NaN": (with_cell(1, 2, "nan"), ("compute_energy_j", "nan")),
    "infinite": (with_cell(1, 3, "inf"), ("page_in_time_s", "inf")),
    "huge": (with_cell(1, 3, "1e999"), ("page_in_time_s", "1e999")),
    "text": (with_cell(2, 4, "cheap"), ("page_in_energy_j", "cheap")),
    "empty": ([], ()),
}


@pytest.mark.parametrize("case", PROFILES)
def test_bad_profile_exits_2_and_names_file_and_field(
    case: str, tmp_path: Path, chain_file: Path, out: Path
) -> None:
    """A profile that is malformed or does not fit the graph is refused with its name."""
    rows, fragments = PROFILES[case]
    path = write_csv(tmp_path / "bad.csv", rows)
    arguments = ["--graph", chain_file, "--profile", path, "--ram", "90%"]
    check(out, arguments, "bad.csv", *fragments)


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"PK\x03\x04\x80"])
def test_binary_profile_exits_2(
    content: bytes, tmp_path: Path, chain_file: Path, out: Path
) -> None:
    """A profile that is no text is refused by name."""
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    check(out, ["--graph", chain_file, "--profile", path, "--ram", "90%"], "bad.csv", "binary")


# -- options -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Options beside a good graph and board, and what the sentence must say."""

    options: tuple[str, ...]
    fragments: tuple[str, ...]
    status: int = 2
    document: dict[str, Any] = field(default_factory=chain)


OPTIONS = [
    Case(("--ram", "0"), ("ram", "at least 1 byte")),
    Case(("--ram", "0%"), ("ram", "at least 1 byte")),
    Case(("--ram", "-5"), ("ram", "256KiB", "'-5'")),
    Case(("--ram", "-5%"), ("ram", "50%", "'-5%'")),
    Case(("--ram", "40 %%"), ("ram", "50%", "'40 %%'")),
    Case(("--ram", "0.4"), ("ram", "fraction", "40%")),
    Case(("--ram", "5 parsecs"), ("ram", "parsecs", "KiB")),
    Case(("--ram", "1e30"), ("ram", "2^53")),
    Case(("--ram", "nan"), ("ram", "'nan'")),
    Case(("--ram", "inf"), ("ram", "'inf'")),
    Case(("--ram", ""), ("ram", "''")),
    Case(("--aux", "-1"), ("aux", "'-1'")),
    Case(("--aux", "lots"), ("aux", "'lots'")),
    Case(("--deadline", "5"), ("deadline", "no unit", "20ms")),
    Case(("--deadline", "-1s"), ("deadline", "'-1s'")),
    Case(("--deadline", "0s"), ("deadline", "above 0")),
    Case(("--deadline", "1 fortnight"), ("deadline", "fortnight")),
    Case(("--deadline", "1e400s"), ("deadline",)),
    Case(("--within", "6h"), ("within", "--samples")),
    Case(("--samples", "0"), ("samples", "from 1", "0")),
    Case(("--samples", "5", "--within", "soon"), ("within", "'soon'")),
    Case(("--samples", "5", "--within", "1h", "--deadline", "1s"), ("within", "--deadline")),
    Case(
        ("--samples", "5", "--battery", "1Wh", "--energy-budget", "1J"),
        ("battery", "--energy-budget"),
    ),
    Case(("--deadline-counts", "moon"), ("--deadline-counts", "'moon'", "serial")),
    Case(("--energy-budget", "5"), ("energy budget", "no unit")),
    Case(("--energy-budget", "0J"), ("energy budget", "above 0")),
    Case(("--minimize", "regret"), ("--minimize", "'regret'", "writes")),
    Case(("--backend", "abacus"), ("--backend", "'abacus'", "highs")),
    Case(("--formulation", "poem"), ("--formulation", "'poem'", "compact")),
    Case(("--time-limit", "0"), ("--time-limit", "above 0", "'0'")),
    Case(("--time-limit", "-1"), ("--time-limit", "above 0", "'-1'")),
    Case(("--time-limit", "nan"), ("--time-limit", "above 0", "'nan'")),
    Case(("--time-limit", "inf"), ("--time-limit", "above 0", "'inf'")),
    Case(("--time-limit", "soon"), ("--time-limit", "above 0", "'soon'")),
    Case(("--gap", "-0.1"), ("--gap", "'-0.1'", "0.01")),
    Case(("--gap", "nan"), ("--gap", "'nan'")),
    Case(("--gap", "inf"), ("--gap", "'inf'")),
    Case(("--gap", "1%"), ("--gap", "'1%'")),
    Case(("--threads", "0"), ("--threads", "'0'", "from 1")),
    Case(("--threads", "-2"), ("--threads", "'-2'")),
    Case(("--threads", "1.5"), ("--threads", "'1.5'")),
    Case(("--threads", "1000000000"), ("threads", "1000000000")),
    Case(("--colour", "red"), ("--colour",)),
    Case(("--ram",), ("--ram",)),
    Case(("extra",), ("extra", "--graph", "give only one")),
    Case(("--ram", "303B"), ("304", "g2", "h1", "h2", "loss"), 3),
    Case(("--ram", "10%"), ("304", "g2", "h1", "h2", "loss"), 3),
    Case(("--deadline", "5.9s"), ("deadline", "6 s"), 3),
    Case(("--deadline", "99%"), ("deadline", "6 s"), 3),
    Case(("--deadline", "99%", "--deadline-counts", "compute"), ("deadline", "6 s"), 3),
    Case(("--energy-budget", "99%"), ("energy",), 3),
    Case(
        ("--ram", "2000", "--count-parameters"),
        ("304", "g2", "parameters", "2,304 B"),
        3,
        chain() | {"resident_bytes": {"parameters": 1000, "gradients": 1000}},
    ),
]


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: " ".join(case.options))
def test_bad_option_exits_with_its_status_and_is_named(
    case: Case, tmp_path: Path, board_file: Path, out: Path
) -> None:
    """An option that cannot be used is named with what is accepted; proven infeasible exits 3."""
    path = write_graph(tmp_path / "chain.graph.json", case.document)
    arguments = ["--graph", path, "--device", board_file, *case.options]
    if case.options == ("--ram",):  # its value is missing at the end of the line
        outcome = invoke("solve", *arguments)
        assert outcome.status == 2
        assert "--ram" in outcome.err
        return
    check(out, arguments, *case.fragments, status=case.status)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--device", "rpi4b"], ("no graph", "MODEL", "--graph FILE")),
        (["resnet81", "--device", "rpi4b"], ("'resnet81'", "resnet18")),
        (["paper/vgg", "--device", "rpi4b"], ("'paper/vgg'", "paper/vgg16")),
        (["nowhere/g.graph.json", "--device", "rpi4b"], ("nowhere/g.graph.json", "no such file")),
        (["--graph", "nowhere.json", "--device", "rpi4b"], ("nowhere.json", "no such file")),
        (["--graph", ".", "--device", "rpi4b"], ("folder",)),
        (["mlp"], ("no costs", "--device", "--profile")),
        (["mlp", "--device", "rpi5b"], ("'rpi5b'", "rpi4b")),
        (["mlp", "--device", "nowhere.toml"], ("nowhere.toml", "no such file")),
        (["mlp", "--profile", "nowhere.csv", "--ram", "50%"], ("nowhere.csv", "no such file")),
        (
            ["mlp", "--graph", "mlp.json", "--device", "rpi4b"],
            ("'mlp'", "--graph", "give only one"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_or_missing_input_exits_2(
    arguments: list[object], fragments: tuple[str, ...], out: Path
) -> None:
    """A model, device or file that does not exist, or is not given, is named."""
    check(out, arguments, *fragments)


def test_profile_alone_needs_a_budget(chain_file: Path, profile_file: Path, out: Path) -> None:
    """Without a device nothing says how much RAM there is."""
    check(out, ["--graph", chain_file, "--profile", profile_file], "ram", "256KiB")


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "fragments"),
    [
        ("missing/x.schedule.json", ("missing", "does not exist")),
        ("", ("folder",)),
        ("chain.graph.json", ("input file",)),
        ("board.toml", ("input file",)),
        ("chain.graph.json/x.schedule.json", ("cannot be written",)),
    ],
)
def test_bad_output_exits_2_before_solving(
    place: str, fragments: tuple[str, ...], tmp_path: Path, chain_file: Path, board_file: Path
) -> None:
    """An output that cannot be written, or is an input, is refused and nothing is changed."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    outcome = invoke(
        "solve", chain_file, "--device", board_file, "--time-limit", "1", "--out", tmp_path / place
    )
    assert outcome.status == 2
    assert "Traceback" not in outcome.err
    for fragment in fragments:
        assert fragment in outcome.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_read_only_folder_exits_2(
    tmp_path: Path, chain_file: Path, board_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output in a folder that takes no files is refused and the folder named."""

    def refuse(**_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)  # root may write anywhere
    outcome = invoke("solve", chain_file, "--device", board_file, "--out", folder / "x.json")
    assert outcome.status == 2
    assert "locked" in outcome.err
    assert "cannot be written" in outcome.err
    assert "Traceback" not in outcome.err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["inspect", "models", "devices", "verify"])
def test_other_commands_name_a_missing_file_too(command: str, tmp_path: Path) -> None:
    """Every command that reads a file names one that is missing and exits 2."""
    name = tmp_path / "missing.json"
    arguments = [name, "--graph", "mlp"] if command == "verify" else [name]
    outcome = invoke(command, *arguments)
    assert outcome.status == 2
    assert "missing.json" in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_json_does_not_change_how_errors_are_told(chain_file: Path, board_file: Path) -> None:
    """With --json an error still is a sentence on stderr, and stdout stays empty."""
    outcome = invoke("solve", chain_file, "--device", board_file, "--ram", "0", "--json")
    assert (outcome.status, outcome.out) == (2, "")
    assert "ram" in outcome.err


def test_infeasible_problem_prints_its_object_with_json(chain_file: Path, board_file: Path) -> None:
    """With --json it prints null figures and no relations, and the reason on stderr."""
    outcome = invoke("solve", chain_file, "--device", board_file, "--ram", "303", "--json")
    assert outcome.status == 3
    document = json.loads(outcome.out)
    assert document["status"] == "infeasible"
    assert document["energy_j"] is None
    assert document["bound_j"] is None
    assert "R" not in document
    assert "304" in outcome.err
