"""Graph arguments of commands, and errors for wrong inputs, after which nothing is written."""

import json
import shlex
from pathlib import Path

import pytest

from kit.commands import (
    BOARD_FILE,
    CHAIN,
    PROFILE,
    chain,
    invoke,
    invoke_refused,
    node,
    training_step,
    write_graph,
)
from poetmodel.graph import Graph
from poetmodel.graph.zoo import MODELS
from poetmodel.schedule import checkpoint_all

BOARD = ("--device", "rpi4b", "--ram", "80%", "--method", "lru-paging")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a schedule and a plan of the network itself, and with other sizes."""
    folder = tmp_path_factory.mktemp("files")
    made = {}
    for name, sizes in (("own", ()), ("batch", ("--batch", "8")), ("image", ("--image", "20"))):
        schedule, plan = folder / f"{name}.json", folder / f"{name}.plan.json"
        invoke("solve", "mlp", *sizes, *BOARD, "--out", schedule, "--plan", plan, status=0)
        made |= {name: schedule, f"{name} plan": plan}
    return made


@pytest.mark.parametrize(
    ("model", "option", "argument", "size"),
    [
        ("mlp", "--batch", "batch_size", 8),
        ("resnet18-cifar", "--image", "image_size", 96),
        ("bert-base", "--sequence", "seq_len", 64),
        ("transformer", "--batch", "batch_size", 3),
    ],
)
def test_sizes_are_those_of_the_zoo(model, option, argument, size):
    """The graph is the one that the zoo's function makes of that size."""
    facts = invoke("inspect", model, option, size, "--json").json
    assert facts["sha256"] == MODELS[model](**{argument: size}).sha256
    if option == "--batch":
        assert facts["batch_size"] == size
        plain = invoke("inspect", model, "--json").json
        assert invoke("inspect", model, "--batch", 1, "--json").json == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mlp", "--sequence", "4"), ("mlp", "--sequence", "only accepts --batch and --image")),
        (("bert-base", "--image", "4"), ("only accepts --batch and --sequence",)),
        (("bert-base", "--sequence", "1000"), ("--sequence: expected at most 512",)),
        (("vgg16", "--image", "8"), ("vgg16", "larger --image")),
        (("paper/bert", "--batch", "2"), ("published graphs are fixed",)),
        (("nope", "--batch", "2"), ("no such model",)),
        (("mlp", "--batch", "0"), ("--batch", "whole number from 1 to 1000000")),
        (("mlp", "--batch", "1_0"), ("--batch", "whole number from 1 to 1000000")),
        (("mlp", "--batch", "-3"), ("--batch", "whole number from 1 to 1000000")),
        (("mlp", "--batch", "1.5"), ("--batch", "whole number")),
        (("mlp", "--batch", "1000001"), ("--batch", "1000001")),
        (("resnet18", "--image", "1000000", "--batch", "1000000"), ("output_bytes", "2^53")),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, words):
    """Exit status 2 and a sentence with the option, in all commands that read a network."""
    solved = ("--device", "rpi4b", "--ram", "80%")
    swept = ("--devices", "rpi4b", "--ram", "80%", "--out", Path("sweep"))
    commands = (
        ("inspect", *arguments),
        ("solve", *arguments, *solved),
        ("limits", *arguments, *solved),
        ("profile", *arguments, "--device", "rpi4b"),
        ("sweep", *arguments, *swept),
    )
    for command in commands:
        ended = invoke(*command)
        assert (ended.status, ended.out) == (2, ""), command
        assert [word for word in words if word not in ended.err] == [], ended.err
    assert not (Path("sweep")).exists()


def test_graph_files_have_fixed_sizes(told):
    """A size beside a graph file is refused, for both forms of the file's option."""
    for command in (
        ("inspect", CHAIN, "--batch", "2"),
        ("inspect", "--graph", CHAIN, "--image", "2"),
        ("solve", "--graph", CHAIN, "--device", "rpi4b", "--sequence", "2"),
    ):
        told(invoke_refused(*command), command[-2])


@pytest.mark.parametrize("name", ["own", "own plan", "batch", "batch plan"])
def test_files_find_the_network_that_they_name(name, files):
    """Without --graph, the network is that of the name, with its own or a usual batch size."""
    assert invoke("verify", files[name]).status == 0
    if name in ("own", "batch"):
        sha256 = json.loads(files[name].read_text())["graph"]["sha256"]
        for command in (("plan", files[name]), ("explain", files[name], "fc1"), ("diff",)):
            paths = (files[name], files[name]) if command == ("diff",) else ()
            found = invoke(*command, *paths, "--json")
            assert (found.status, found.json["graph"]["sha256"]) == (0, sha256)


@pytest.mark.parametrize("name", ["image", "image plan"])
def test_files_of_other_sizes_say_what_to_give(name, files, told):
    """For a size that is not tried, the error names the option; with it, the file is read."""
    told(invoke_refused("verify", files[name]))
    assert invoke("verify", files[name], "--image", "20").status == 0
    assert invoke("verify", files[name], "--graph", "mlp", "--image", "20").status == 0


def test_wrong_size_is_refused(files, told):
    """The hash of the file decides; the error names the options with which it matches."""
    for sizes in (("--graph", "mlp"), ("--batch", "4"), ("--graph", "mlp", "--batch", "4")):
        told(invoke_refused("verify", files["batch"], *sizes), " ".join(sizes))


def test_network_that_does_not_come_along_is_asked_for(files, told):
    """Without such a network, and for a code of an unknown one, --graph is named."""
    document = json.loads(files["own"].read_text())
    document["graph"]["name"] = "mine"
    path = files["own"].with_name("mine.json")
    path.write_text(json.dumps(document))
    for command in (("verify", path), ("plan", path), ("explain", path), ("diff", path, path)):
        told(invoke_refused(*command), command[0])


def test_report_finds_the_network_and_repeats_its_sizes(files):
    """The commands on the page solve and verify the same graph again."""
    pytest.importorskip("plotly")
    from poetmodel.case.case import Case
    from poetmodel.cli.report import read_schedules
    from poetmodel.report.facts import reproduction_commands

    (subject,) = read_schedules([files["batch"]], Case())
    assert subject.graph.sha256 == MODELS["mlp"](batch_size=8).sha256
    solve, verify = reproduction_commands(subject)
    words = shlex.split(solve)
    assert words[1:5] == ["solve", "mlp", "--batch", "8"]
    again = words[1:]
    again[again.index("--out") + 1] = str(Path("again.json"))
    assert invoke(*again).status == 0
    assert invoke("verify", Path("again.json")).status == 0
    assert "--graph mlp --batch 8" in verify
    assert invoke(*shlex.split(verify)[1:]).status == 0


# -- wrong input ---------------------------------------------------------------------------------
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
    """An invalid file is refused with its name, the place and the accepted values."""
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
    """A graph without decisions is no problem."""
    path = write_graph(Path("one.graph.json"), chain() | {"nodes": [node("x")]})
    told(refusal(out, "--graph", path, "--device", BOARD_FILE))


def test_many_faults_of_a_graph_come_one_a_line_and_the_rest_counted(out, told):
    """Of many faults, the first eight are printed, then the number of the rest.

    Resident bytes that leave no RAM are an error, too.
    """
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
    "--formulation poem", "--time-limit 0", "--time-limit soon", "--time-limit 50%",
    "--gap -0.1", "--threads 0", "--threads 1.5", "--threads 1000000000", "extra",
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
    """An unusable option is refused with the accepted values; proven infeasible exits 3."""
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
    """An unknown or missing model, device or file is named."""
    told(refusal(out, *arguments.split()))


# -- output ------------------------------------------------------------------------------------
TARGETS = ("missing/x.json", "", "chain.graph.json", "board.toml", "chain.graph.json/x.json")


@pytest.mark.parametrize("target", TARGETS)
def test_bad_output_exits_2_before_solving(target, tmp_path, told):
    """An output that cannot be written, or is an input, is refused, and nothing is changed."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    about = (CHAIN, "--device", BOARD_FILE, "--time-limit", "1")
    told(invoke_refused("solve", *about, "--out", tmp_path / target))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", ["inspect", "models", "devices", "verify"])
def test_other_commands_name_a_missing_file_too(command, told):
    """Every command that reads a file names one that is missing and exits 2."""
    more = ("--graph", "mlp") if command == "verify" else ()
    told(invoke_refused(command, Path("missing.json"), *more))
