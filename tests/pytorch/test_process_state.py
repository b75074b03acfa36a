"""State of the process that a step reads: it is guarded, and restored to the user."""

import os
from contextlib import contextmanager

import pytest
import torch

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, find_differences
from kit.traced_models import row_step

nn = torch.nn


@contextmanager
def environment():
    """Set a variable that the step reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POETMODEL_TEST_SCALE", "3")
        yield


@contextmanager
def hook():
    """Add a hook of all modules."""
    handle = nn.modules.module.register_module_forward_hook(lambda _, __, output: output * 2)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def flag():
    """Ask for deterministic algorithms."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def scaled(parts, x):
    """Scale by what the process says."""
    scale = float(os.environ.get("POETMODEL_TEST_SCALE", "1"))
    return parts[0](x) * scale * (2 if torch.are_deterministic_algorithms_enabled() else 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (environment, "the environment variable POETMODEL_TEST_SCALE was None and is 3"),
        (hook, "hooks of all modules .* were added or removed"),
        (flag, r"are_deterministic_algorithms_enabled\(\) was False and is True"),
    ],
)
def test_changed_state_of_the_process_is_refused_or_compiled_for(change, words):
    """The step is as before once the state is; other variables of the environment may change."""
    own = row_step(nn.Linear(4, 4), by=scaled)
    kind = type(os.environ)
    step = compile_keep_all(*own)
    again = compile_keep_all(*own, dynamic="retrace")
    assert type(os.environ) is kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POETMODEL_TEST_OTHER", "3")
        assert find_differences(step, *own) == []
    with change():
        with pytest.raises(pmt.CaptureError, match=words):
            step(*own[2])
        assert find_differences(again, *own) == []
    assert find_differences(step, *own) == []
