"""State of the process that a step reads: it is guarded, and restored to the user."""

import enum
import functools
import os
import re
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, find_differences
from kit.traced_models import row_step
from poetmodel.torch.capturing.guards import Guards

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


CHANGES = {
    environment: "the environment variable POETMODEL_TEST_SCALE was None and is 3",
    hook: "hooks of all modules .* were added or removed",
    flag: r"are_deterministic_algorithms_enabled\(\) was False and is True",
}


def test_changed_state_of_the_process_is_refused_or_compiled_for():
    """The step is as before once the state is; other variables of the environment may change."""
    own = row_step(nn.Linear(4, 4), by=scaled)
    kind = type(os.environ)
    step = compile_keep_all(*own)
    again = compile_keep_all(*own, dynamic="retrace")
    assert type(os.environ) is kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POETMODEL_TEST_OTHER", "3")
        assert find_differences(step, *own) == []
    for change, words in CHANGES.items():
        with change():
            with pytest.raises(pmt.CaptureError, match=words):
                step(*own[2])
            assert find_differences(again, *own) == []
        assert find_differences(step, *own) == []


def make_classes():
    """Return a base class of a model, another one, a class of objects, and the model's class."""

    class Doubling:
        def scale(self, y):
            """Return a result of the model."""
            return y * 2

    class Tripling:
        def scale(self, y):
            """Return a result of the model."""
            return y * 3

    class Value:
        def __len__(self):
            return 1

        @property
        def number(self):
            """A factor."""
            return 2.0

        def added(self, y):
            """Return a sum."""
            return y + len(self)

    class Kept(Value):
        pass

    class Scaled(Doubling, nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.value = nn.Linear(4, 4), Kept()

        def forward(self, x):
            """Use methods of two classes, of their bases, and what is an instance of which."""
            y = self.scale(self.value.added(self.layer(x))) * self.value.number
            return y * 5 if isinstance(self.value, Tripling) else y

    return Doubling, Tripling, Value, Kept, Scaled


CLASS_CHANGES = {
    "forward": lambda *k: (k[4], "forward", lambda m, x: m.layer(x)),
    "method": lambda *k: (k[4], "scale", lambda _, y: y * 7),
    "method of a base": lambda *k: (k[0], "scale", lambda _, y: y * 7),
    "bases": lambda *k: (k[4], "__bases__", (k[1], nn.Module)),
    "method of an object": lambda *k: (k[2], "added", lambda _, y: y * 7),
    "method before another": lambda *k: (k[3], "added", lambda _, y: y * 7),
    "length": lambda *k: (k[2], "__len__", lambda _: 7),
    "property": lambda *k: (k[2], "number", property(lambda _: 7.0)),
    "bases of an object": lambda *k: (k[3], "__bases__", (k[1], k[2])),
}
"""By name: a class, its attribute, and the new value of this."""


@contextmanager
def changed_class(kind, name, value):
    """Set an attribute of a class, and put back what the class itself had."""
    before = kind.__bases__ if name == "__bases__" else vars(kind).get(name)
    setattr(kind, name, value)
    yield
    if before is None:
        delattr(kind, name)
    else:
        setattr(kind, name, before)


def test_changed_classes_whose_code_is_in_the_graph_are_noticed():
    """The class is named; a further method changes nothing, nor one that was put back."""
    classes = make_classes()
    own = classes[4](), functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    joint = pmt.capture(*own)
    guards, flat = Guards(joint), joint.flat_inputs(own[2])
    classes[2].unread = lambda _: 3
    assert guards.hold(flat)
    for name, change in CLASS_CHANGES.items():
        with changed_class(*change(*classes)):
            assert not guards.hold(flat), name
            text = str([*guards.differences(flat)])
            assert re.search(r"of the class (Scaled|Kept) was replaced", text), name
        assert guards.hold(flat), name


class Factor(enum.Enum):
    """A number whose value Python finds by a descriptor that the class itself does not answer."""

    TWO = 2.0


class Bound:
    """A method of its own kind, which is another object each time it is read."""

    def __init__(self, func):
        self.func = func

    def __get__(self, owner, kind=None):
        """Return the function for an object."""
        return functools.partial(self.func, owner)


class PartlyGiven(nn.Module):
    """Reads what its class does not answer, or answers with another object each time."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), Factor.TWO

    @Bound
    def doubled(self, x):
        """Return a product."""
        return self.layer(x) * 2.0

    def forward(self, x):
        """Read both."""
        return self.doubled(x) * self.factor.value


def test_attributes_that_reading_converts_are_no_change(monkeypatch):
    """A step of them is called again; another method in the place of one is noticed."""
    own = PartlyGiven(), functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    joint = pmt.capture(*own)
    guards, flat = Guards(joint), joint.flat_inputs(own[2])
    assert guards.hold(flat)
    assert find_differences(compile_keep_all(*own), *own) == []
    monkeypatch.setattr(PartlyGiven, "doubled", Bound(lambda m, x: m.layer(x) * 3.0))
    assert not guards.hold(flat)
    assert "doubled of the class PartlyGiven was replaced" in str([*guards.differences(flat)])


def test_a_changed_class_is_refused_or_compiled_for():
    """After retracing, a step has eager's results."""
    classes = make_classes()
    own = classes[4](), functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    step = compile_keep_all(*own)
    again = compile_keep_all(*own, dynamic="retrace")
    setattr(*CLASS_CHANGES["bases"](*classes))
    with pytest.raises(pmt.CaptureError, match="__bases__ of the class Scaled was replaced"):
        step(*own[2])
    assert find_differences(again, *own) == []
