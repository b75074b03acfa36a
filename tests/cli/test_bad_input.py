"""Whatever is wrong with the input: a sentence that names it, the right status, nothing written."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.commands import (
    BOARD,
    BOARD_FILE,
    CHAIN,
    PROFILE,
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
    from kit.messages import Told

PRECIOUS = b"what was here before\x00\xff"
"""Content of the output file that no failure may touch."""


@pytest.fixture
def out() -> Path:
    """Return an output path where a file lies already."""
    path = Path("results") / "old.schedule.json"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


def refusal(out: Path, *arguments: object, status: int = 2) -> str:
    """Run ``solve --out``; check status, streams and the old file; return stderr."""
    outcome = invoke("solve", *arguments, "--out", out)
    assert (outcome.status, outcome.out) == (status, ""), outcome.err
    lines = outcome.err.splitlines()
    assert lines
    assert lines[0].startswith("error: ")
    assert all(line.startswith(("error: ", "hint: ", "and ")) for line in lines)
    assert out.read_bytes() == PRECIOUS
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return outcome.err


# -- graphs ------------------------------------------------------------------------------------


def changed(k: int, **keys: Any) -> dict[str, Any]:
    """Return `chain` with other keys at node `k`."""
    document = chain()
    document["nodes"][k] |= keys
    return document


GRAPHS: dict[str, dict[str, Any]] = {
    "wrong format": chain() | {"format": "something-else"},
    "wrong version": chain() | {"version": 99},
    "cycle": changed(1, inputs=["g1"]),
    "duplicate node": changed(2, name="h1"),
    "unknown input": changed(2, inputs=["h7"]),
    "later input": changed(1, inputs=["h2"]),
    "own output": changed(1, inputs=["h1"]),
    "negative bytes": changed(1, output_bytes=-1),
    "fractional bytes": changed(1, output_bytes=1.5),
    "NaN bytes": changed(1, output_bytes=float("nan")),
    "infinite bytes": changed(1, output_bytes=float("inf")),
    "huge bytes": changed(1, output_bytes=10**30),
    "huge float": changed(1, output_bytes=1e30),
    "bool bytes": changed(1, output_bytes=True),
    "text bytes": changed(1, output_bytes="100"),
    "negative flops": changed(1, flops=-1),
    "NaN flops": changed(1, flops=float("nan")),
    "huge flops": changed(1, flops=10**30),
    "negative workspace": changed(1, workspace_bytes=-1),
    "unknown phase": changed(1, phase="sideways"),
    "unknown node key": changed(1, colour="red"),
    "unknown top key": chain() | {"colour": "red"},
    "unknown resident": chain() | {"resident_bytes": {"cake": 1}},
    "no nodes": chain() | {"nodes": []},
    "no node list": chain() | {"nodes": "many"},
    "node is no object": chain() | {"nodes": ["x"]},
    "one node": chain() | {"nodes": [node("x")]},
    "no outputs": changed(1, outputs=[]),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_bad_graph_exits_2_and_names_file_and_field(case: str, out: Path, told: Told) -> None:
    """A graph that breaks a rule is refused with its file, the place and what is accepted."""
    path = write_graph(Path("bad.graph.json"), GRAPHS[case])
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))


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


STEPS: dict[str, dict[str, Any]] = {
    "replaced twice": changed_step(
        u1={"inputs": ["dw1", "w1", "w2"], "outputs": replaces(("w2", 300))}
    ),
    "reader after the replacement": changed_step(g1={"inputs": ["dr", "r", "w2"]}),
    "reader of the replacement": changed_step(g1={"inputs": ["dr", "r", "w2+"]}),
    "bytes that differ": changed_step(u2={"outputs": replaces(("w2", 299))}),
    "recomputable update": changed_step(u2={"recomputable": None}),
    "in-place pairs that share an input": changed_step(
        g1={
            "output_bytes": None,
            "outputs": [{"name": "g1", "bytes": 100}, {"name": "g0", "bytes": 100}],
            "in_place": {"g1": "dr", "g0": "dr"},
        }
    ),
    "in place of what is not read": changed_step(g1={"in_place": {"g1": "x"}}),
    "state with inputs": changed_step(w2={"inputs": ["r"]}),
    "state with flops": changed_step(w2={"flops": 0}),
    "replaces no state": changed_step(g1={"output_bytes": None, "outputs": replaces(("dr", 100))}),
    "version 1 with keys of version 2": training_step() | {"version": 1},
}


@pytest.mark.parametrize("case", STEPS)
def test_bad_state_exits_2_and_names_node_and_tensor(case: str, out: Path, told: Told) -> None:
    """What a graph with state or operators in place may not say is a sentence of every command."""
    path = write_graph(Path("bad.graph.json"), STEPS[case])
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))
    schedule = Path("good.schedule.json")
    graph = Graph.load(write_graph(Path("good.graph.json"), training_step()))
    checkpoint_all(graph).save(schedule)
    for words in (("inspect",), ("verify", schedule)):
        outcome = invoke(*words, "--graph", path)
        assert (outcome.status, outcome.out) == (2, "")
        told(outcome.err)


@pytest.mark.parametrize("options", [("--count-parameters",), ("--formulation", "paper")])
def test_options_that_state_does_not_allow_exit_2(
    options: tuple[str, ...], out: Path, told: Told
) -> None:
    """State counts in any case, and the formulation of the paper has none."""
    path = write_graph(Path("step.graph.json"), training_step())
    told(refusal(out, "--graph", path, "--device", BOARD_FILE, "--ram", "90%", *options))


FILES = {
    "empty": b"",
    "binary": b"\x00\xff\xfe\x80",
    "truncated": b'{"format": "poetmodel-graph", "version": 1, "na',
    "nested": b"[" * 100_000,
    "list": b"[1, 2]",
    "repeated key": b'{"format": "poetmodel-graph", "version": 1, "name": "a", "name": "b"}',
    "digits": b'{"version": 1' + b"0" * 5000 + b"}",
    "text": b"hello",
}


@pytest.mark.parametrize("case", FILES)
def test_graph_file_that_is_none_exits_2(case: str, out: Path, told: Told) -> None:
    """A damaged graph file is refused by name, as an option and as an argument."""
    path = Path("bad.graph.json")
    path.write_bytes(FILES[case])
    for graph in (("--graph", path), (path,)):
        told(refusal(out, *graph, "--device", BOARD_FILE))


def test_many_faults_of_a_graph_come_one_a_line_and_the_rest_counted(out: Path, told: Told) -> None:
    """Of twenty faults the first eight are told, one a line, then how many more there are."""
    document = chain()
    document["nodes"] += [node(f"bad{k}", size=-1) for k in range(20)]
    path = write_graph(Path("bad.graph.json"), document)
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))


# -- devices -----------------------------------------------------------------------------------

DEVICES = {
    "negative RAM": ("ram_bytes = 1_000_000", "ram_bytes = -1"),
    "fractional RAM": ("ram_bytes = 1_000_000", "ram_bytes = 1.5"),
    "huge RAM": ("ram_bytes = 1_000_000", f"ram_bytes = {10**30}"),
    "no RAM": ("ram_bytes = 1_000_000", ""),
    "NaN rate": ("flops_per_s = 1e6", "flops_per_s = nan"),
    "infinite rate": ("flops_per_s = 1e6", "flops_per_s = inf"),
    "rate of 0": ("flops_per_s = 1e6", "flops_per_s = 0"),
    "negative latency": ("latency_s = 0.001", "latency_s = -1"),
    "unknown mode": ('mode = "blocking"', 'mode = "magic"'),
    "unknown key": ('core = "one core"', "cores = 4"),
    "text for a number": ("flops_per_s = 1e6", 'flops_per_s = "fast"'),
    "truncated": ("[storage.page_out]", "[storage.page_out"),
    "binary": ("name", "\x00\x01"),
}


@pytest.mark.parametrize("case", DEVICES)
def test_bad_device_exits_2_and_names_file_and_field(case: str, out: Path, told: Told) -> None:
    """A device file that breaks a rule is refused with its name and the field."""
    old, new = DEVICES[case]
    assert old in BOARD
    path = Path("bad.toml")
    path.write_text(BOARD.replace(old, new))
    told(refusal(out, "--graph", CHAIN, "--device", path))


# -- profiles ----------------------------------------------------------------------------------


def with_cell(row: int, column: int, text: str) -> list[list[str]]:
    """Return the good profile with one other cell."""
    rows = profile_rows()
    rows[row][column] = text
    return rows


PROFILES = {
    "missing node": profile_rows()[:-1],
    "extra node": [*profile_rows(), ["ghost", *"111111"]],
    "node twice": [*profile_rows(), profile_rows()[1]],
    "missing column": [row[:-1] for row in profile_rows()],
    "extra column": [[*row, "colour"] for row in profile_rows()],
    "negative": with_cell(1, 1, "-1"),
    "NaN": with_cell(1, 2, "nan"),
    "infinite": with_cell(1, 3, "inf"),
    "huge": with_cell(1, 3, "1e999"),
    "text": with_cell(2, 4, "cheap"),
    "empty": [],
}


@pytest.mark.parametrize("case", PROFILES)
def test_bad_profile_exits_2_and_names_file_and_field(case: str, out: Path, told: Told) -> None:
    """A profile that is malformed or does not fit the graph is refused with its name."""
    path = write_csv(Path("bad.csv"), PROFILES[case])
    told(refusal(out, "--graph", CHAIN, "--profile", path, "--ram", "90%"))


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"PK\x03\x04\x80"])
def test_binary_profile_exits_2(content: bytes, out: Path, told: Told) -> None:
    """A profile that is no text is refused by name."""
    path = Path("bad.csv")
    path.write_bytes(content)
    told(refusal(out, "--graph", CHAIN, "--profile", path, "--ram", "90%"))


# -- options -----------------------------------------------------------------------------------


OPTIONS = (
    "--ram 0",
    "--ram 0%",
    "--ram -5",
    "--ram -5%",
    "--ram '40 %%'",
    "--ram 0.4",
    "--ram '5 parsecs'",
    "--ram 1e30",
    "--ram nan",
    "--ram inf",
    "--ram=",
    "--aux -1",
    "--aux lots",
    "--deadline 5",
    "--deadline -1s",
    "--deadline 0s",
    "--deadline '1 fortnight'",
    "--deadline 1e400s",
    "--within 6h",
    "--samples 0",
    "--samples 5 --within soon",
    "--samples 5 --within 1h --deadline 1s",
    "--samples 5 --battery 1Wh --energy-budget 1J",
    "--deadline-counts moon",
    "--energy-budget 5",
    "--energy-budget 0J",
    "--minimize regret",
    "--backend abacus",
    "--formulation poem",
    "--time-limit 0",
    "--time-limit -1",
    "--time-limit nan",
    "--time-limit inf",
    "--time-limit soon",
    "--gap -0.1",
    "--gap nan",
    "--gap inf",
    "--gap 1%",
    "--threads 0",
    "--threads -2",
    "--threads 1.5",
    "--threads 1000000000",
    "extra",
)
INFEASIBLE = (
    "--ram 303B",
    "--ram 10%",
    "--deadline 5.9s",
    "--deadline 99%",
    "--deadline 99% --deadline-counts compute",
    "--energy-budget 99%",
)


@pytest.mark.parametrize(
    ("options", "status"),
    [*((options, 2) for options in OPTIONS), *((options, 3) for options in INFEASIBLE)],
    ids=[*OPTIONS, *INFEASIBLE],
)
def test_bad_option_exits_with_its_status_and_is_named(
    options: str, status: int, out: Path, told: Told
) -> None:
    """An option that cannot be used is named with what is accepted; proven infeasible exits 3."""
    about = ("--graph", CHAIN, "--device", BOARD_FILE)
    told(refusal(out, *about, *shlex.split(options), status=status))


@pytest.mark.parametrize("options", [("--ram",), ("--colour", "red")])
def test_what_the_parser_refuses_exits_2(options: tuple[str, ...]) -> None:
    """An option without its value or that is unknown is named; the words are the parser's."""
    outcome = invoke("solve", "--graph", CHAIN, "--device", BOARD_FILE, *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert options[0] in outcome.err


def test_resident_bytes_are_part_of_the_proof(out: Path, told: Told) -> None:
    """Parameters and gradients of 2,000 B leave no RAM for the 304 B that g2 takes."""
    document = chain() | {"resident_bytes": {"parameters": 1000, "gradients": 1000}}
    path = write_graph(Path("chain.graph.json"), document)
    limits = ("--ram", "2000", "--count-parameters")
    told(refusal(out, "--graph", path, "--device", BOARD_FILE, *limits, status=3))


@pytest.mark.parametrize(
    "arguments",
    [
        "--device rpi4b",
        "resnet81 --device rpi4b",
        "paper/vgg --device rpi4b",
        "nowhere/g.graph.json --device rpi4b",
        "--graph nowhere.json --device rpi4b",
        "--graph . --device rpi4b",
        "mlp",
        "mlp --device rpi5b",
        "mlp --device nowhere.toml",
        "mlp --profile nowhere.csv --ram 50%",
        "mlp --graph mlp.json --device rpi4b",
    ],
)
def test_unknown_or_missing_input_exits_2(arguments: str, out: Path, told: Told) -> None:
    """A model, device or file that does not exist, or is not given, is named."""
    told(refusal(out, *arguments.split()))


def test_profile_alone_needs_a_budget(out: Path, told: Told) -> None:
    """Without a device nothing says how much RAM there is."""
    told(refusal(out, "--graph", CHAIN, "--profile", PROFILE))


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "missing/x.schedule.json",
        "",
        "chain.graph.json",
        "board.toml",
        "chain.graph.json/x.schedule.json",
    ],
)
def test_bad_output_exits_2_before_solving(target: str, tmp_path: Path, told: Told) -> None:
    """An output that cannot be written, or is an input, is refused and nothing is changed."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    about = (CHAIN, "--device", BOARD_FILE, "--time-limit", "1")
    outcome = invoke("solve", *about, "--out", tmp_path / target)
    assert outcome.status == 2
    told(outcome.err)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_read_only_folder_exits_2(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """An output in a folder that takes no files is refused and the folder named."""

    def refuse(**_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = Path("locked")
    folder.mkdir(mode=0o500)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)  # root may write anywhere
    outcome = invoke("solve", CHAIN, "--device", BOARD_FILE, "--out", folder / "x.json")
    assert outcome.status == 2
    told(outcome.err)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["inspect", "models", "devices", "verify"])
def test_other_commands_name_a_missing_file_too(command: str, told: Told) -> None:
    """Every command that reads a file names one that is missing and exits 2."""
    more = ("--graph", "mlp") if command == "verify" else ()
    outcome = invoke(command, Path("missing.json"), *more)
    assert (outcome.status, outcome.out) == (2, "")
    told(outcome.err)


def test_json_does_not_change_how_errors_are_told() -> None:
    """With --json an error still is the same sentence on stderr, and stdout stays empty."""
    about = ("solve", CHAIN, "--device", BOARD_FILE, "--ram", "0")
    outcome = invoke(*about, "--json")
    assert (outcome.status, outcome.out, outcome.err) == (2, "", invoke(*about).err)


def test_infeasible_problem_prints_its_object_with_json() -> None:
    """With --json it prints null figures and no relations, and the reason on stderr."""
    about = ("solve", CHAIN, "--device", BOARD_FILE, "--ram", "303")
    outcome = invoke(*about, "--json")
    assert (outcome.status, outcome.err) == (3, invoke(*about).err)
    document = outcome.json
    assert document["status"] == "infeasible"
    assert document["energy_j"] is None
    assert document["bound_j"] is None
    assert "R" not in document
