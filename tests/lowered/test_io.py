"""Step files of other versions of poetmodel."""

import json
from pathlib import Path

import pytest

from poetmodel.errors import InputError
from poetmodel.graph import Graph
from poetmodel.lowered.io import load_step, save_step

STEP = Path(__file__).parents[2] / "docs" / "digits.step.json"


@pytest.fixture(scope="module")
def step():
    """Return a step with inference."""
    return load_step(STEP)


@pytest.fixture
def path(step, tmp_path):
    """Return its file."""
    path = tmp_path / "x.step.json"
    save_step(step, path)
    return path


def test_a_step_names_its_writer(step, path):
    """The file states the version; graph and step are read back."""
    document = json.loads(path.read_text())
    assert list(document)[:3] == ["format", "version", "written_by"]
    assert document["written_by"] == "poetmodel 0.1.0"
    assert load_step(path).graph.sha256 == step.graph.sha256 == Graph.load(path).sha256


def test_unknown_keys_of_later_versions(path, caplog):
    """At the top level they are ignored with a note; within, they are refused with the writer."""
    document = json.loads(path.read_text()) | {"written_by": "poetmodel 0.3.0"}
    writer = "the file was written by poetmodel 0.3.0, this is poetmodel"
    path.write_text(json.dumps(document | {"colour": 1}))
    load_step(path)
    assert f"{path}: unknown key 'colour' ignored: {writer}" in caplog.text
    calls = [[{"kernel": "x", "arguments": [], "colour": 1}]]
    changes = [
        {"version": 2},
        {"graph": document["graph"] | {"version": 3}},
        {"graph": document["graph"] | {"colour": 1}},
        {"calls": calls},
        {"inference": document | {"colour": 1}},
    ]
    for change in changes:
        path.write_text(json.dumps(document | change))
        with pytest.raises(InputError) as raised:
            load_step(path)
        assert writer in raised.value.faults[0]
    path.write_text(json.dumps(document | {"graph": document["graph"] | {"version": 3}}))
    with pytest.raises(InputError, match=r"written by poetmodel 0\.3\.0"):
        Graph.load(path)
