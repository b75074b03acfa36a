"""Which graph a command is about: sizes of a network's input, and the graph that a file names."""

import json
import shlex
from pathlib import Path

import pytest

from kit.commands import CHAIN, invoke, refused
from poetmodel.graph.zoo import MODELS

BOARD = ("--device", "rpi4b", "--ram", "80%", "--method", "lru-paging")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Give a schedule and a plan of the network itself, and with other sizes."""
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
        (("mlp", "--sequence", "4"), ("mlp", "--sequence", "takes --batch and --image alone")),
        (("bert-base", "--image", "4"), ("takes --batch and --sequence alone",)),
        (("bert-base", "--sequence", "1000"), ("--sequence: expected at most 512",)),
        (("vgg16", "--image", "8"), ("vgg16", "larger --image")),
        (("paper/bert", "--batch", "2"), ("published graphs have fixed sizes",)),
        (("nope", "--batch", "2"), ("no such model",)),
        (("mlp", "--batch", "0"), ("--batch", "whole number from 1 to 1000000")),
        (("mlp", "--batch", "-3"), ("--batch", "whole number from 1 to 1000000")),
        (("mlp", "--batch", "1.5"), ("--batch", "whole number")),
        (("mlp", "--batch", "1000001"), ("--batch", "1000001")),
        (("resnet18", "--image", "1000000", "--batch", "1000000"), ("output_bytes", "2^53")),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, words):
    """Exit status 2 and a sentence with the option, in every command that takes a network."""
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
    """A size beside a graph file is refused, whichever way the file is given."""
    for command in (
        ("inspect", CHAIN, "--batch", "2"),
        ("inspect", "--graph", CHAIN, "--image", "2"),
        ("solve", "--graph", CHAIN, "--device", "rpi4b", "--sequence", "2"),
    ):
        told(refused(*command), command[-2])


@pytest.mark.parametrize("name", ["own", "own plan", "batch", "batch plan"])
def test_files_find_the_network_that_they_name(name, files):
    """Without --graph the network of that name is taken, of its own or of a usual batch size."""
    assert invoke("verify", files[name]).status == 0
    if name in ("own", "batch"):
        sha256 = json.loads(files[name].read_text())["graph"]["sha256"]
        for command in (("plan", files[name]), ("explain", files[name], "fc1"), ("diff",)):
            paths = (files[name], files[name]) if command == ("diff",) else ()
            found = invoke(*command, *paths, "--json")
            assert (found.status, found.json["graph"]["sha256"]) == (0, sha256)


@pytest.mark.parametrize("name", ["image", "image plan"])
def test_files_of_other_sizes_say_what_to_give(name, files, told):
    """A size that is not tried is asked for; with it the file is read."""
    told(refused("verify", files[name]))
    assert invoke("verify", files[name], "--image", "20").status == 0
    assert invoke("verify", files[name], "--graph", "mlp", "--image", "20").status == 0


def test_wrong_size_is_refused(files, told):
    """The file's fingerprint decides; what would do is named."""
    for sizes in (("--graph", "mlp"), ("--batch", "4"), ("--graph", "mlp", "--batch", "4")):
        told(refused("verify", files["batch"], *sizes), " ".join(sizes))


def test_network_that_does_not_come_along_is_asked_for(files, told):
    """Without such a network, and for a code of an unknown one, --graph is named."""
    document = json.loads(files["own"].read_text())
    document["graph"]["name"] = "mine"
    path = files["own"].with_name("mine.json")
    path.write_text(json.dumps(document))
    for command in (("verify", path), ("plan", path), ("explain", path), ("diff", path, path)):
        told(refused(*command), command[0])


def test_report_finds_the_network_and_repeats_its_sizes(files):
    """The commands on the page solve and verify the same graph again."""
    pytest.importorskip("plotly")
    from poetmodel.cli.options import CostOptions, FileGraphOptions
    from poetmodel.cli.report import read_subjects
    from poetmodel.report.facts import commands

    (subject,) = read_subjects([files["batch"]], FileGraphOptions(), CostOptions())
    assert subject.graph.sha256 == MODELS["mlp"](batch_size=8).sha256
    solve, verify = commands(subject)
    words = shlex.split(solve)
    assert words[1:5] == ["solve", "mlp", "--batch", "8"]
    again = words[1:]
    again[again.index("--out") + 1] = str(Path("again.json"))
    assert invoke(*again).status == 0
    assert invoke("verify", Path("again.json")).status == 0
    assert "--graph mlp --batch 8" in verify
    assert invoke(*shlex.split(verify)[1:]).status == 0
