"""CMSIS-NN beside the kernels of int8 layers, with a stub in its place."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness import run_study
from kit.programs import require_programs
from poetmodel.errors import InputError
from poetmodel.export.board import Target, ToolchainError

pytest.importorskip("torch")

from mcu import cmsis_nn
from mcu.quantized import pool_sizes, square_sizes

pytestmark = pytest.mark.torch

STUB = Path(__file__).with_name("cmsis_nn_stub")
SOME = (
    ("of the front", "conv2d", square_sizes(3, 6, 9, 3, 2)),
    ("of the front", "depthwise", square_sizes(10, 10, 7, 3, 1, 10)),
    ("alone", "pointwise", square_sizes(20, 6, 5)),
    ("of the front", "pointwise", square_sizes(7, 9, 5)),
    ("of the front", "pointwise", square_sizes(9, 3, 2)),
    ("alone", "linear", square_sizes(21, 5, 1)),
    ("alone", "add", square_sizes(5, 5, 3)),
    ("alone", "maximum", square_sizes(6, 6, 7, 3, 2, 6)),
    ("alone", "average", pool_sizes(5, (7, 3), (3, 3), 2)),
)
ROWS = (
    ("of the front", "conv2d", 1, 27 * 150),
    ("of the front", "depthwise", 1, 9 * 490),
    ("alone", "pointwise", 1, 20 * 150),
    ("of the front", "pointwise", 2, 7 * 225 + 9 * 12),
    ("alone", "linear", 1, 21 * 5),
    ("alone", "add", 1, 2 * 45),
    ("alone", "maximum", 1, 9 * 96),
    ("alone", "average", 1, 9 * 15),
)
"""Group, kind, number and terms of `SOME`."""
REFUSED = ("of the front", "conv2d", square_sizes(1, 6, 9, 3))


@pytest.fixture
def clone(tmp_path):
    """Return a clone that has the stub."""
    folder = shutil.copytree(STUB, tmp_path / "clone")
    for words in (
        ("init", "-q"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"),
    ):
        subprocess.run(["git", "-C", folder, *words], check=True)
    return folder


def test_what_is_no_clone_is_refused_in_a_sentence(tmp_path, told):
    """The error states the missing clone and its source."""
    with pytest.raises(InputError) as raised:
        list(cmsis_nn.runs(source=str(tmp_path)))
    told(str(raised.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("factor", [0.7, 0.5, 1 - 2**-40, 3.0, 2.0**-20, 0.1e-3])
def test_scales_are_31_bits_and_a_power_of_two(factor):
    """As large as 31 bits can be, and as near."""
    multiplier, shift = cmsis_nn.split_factor(factor)
    assert 2**30 <= multiplier < 2**31
    assert multiplier * 2.0 ** (shift - 31) == pytest.approx(factor, rel=2**-31)


def test_both_compute_the_same(tmp_path):
    """All numbers reach the library, and each row has the instructions of its layers."""
    require_programs(Target.M4)
    found = cmsis_nn.execute_layers(STUB, tmp_path, SOME)
    figures = cmsis_nn.check_results(found)
    assert figures["elements"] == 150 + 490 + 150 + 225 + 12 + 5 + 45 + 96 + 15
    assert figures["scratch_bytes"] == 64
    rows = cmsis_nn.sum_rows(found, SOME)
    assert [(row["of"], row["kind"], row["layers"], row["terms"]) for row in rows] == [*ROWS]
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    assert all(row["ours"] < row["theirs"] for row in rows if row["kind"] in cmsis_nn.CONVOLUTIONS)
    with pytest.raises(ToolchainError, match="other results"):
        cmsis_nn.check_results(replace(found, metrics={**found.metrics, "most": 2}))


@pytest.mark.slow
def test_a_layer_that_the_library_refuses_is_named(tmp_path):
    """The other layers are then not listed."""
    require_programs(Target.M4)
    with pytest.raises(ToolchainError, match="CMSIS-NN refuses layer 1"):
        cmsis_nn.execute_layers(STUB, tmp_path, (*SOME[:1], REFUSED, *SOME[1:]))


@pytest.mark.slow
def test_a_record_has_both(clone, tmp_path, monkeypatch):
    """With the commit of the clone."""
    require_programs(Target.M4)
    monkeypatch.setattr(cmsis_nn, "LAYERS", SOME)
    out = tmp_path / "x-cmsis-nn.jsonl"
    settings = ["--set", f"source={clone}", "--out", str(out)]
    assert run_study(cmsis_nn.STUDY, settings) == 0
    found = json.loads(out.read_text())
    assert [set(row) for row in found["rows"]] == len(ROWS) * [
        {"of", "kind", "layers", "terms", "theirs", "ours"}
    ]
    assert found["source"] == cmsis_nn.read_commit(clone)
