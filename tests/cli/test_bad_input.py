"""Whatever is wrong with the input: a sentence that names it, the right status, nothing written."""

import shlex
import tempfile
from pathlib import Path

import pytest

from kit.commands import (
    BOARD_FILE,
    CHAIN,
    PROFILE,
    chain,
    invoke,
    node,
    refused,
    training_step,
    write_graph,
)
from poetmodel.graph import Graph
from poetmodel.schedule import checkpoint_all

PRECIOUS = b"what was here before\x00\xff"
"""Content of the output file that no failure may touch."""


@pytest.fixture
def out():
    """Return an output path where a file lies already."""
    path = Path("results") / "old.schedule.json"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


def refusal(out, *arguments, status=2):
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


# -- files -------------------------------------------------------------------------------------
FAULTS = {
    "graph": (CHAIN, '"output_bytes": 100', '"output_bytes": -1', ("--device", BOARD_FILE)),
    "state": (
        Path("step.graph.json"),
        '"replaces": "w2"',
        '"replaces": "x"',
        ("--device", BOARD_FILE),
    ),
    "device": (BOARD_FILE, "ram_bytes = 1_000_000", "ram_bytes = -1", ("--device", BOARD_FILE)),
    "profile": (PROFILE, "h1,1", "h1,-1", ("--profile", PROFILE, "--ram", "90%")),
}
"""For each kind of file what is wrong in one of it, and where its costs are from."""


@pytest.mark.parametrize("kind", FAULTS)
def test_bad_file_exits_2_and_names_file_and_field(kind, out, told):
    """A file that breaks a rule is refused with its name, the place and what is accepted."""
    step = write_graph(Path("step.graph.json"), training_step())
    graph = step if kind == "state" else CHAIN
    checkpoint_all(Graph.load(graph)).save("good.schedule.json")
    path, old, new, costs = FAULTS[kind]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    told(refusal(out, "--graph", graph, *costs))
    if path == graph:
        for words in (("inspect",), ("verify", "good.schedule.json")):
            outcome = invoke(*words, "--graph", path)
            assert (outcome.status, outcome.out) == (2, "")
            assert str(path) in outcome.err


@pytest.mark.parametrize("options", [("--count-parameters",), ("--formulation", "paper")])
def test_options_that_state_does_not_allow_exit_2(options, out, told):
    """State counts in any case, and the formulation of the paper has none."""
    path = write_graph(Path("step.graph.json"), training_step())
    told(refusal(out, "--graph", path, "--device", BOARD_FILE, "--ram", "90%", *options))


def test_one_node_is_nothing_to_decide(out, told):
    """A graph with nothing to keep, recompute or page is no problem."""
    path = write_graph(Path("one.graph.json"), chain() | {"nodes": [node("x")]})
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))


def test_many_faults_of_a_graph_come_one_a_line_and_the_rest_counted(out, told):
    """Of many faults the first eight are told, then how many more; resident bytes leave no RAM."""
    document = chain()
    document["nodes"] += [node(f"bad{k}", size=-1) for k in range(20)]
    path = write_graph(Path("bad.graph.json"), document)
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))
    document = chain() | {"resident_bytes": {"parameters": 1000, "gradients": 1000}}
    path = write_graph(Path("chain.graph.json"), document)
    limits = ("--ram", "2000", "--count-parameters")
    told(refusal(out, "--graph", path, "--device", BOARD_FILE, *limits, status=3), "resident")


# -- options -----------------------------------------------------------------------------------
OPTIONS = (
    "--ram 0", "--ram '40 %%'", "--ram nan", "--ram=", "--aux -1", "--deadline 5", "--deadline 0s",
    "--within 6h", "--samples 0", "--samples 5 --within soon",
    "--samples 5 --within 1h --deadline 1s", "--samples 5 --battery 1Wh --energy-budget 1J",
    "--deadline-counts moon", "--energy-budget 5", "--minimize regret", "--backend abacus",
    "--formulation poem", "--time-limit 0", "--time-limit soon", "--gap -0.1", "--threads 0",
    "--threads 1.5", "--threads 1000000000", "extra",
)  # fmt: skip
INFEASIBLE = (
    "--ram 303B", "--deadline 99%", "--deadline 99% --deadline-counts compute",
    "--energy-budget 99%",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "status"),
    [*((options, 2) for options in OPTIONS), *((options, 3) for options in INFEASIBLE)],
    ids=[*OPTIONS, *INFEASIBLE],
)
def test_bad_option_exits_with_its_status_and_is_named(options, status, out, told):
    """An option that cannot be used is named with what is accepted; proven infeasible exits 3."""
    about = ("--graph", CHAIN, "--device", BOARD_FILE)
    told(refusal(out, *about, *shlex.split(options), status=status))


@pytest.mark.parametrize(
    "arguments",
    [
        "--device rpi4b",
        "resnet81 --device rpi4b",
        "paper/vgg --device rpi4b",
        "nowhere/g.graph.json --device rpi4b",
        "mlp",
        "mlp --device rpi5b",
        "mlp --profile nowhere.csv --ram 50%",
        "mlp --graph mlp.json --device rpi4b",
        "--graph chain.graph.json --profile chain.csv",
    ],
)
def test_unknown_or_missing_input_exits_2(arguments, out, told):
    """A model, device or file that does not exist, or is not given, is named."""
    told(refusal(out, *arguments.split()))


# -- output ------------------------------------------------------------------------------------
TARGETS = ("missing/x.json", "", "chain.graph.json", "board.toml", "chain.graph.json/x.json")


@pytest.mark.parametrize("target", TARGETS)
def test_bad_output_exits_2_before_solving(target, tmp_path, told):
    """An output that cannot be written, or is an input, is refused and nothing is changed."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    about = (CHAIN, "--device", BOARD_FILE, "--time-limit", "1")
    told(refused("solve", *about, "--out", tmp_path / target))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_read_only_folder_exits_2(monkeypatch, told):
    """An output in a folder that takes no files is refused and the folder named."""

    def refuse(**_options):
        raise PermissionError(13, "Permission denied")

    folder = Path("locked")
    folder.mkdir(mode=0o500)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)  # root may write anywhere
    told(refused("solve", CHAIN, "--device", BOARD_FILE, "--out", folder / "x.json"))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["inspect", "models", "devices", "verify"])
def test_other_commands_name_a_missing_file_too(command, told):
    """Every command that reads a file names one that is missing and exits 2."""
    more = ("--graph", "mlp") if command == "verify" else ()
    told(refused(command, Path("missing.json"), *more))


def test_json_does_not_change_how_errors_are_told():
    """With --json an error still is the same sentence on stderr, and stdout stays empty."""
    about = ("solve", CHAIN, "--device", BOARD_FILE, "--ram", "0")
    outcome = invoke(*about, "--json")
    assert (outcome.status, outcome.out, outcome.err) == (2, "", invoke(*about).err)
