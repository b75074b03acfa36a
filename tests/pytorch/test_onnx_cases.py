"""The node cases of ONNX's own backend tests, through the reader."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")

from kit.onnx_node_cases import find_opset, list_operators, node_cases, run_case
from poetmodel.torch.onnx.module import KNOWN_OPERATORS, OPERATORS
from poetmodel.torch.onnx.reading import OPSETS

pytestmark = pytest.mark.torch
SLOW = pytest.mark.slow  # NumPy computes what their cases expect window by window
COMPLETE = (
    "ConvTranspose", "CumSum", "GRU", "LSTM", "LpNormalization", "MeanVarianceNormalization",
    "Resize", "RNN", pytest.param("AveragePool", marks=SLOW), pytest.param("LpPool", marks=SLOW),
)  # fmt: skip
"""Operators of which nothing that has a case is refused."""


@pytest.mark.parametrize("weights", [False, True], ids=["inputs", "weights"])
@pytest.mark.parametrize("operator", COMPLETE)
def test_operator_passes_all_cases(operator, weights, tmp_path):
    """With all inputs as inputs of the network, and with all but the first as constants."""
    cases = node_cases(operator)
    assert cases
    outcomes = {case.name: run_case(case, tmp_path, weights=weights) for case in cases}
    assert {name: found for name, found in outcomes.items() if found.kind != "ok"} == {}


RANDOM = {"test_training_dropout", "test_training_dropout_default"}
"""Cases that expect the masks of NumPy's generator; dropout drops in training mode alone."""
OF_VALUES = (
    "depends on the values of tensors",
    " is of ",
    "expected an output of floating numbers",
)
"""Parts of the sentences that refuse what no training step has: shapes of values, and texts."""


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True], ids=["inputs", "weights"])
def test_cases_are_right_or_refused(weights, tmp_path):
    """Each case is correct, or refused for a reason in the guide; none is wrong or a traceback."""
    unexplained = {}
    for case in node_cases():
        found = run_case(case, tmp_path, weights=weights)
        kinds = list_operators(case)
        declared = any(
            OPERATORS[kind].unsupported_features or OPERATORS[kind].first_output_only
            for kind in kinds & OPERATORS.keys()
        )
        may_be_refused = (
            declared
            or not kinds <= KNOWN_OPERATORS
            or not OPSETS[0] <= find_opset(case) <= OPSETS[1]
            or any(part in found.why for part in OF_VALUES)
        )
        if (
            case.name in RANDOM
            or found.kind == "ok"
            or (found.kind == "refused" and may_be_refused)
        ):
            continue
        unexplained[case.name] = found
    assert unexplained == {}
