"""Python values that forward reads: each is guarded, wherever from, and no other is."""

import argparse
import copy
import enum
import itertools
import math
import re
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import nn

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, find_differences
from kit.rotation import mark_seeds_except
from kit.traced_models import row_step
from poetmodel.torch.capturing.guards import Guards

numpy = pytest.importorskip("numpy")


class Kind(enum.Enum):
    """A choice."""

    ONE = 1.0
    TWO = 2.0


@dataclass
class Config:
    """A temperature."""

    value: float = 1.0
    unread: float = 1.0


@dataclass(slots=True)
class Slotted:
    """A temperature in a slot."""

    value: float = 1.0


class Attributes(dict):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__


class Forwarding:
    """Forwards attributes of another object."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Computed:
    """A value that a property computes of another attribute."""

    def __init__(self):
        self.base = 1.0

    @property
    def value(self):
        """The value."""
        return self.base * 2


class OfClass:
    """Values of a class."""

    value = 1.0
    items: ClassVar = [1.0]

    @classmethod
    def read(cls):
        """Return the value."""
        return cls.value

    @staticmethod
    def plain(scale=1.0):
        """Return the default."""
        return scale


class Pair(NamedTuple):
    """Two values."""

    value: float
    other: float


def constant(value):
    """Return a function that returns a value."""
    return lambda: value


NUMBER = 1.0
TABLE = {"a": 1.0}
CONFIG = Config()
NAMESPACE = SimpleNamespace(value=1.0)
OFF = False


def scaled(scale=1.0, *, more=1.0):
    """Return the product of the defaults."""
    return scale * more


def by_function():
    """Return a name of this file."""
    return NUMBER


_SHARED = (Attributes, Forwarding, Iterator)
"""Types of values that cannot be copied."""


def set_global(name, value):
    """Return a function that sets a name of this file."""
    return lambda _: globals().__setitem__(name, value)


def attribute(name, value, *, of=""):
    """Return a function that sets an attribute of a model, or of an object that it has."""

    def change(model):
        owner = model
        for part in filter(None, of.split(".")):
            owner = getattr(owner, part)
        setattr(owner, name, value if isinstance(value, _SHARED) else copy.deepcopy(value))

    return change


def item(name, key, value):
    """Return a function that sets an item of a container that a model has."""
    return lambda model: getattr(model, name).__setitem__(key, value)


def dynamic_name(model):
    """Return a number whose name is put together."""
    return getattr(model, "".join(("sc", "ale")))


def passed(table):
    """Return an item of a table."""
    return table["a"]


def aliased(model):
    """Return an item of a table through a variable."""
    table = model.table
    return table["a"]


PLACES = {
    # attributes of the model
    "number": (attribute("scale", 1.0), lambda m: m.scale, attribute("scale", 2.0)),
    "whole number": (attribute("scale", 1), lambda m: m.scale, attribute("scale", 1.0)),
    "flag": (attribute("on", OFF), lambda m: 2.0 if m.on else 1.0, attribute("on", not OFF)),
    "string": (
        attribute("mode", "mean"), lambda m: 1.0 if m.mode == "mean" else 2.0,
        attribute("mode", "sum"),
    ),
    "none": (
        attribute("scale", None), lambda m: 1.0 if m.scale is None else m.scale,
        attribute("scale", 3.0),
    ),
    "enum": (
        attribute("kind", Kind.ONE), lambda m: m.kind.value, attribute("kind", Kind.TWO),
    ),
    "attribute that comes": (
        lambda _: None, lambda m: getattr(m, "scale", 1.0), attribute("scale", 2.0)
    ),
    "attribute that goes": (
        attribute("scale", 2.0), lambda m: m.scale if hasattr(m, "scale") else 1.0,
        lambda m: delattr(m, "scale"),
    ),
    "name put together": (attribute("scale", 1.0), dynamic_name, attribute("scale", 2.0)),
    "all attributes": (
        attribute("scale", 1.0), lambda m: vars(m)["scale"], attribute("scale", 2.0)
    ),
    "function": (attribute("by", abs), lambda m: m.by(-2.0), attribute("by", float)),
    "closure of a function": (
        attribute("by", constant(1.0)), lambda m: m.by(),
        attribute("by", constant(2.0)),
    ),
    "arguments of a partial": (
        attribute("by", partial(scaled, more=1.0)), lambda m: m.by(),
        lambda m: m.by.keywords.update(more=2.0),
    ),
    "nested submodule": (
        attribute("scale", 1.0, of="layer"), lambda m: m.layer.scale,
        attribute("scale", 2.0, of="layer"),
    ),
    "property": (
        attribute("object", Computed()), lambda m: m.object.value,
        attribute("base", 2.0, of="object"),
    ),
    # containers
    "item of a dict": (
        attribute("table", {"a": 1.0}), lambda m: m.table["a"], item("table", "a", 2.0)
    ),
    "item of a dict that is passed on": (
        attribute("table", {"a": 1.0}), lambda m: passed(m.table), item("table", "a", 2.0)
    ),
    "item of a dict by a variable": (
        attribute("table", {"a": 1.0}), aliased, item("table", "a", 2.0)
    ),
    "item by get": (
        attribute("table", {}), lambda m: m.table.get("a", 1.0), item("table", "a", 2.0)
    ),
    "key": (
        attribute("table", {}), lambda m: 2.0 if "a" in m.table else 1.0, item("table", "a", 0)
    ),
    "keys": (
        attribute("table", {"a": 1.0}), lambda m: float(len(list(m.table))), item("table", "b", 0)
    ),
    "order of a dict": (
        attribute("table", {"a": 1.0, "b": 2.0}), lambda m: next(iter(m.table.values())),
        lambda m: m.table.update(a=m.table.pop("a")),
    ),
    "order of an ordered dict": (
        attribute("table", OrderedDict(a=1.0, b=2.0)), lambda m: next(iter(m.table.values())),
        lambda m: m.table.move_to_end("a"),
    ),
    "nested dict": (
        attribute("table", {"a": {"b": 1.0}}), lambda m: m.table["a"]["b"],
        lambda m: m.table["a"].update(b=2.0),
    ),
    "item of a list": (attribute("table", [1.0]), lambda m: m.table[0], item("table", 0, 2.0)),
    "last item": (
        attribute("table", [1.0]), lambda m: m.table[-1], lambda m: m.table.append(3.0)
    ),
    "length of a list": (
        attribute("table", [1.0]), lambda m: float(len(m.table)), lambda m: m.table.append(1.0)
    ),
    "sum of a list": (attribute("table", [1.0]), lambda m: sum(m.table), item("table", 0, 2.0)),
    "list of dicts": (
        attribute("table", [{"a": 1.0}]), lambda m: sum(row["a"] for row in m.table),
        lambda m: m.table[0].update(a=2.0),
    ),
    "tuple": (attribute("table", (1.0, 2.0)), lambda m: m.table[1], attribute("table", (1.0, 3.0))),
    "list in a tuple": (
        attribute("table", ([1.0],)), lambda m: m.table[0][0], lambda m: m.table[0].append(2.0)
    ),
    "set": (
        attribute("table", {1}), lambda m: 2.0 if 2 in m.table else 1.0, lambda m: m.table.add(2)
    ),
    "queue": (
        attribute("table", deque([1.0])), lambda m: m.table[0], item("table", 0, 2.0)
    ),
    "user's dict": (
        attribute("table", UserDict(a=1.0)), lambda m: m.table["a"], item("table", "a", 2.0)
    ),
    "ordered dict": (
        attribute("table", OrderedDict(a=1.0)), lambda m: m.table["a"], item("table", "a", 2.0)
    ),
    "default": (
        attribute("table", defaultdict(float, a=1.0)), lambda m: m.table["a"],
        item("table", "a", 2.0),
    ),
    # objects
    "mode of a teacher": (
        attribute("teacher", [nn.Dropout(0.5)]), lambda m: 2.0 if m.teacher[0].training else 1.0,
        lambda m: m.teacher[0].eval(),
    ),
    "mode of a layer of a teacher": (
        attribute("teacher", [nn.Dropout(0.5)]), lambda m: m.teacher[0](torch.ones(4)).sum(),
        lambda m: m.teacher[0].eval(),
    ),
    "dataclass": (
        attribute("config", Config()), lambda m: m.config.value,
        attribute("value", 2.0, of="config"),
    ),
    "another object": (
        attribute("config", Config()), lambda m: m.config.value, attribute("config", Config(2.0))
    ),
    "slot": (
        attribute("config", Slotted()), lambda m: m.config.value,
        attribute("value", 2.0, of="config"),
    ),
    "named tuple": (
        attribute("config", Pair(1.0, 1.0)), lambda m: m.config.value,
        attribute("config", Pair(2.0, 1.0)),
    ),
    "namespace": (
        attribute("config", SimpleNamespace(value=1.0)), lambda m: m.config.value,
        attribute("value", 2.0, of="config"),
    ),
    "arguments of a command": (
        attribute("config", argparse.Namespace(value=1.0)), lambda m: m.config.value,
        attribute("value", 2.0, of="config"),
    ),
    "object in a list": (
        attribute("table", [Config()]), lambda m: sum(c.value for c in m.table),
        lambda m: setattr(m.table[0], "value", 2.0),
    ),
    "object behind another": (
        attribute("object", Forwarding(Config())), lambda m: m.object.value,
        attribute("value", 2.0, of="object.inner"),
    ),
    # classes, files, functions
    "class": (
        attribute("of", OfClass()), lambda m: m.of.value,
        lambda _: setattr(OfClass, "value", 2.0),
    ),
    "class by its name": (
        lambda _: None, lambda _: OfClass.value, lambda _: setattr(OfClass, "value", 2.0)
    ),
    "class of an object": (
        attribute("of", OfClass()), lambda m: type(m.of).value,
        lambda _: setattr(OfClass, "value", 2.0),
    ),
    "class method": (
        attribute("of", OfClass()), lambda m: m.of.read(), lambda _: setattr(OfClass, "value", 2.0)
    ),
    "list of a class": (
        attribute("of", OfClass()), lambda m: m.of.items[0],
        lambda _: OfClass.items.__setitem__(0, 2.0),
    ),
    "attribute before that of the class": (
        attribute("of", OfClass()), lambda m: m.of.value, attribute("value", 2.0, of="of")
    ),
    "global": (lambda _: None, lambda _: NUMBER, set_global("NUMBER", 2.0)),
    "global of a function": (lambda _: None, lambda _: by_function(), set_global("NUMBER", 2.0)),
    "global dict": (lambda _: None, lambda _: TABLE["a"], lambda _: TABLE.update(a=2.0)),
    "global object": (
        lambda _: None, lambda _: CONFIG.value, lambda _: setattr(CONFIG, "value", 2.0)
    ),
    "global namespace": (
        lambda _: None, lambda _: NAMESPACE.value, lambda _: setattr(NAMESPACE, "value", 2.0)
    ),
    "file by its name": (
        lambda _: None, lambda _: math.tau, lambda _: setattr(math, "tau", 2.0)
    ),
    "default of a function": (
        lambda _: None, lambda _: scaled(), lambda _: setattr(scaled, "__defaults__", (2.0,))
    ),
    "default by name": (
        lambda _: None, lambda _: scaled(),
        lambda _: setattr(scaled, "__kwdefaults__", {"more": 2.0}),
    ),
    "attribute of a function": (
        lambda _: setattr(scaled, "rate", 1.0), lambda _: scaled.rate,
        lambda _: setattr(scaled, "rate", 2.0),
    ),
    # PyTorch's modules
    "dropout": (
        lambda m: m.add_module("drop", nn.Dropout(0.0)), lambda m: m.drop(torch.ones(4)).sum(),
        attribute("p", 0.5, of="drop"),
    ),
    "size of a pool": (
        lambda m: m.add_module("pool", nn.AvgPool1d(1)), lambda m: m.pool(torch.ones(1, 4)).sum(),
        attribute("kernel_size", 2, of="pool"),
    ),
}  # fmt: skip
"""Places by name: what is set before, what forward reads, and how it changes after compiling."""


class Reading(nn.Module):
    """Multiplies by a number that a function reads."""

    def __init__(self, prepare, read):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read
        prepare(self)

    def forward(self, x, y):
        """Return the loss."""
        return (self.layer(x) - y).square().mean() * self.read(self)


@pytest.fixture(autouse=True)
def _same_file(monkeypatch):
    """Restore changes outside of the models."""
    names = {"NUMBER": 1.0, "CONFIG": Config(), "TABLE": {"a": 1.0}}
    for name, value in names.items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(NAMESPACE, "value", 1.0)
    monkeypatch.setattr(OfClass, "value", 1.0)
    monkeypatch.setattr(OfClass, "items", [1.0])
    monkeypatch.setattr(scaled, "__defaults__", (1.0,))
    monkeypatch.setattr(scaled, "__kwdefaults__", {"more": 1.0})
    monkeypatch.setattr(math, "tau", 1.0)


def reading(name):
    """Return a step that reads a place, and a function that changes the place."""
    torch.manual_seed(1)
    prepare, read, change = PLACES[name]
    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    return (Reading(prepare, read), None, inputs), change


def guarded(model, loss_fn, inputs):
    """Return the guards of a captured step, and its flat inputs."""
    joint = pmt.capture(model, loss_fn, inputs)
    guards, flat = Guards(joint), joint.flat_inputs(inputs)
    assert guards.hold(flat)
    return guards, flat


FEW_PLACES = (
    "number", "all attributes", "arguments of a partial", "item by get", "order of a dict",
    "list in a tuple", "mode of a teacher", "object behind another", "class of an object",
    "global dict", "attribute of a function",
)  # fmt: skip
"""One of each kind; `test_front` has items, types and texts, with their words."""


@pytest.mark.parametrize("name", mark_seeds_except(PLACES, FEW_PLACES))
def test_no_place_that_changes_is_ignored(name):
    """The change is named with the line that reads it, for any place."""
    own, change = reading(name)
    guards, flat = guarded(*own)
    change(own[0])
    if name == "default of a function" and torch.__version__ < "2.10":
        assert guards.hold(flat)  # as the page of limits says
        return
    if name == "all attributes" and sys.version_info >= (3, 13) and guards.hold(flat):
        return  # so in torch.compile, too
    assert not guards.hold(flat)
    (words,) = list(guards.differences(flat))
    assert re.search(r" was .* and is |missing|replaced|fails|differ", words)


@pytest.mark.parametrize(
    "name",
    mark_seeds_except(
        ["number", "item of a dict", "dataclass", "global"],
        ["number"],
        ["item of a dict", "dataclass", "global"],
    ),
)
def test_a_change_is_compiled_for_or_refused(name):
    """A step is refused in words; after retracing it has eager's results, for each value."""
    own, change = reading(name)
    step = compile_keep_all(*own, dynamic="retrace")
    strict = compile_keep_all(*own)
    change(own[0])
    assert find_differences(step, *own) == []
    with pytest.raises(pmt.CaptureError, match=r"was 1\.0 and is 2\.0, read at .*compile again"):
        strict(*own[2])
    first = step.compiled
    assert find_differences(step, *own) == []
    assert step.compiled is first


def test_loss_functions_are_guarded_as_models_are():
    """Variables of a closure, attributes of a callable object, and arguments of a partial."""
    weight = 1.0
    model, _, inputs = row_step(nn.Linear(4, 4))

    def by_closure(y, t):
        return (y - t).square().mean() * weight

    class Loss:
        def __init__(self):
            self.weight = 1.0

        def __call__(self, y, t):
            return (y - t).square().mean() * self.weight

    def weighted(y, t, weight):
        return (y - t).square().mean() * weight

    by_object, by_partial = Loss(), partial(weighted, weight=1.0)
    criterion = nn.CrossEntropyLoss()
    labels = (inputs[0], torch.tensor([0, 1, 2]))
    steps = [guarded(model, loss, inputs) for loss in (by_closure, by_object, by_partial)]
    steps += [guarded(model, criterion, labels)]
    weight = 2.0
    by_object.weight = 2.0
    by_partial.keywords["weight"] = 2.0
    criterion.label_smoothing = 0.5
    assert [guards.hold(flat) for guards, flat in steps] == [False] * 4


def setter(value):
    """Return a function that scales by a value, and one that sets the value."""

    def scale():
        return value

    def set_value(new_value):
        nonlocal value
        value = new_value

    return scale, set_value


def test_closures_of_one_factory_are_guarded_each():
    """Functions with the same code have one variable each, and a change of any is found."""
    scales, set_values = zip(*map(setter, (1.0, 2.0, 3.0)), strict=True)
    model = Reading(
        attribute("scales", scales), lambda m: m.scales[0]() * m.scales[1]() * m.scales[2]()
    )
    guards, flat = guarded(model, None, (torch.randn(3, 4), torch.randn(3, 4)))
    for value, set_value in enumerate(set_values, start=1):
        set_value(7.0)
        assert not guards.hold(flat)
        set_value(float(value))
        assert guards.hold(flat)


def test_a_function_with_an_unset_variable_is_another_one():
    """It has the same code as the function before."""
    model = Reading(attribute("by", constant(1.0)), lambda m: m.by())
    guards, flat = guarded(model, None, (torch.randn(3, 4), torch.randn(3, 4)))
    model.by = constant(1.0)
    del model.by.__closure__[0].cell_contents
    assert not guards.hold(flat)
    assert any("closure" in words for words in guards.differences(flat))


# -- what does not count ---------------------------------------------------------------------------
def test_what_is_not_read_changes_nothing(monkeypatch):
    """Counters, logs and settings that forward does not read may change in each step."""

    def read(model):
        table = model.table
        if model.on:
            return UNREAD
        return model.config.value * model.settings["beta"] * table["a"] * TABLE["a"]

    model, _, inputs = row_step(nn.Linear(4, 4))
    model = Reading(lambda _: None, read)
    model.on, model.step, model.log, model.config = False, 0, [], Config()
    model.settings, model.table = {"beta": 1.0, "step": 0}, {"a": 1.0, "n": 0}
    guards, flat = guarded(model, None, inputs)
    monkeypatch.setitem(globals(), "UNREAD", 7.0)
    model.step += 1
    model.log.append(1.0)
    model.config.unread = 5.0
    model.settings["step"] += 1
    model.table["n"] += 1
    TABLE["b"] = 1.0
    model.layer.note = "new"
    assert list(guards.differences(flat)) == []
    assert guards.hold(flat)
    model.settings["beta"] = 2.0
    assert not guards.hold(flat)


UNREAD = 0.0


EQUAL = {
    "list": ([1.0, 2.0], [1.0, 2.0]),
    "dict": ({"a": [1.0]}, {"a": [1.0]}),
    "config": (Config(2.0), Config(2.0, unread=3.0)),
    "tuple": ((1.0, "x"), (1.0, "x")),
    "nested": ((((float("1"),),),), (((float("1"),),),)),
    "nan": (float("nan"), float("nan")),
    "partial": (partial(scaled, 2.0), partial(scaled, 2.0)),
    "whole": (1, 1),
}
"""Attributes of a model, each with two equal values."""


def read_any(value):
    """Return a number of a value."""
    if isinstance(value, Config):
        return value.value
    return value() if callable(value) else float(len(list(map(str, [value]))))


def test_an_equal_value_is_the_same():
    """Settings that are made anew, as by a schedule, need no other step.

    Equal numbers of another type are others, as among the inputs.
    """

    def prepare(model):
        for name, (before, _) in EQUAL.items():
            setattr(model, name, before)

    model = Reading(prepare, lambda m: sum(read_any(getattr(m, name)) for name in EQUAL))
    guards, flat = guarded(model, None, (torch.randn(3, 4), torch.randn(3, 4)))
    for name, (_, after) in EQUAL.items():
        setattr(model, name, after)
        assert guards.hold(flat), name
        assert guards.hold(flat), name
    for name, (_, after) in EQUAL.items():
        for other in (True, 1.0) if name == "whole" else (7.0,):
            setattr(model, name, other)
            assert not guards.hold(flat), name
        setattr(model, name, after)
        assert guards.hold(flat), name


# -- what cannot be guarded ------------------------------------------------------------------------
UNGUARDED = {
    "iterator": (
        attribute("numbers", iter([1.0] * 9)), lambda m: next(m.numbers), "support next|__next__"
    ),
    "array": (
        attribute("numbers", numpy.ones(2)), lambda m: float(m.numbers[0]), "number that is read"
    ),
    "array that is summed": (
        attribute("numbers", numpy.ones(2)), lambda m: float(m.numbers.sum()), "number that is read"
    ),
    "dict with attributes": (
        attribute("numbers", Attributes(a=1.0)), lambda m: m.numbers.a, "__getattr__"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mark_seeds_except(UNGUARDED, {*UNGUARDED} - {"array that is summed"}, UNGUARDED)
)
def test_what_cannot_be_guarded_is_refused(name):
    """The line is named."""
    prepare, read, words = UNGUARDED[name]
    with pytest.raises(pmt.CaptureError, match=rf"{words}.* at .*guards\.py:\d+ \("):
        pmt.capture(Reading(prepare, read), None, (torch.randn(3, 4), torch.randn(3, 4)))


def test_an_array_whose_length_is_read_is_guarded_or_refused():
    """PyTorch 2.9 guards it; later releases fail on it, and the message names the remedy."""
    model = Reading(attribute("numbers", numpy.ones(2)), lambda m: len(m.numbers))
    own = model, None, (torch.randn(3, 4), torch.randn(3, 4))
    try:
        guards, flat = guarded(*own)
    except pmt.CaptureError as error:
        assert re.search(r"NumPy array.*; make it a tensor, or a tuple", str(error))  # noqa: PT017
    else:
        model.numbers = numpy.ones(3)
        assert not guards.hold(flat)


@pytest.mark.slow
def test_any_item_of_a_long_list_is_guarded():
    """A list of numbers may be long."""
    model = Reading(attribute("numbers", [1.0] * 2_000), lambda m: sum(m.numbers))
    guards, flat = guarded(model, None, (torch.randn(3, 4), torch.randn(3, 4)))
    model.numbers[1_500] = 2.0
    assert not guards.hold(flat)


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
def test_an_iterator_is_refused_without_reading_it_to_its_end():
    """An infinite iterator, too; only the passes of the capture take items."""
    numbers = itertools.count()
    model = Reading(attribute("numbers", numbers), lambda m: float(next(m.numbers)))
    with pytest.raises(pmt.CaptureError, match=r"count.* at .*:\d+ \(.*numbers"):
        pmt.capture(model, None, (torch.randn(3, 4), torch.randn(3, 4)))
    assert next(numbers) < 9


# -- what forward changes --------------------------------------------------------------------------
class Counting(nn.Module):
    """Changes Python state in forward, by a function."""

    total = 0

    def __init__(self, change):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.change = change
        self.n, self.log, self.table, self.config = 0, [], {"n": 0}, Config()
        self.seen, self.last = set(), deque(maxlen=2)

    def forward(self, x, y):
        """Return the loss."""
        z = self.layer(x)
        self.change(self, z)
        return (z - y).square().mean()


def count(model, _):
    """Count in an attribute."""
    model.n += 1


def count_in_file(_, __):
    """Count in a name of this file."""
    global NUMBER  # noqa: PLW0603 - what is refused
    NUMBER += 1


def set_in_file(_, z):
    """Read a name of this file, and set it to the same number in each pass."""
    global NUMBER  # noqa: PLW0603 - what is refused
    z.mul_(NUMBER)
    NUMBER = 7.0


def constant_setter():
    """Return a function that reads its closure, and sets it to the same number in each pass."""
    number = 1.0

    def set_number(_, z):
        nonlocal number
        z.mul_(number)
        number = 7.0

    return set_number


def toggler():
    """Return a function that changes its closure in each pass, and back in the next one."""
    is_on = False

    def toggle(_, z):
        nonlocal is_on
        if is_on:
            z.mul_(2.0)
        is_on = not is_on

    return toggle


def counter():
    """Return a function that counts in its closure."""
    calls = 0

    def count_calls(_, __):
        nonlocal calls
        calls += 1

    return count_calls


def count_in_class(model, _):
    """Count in the class."""
    type(model).total += 1


CHANGES = {
    "attribute": count,
    "appended": lambda model, _: model.log.append(1),
    "tensors appended": lambda model, z: model.log.append(z.detach()),
    "item": lambda model, _: model.table.__setitem__("n", model.table["n"] + 1),
    "new item": lambda model, z: model.table.__setitem__(f"{len(model.table)}", len(z)),
    "object": lambda model, _: setattr(model.config, "value", model.config.value + 1),
    "set": lambda model, _: model.seen.add(len(model.seen)),
    "queue": lambda model, _: model.last.append((model.last or [0])[-1] + 1),
    "global": count_in_file,
    "global dict": lambda _, __: TABLE.update(a=TABLE["a"] + 1),
    "global object": lambda _, __: setattr(CONFIG, "value", CONFIG.value + 1),
    "closure": counter(),
    "same global": set_in_file,
    "same closure": constant_setter(),
    "closure and back": toggler(),
    "class": count_in_class,
    "name of an attribute of modules": lambda model, _: setattr(
        model.config, "training", getattr(model.config, "training", 0) + 1
    ),
}


DOORS = {
    "trace": lambda own, _: pmt.trace(*own, measure_workspace=False),
    "export": lambda own, folder: pmt.export(*own, folder=folder, ram="64KiB"),
    "compile": lambda own, _: compile_keep_all(*own),
}


def state_of(model):
    """Return the state that changes may reach."""
    return repr((vars(model), Counting.total, NUMBER, TABLE, CONFIG))


COUNTS_UNREAD = torch.__version__ >= "2.14"
"""Whether PyTorch counts in a step without reading the number, and knows no line of some reads."""
PLACE = "" if COUNTS_UNREAD else r"at .*:\d+ \("
CHANGED = rf"forward changes .* {PLACE}|would be frozen|operator setattr .* at .*:\d+ \("
"""Refusals of a change; the last one is of PyTorch 2.9, for a class."""


@pytest.mark.parametrize(
    "name", mark_seeds_except(CHANGES, ("set", "global dict", "same global", "class"))
)
def test_forward_that_changes_python_state_is_refused(name):
    """The place is named with the line, or the result that differs; modules are as they were."""
    own = Counting(CHANGES[name]), None, (torch.randn(3, 4), torch.randn(3, 4))
    before = repr(vars(own[0]))
    if COUNTS_UNREAD and name in ("global", "closure"):
        pmt.capture(*own)  # a step counts
    else:
        with pytest.raises(pmt.CaptureError, match=CHANGED):
            pmt.capture(*own)
    assert repr(vars(own[0])) == before


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_a_counter(door, tmp_path):
    """The message has the line and a remedy."""
    own = Counting(count), None, (torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(pmt.CaptureError, match=r"changes n from 0 to 1 at .*\(model\.n \+= 1\)"):
        DOORS[door](own, tmp_path)


class Lazy(nn.Module):
    """Stores the result of its first pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.mask, self.base = None, None, 2.0

    @cached_property
    def root(self):
        """A number that is computed once."""
        return self.base**0.5

    def forward(self, x, y):
        """Return the loss."""
        if self.scale is None:
            self.scale = self.base / 2
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        return ((self.layer(x) * self.mask - y).square().mean()) * self.scale * self.root


def test_what_the_first_pass_keeps_is_no_change():
    """Numbers and tables that are computed once; also where eager has kept them meanwhile."""
    model = Lazy()
    own = model, None, (torch.randn(3, 4), torch.randn(3, 4))
    step = compile_keep_all(*own)
    assert (model.scale, model.mask) == (None, None)
    assert find_differences(step, *own) == []
    model(*own[2])
    assert model.scale == 1.0
    assert find_differences(step, *own) == []
    model.scale = 3.0
    with pytest.raises(pmt.CaptureError, match=r"scale was 1\.0 and is 3\.0"):
        step(*own[2])


KEPT, KEPT_IN_OBJECT = None, Config(None)
"""`keep_in_file` sets the first, and `keep_in_object` the value of the second."""


def keep_in_file(_, z):
    """Set a name of this file in the first pass, and read it in all passes."""
    global KEPT  # noqa: PLW0603 - what is tested
    if KEPT is None:
        KEPT = 2.0
    z.mul_(KEPT)


def keep_in_object(_, z):
    """Set an attribute of an object in this file in the first pass, and read it in all passes."""
    if KEPT_IN_OBJECT.value is None:
        KEPT_IN_OBJECT.value = 2.0
    z.mul_(KEPT_IN_OBJECT.value)


def set_kept(model):
    """Set a name of this file in the first pass of a model."""
    global KEPT  # noqa: PLW0603 - what is tested
    if not hasattr(model, "is_kept"):
        model.is_kept = True
        KEPT = 2.0


def read_kept(z):
    """Read a name of this file that another function has set."""
    z.mul_(KEPT)


def keep_by_two_functions(model, z):
    """Set a name of this file in one function, and read it in another one."""
    set_kept(model)
    read_kept(z)


def keeper():
    """Return a function that sets its closure in the first pass, and reads it in all passes."""
    kept = None

    def keep_in_closure(_, z):
        nonlocal kept
        if kept is None:
            kept = 2.0
        z.mul_(kept)

    return keep_in_closure


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(keep_in_file, marks=pytest.mark.slow),  # as by two functions
        *(keep_by_two_functions, keep_in_object, keeper),
    ],
)
def test_what_the_first_pass_keeps_outside_of_the_model_is_guarded(change, monkeypatch):
    """A step accepts the value that eager sets, and refuses another one."""
    monkeypatch.setattr(f"{__name__}.KEPT", None)
    monkeypatch.setattr(KEPT_IN_OBJECT, "value", None)
    change = keeper() if change is keeper else change

    def kept_value():
        if change.__closure__:
            return change.__closure__[0].cell_contents
        return KEPT_IN_OBJECT.value if change is keep_in_object else KEPT

    own = Counting(change), None, (torch.randn(3, 4), torch.randn(3, 4))
    guards, flat = guarded(*own)
    assert kept_value() == 2.0  # as after a first pass of eager mode
    assert find_differences(compile_keep_all(*own), *own) == []
    own[0](*own[2])
    assert guards.hold(flat)
    if change.__closure__:
        change.__closure__[0].cell_contents = 3.0
    else:
        monkeypatch.setattr(f"{__name__}.KEPT", 3.0)
        KEPT_IN_OBJECT.value = 3.0
    assert not guards.hold(flat)


def lazy_root(number, root=None):
    """Return a function that sets a root unless it is set, and one that returns it."""

    def find_root(_, __):
        nonlocal root
        if root is None:
            root = number**0.5
        return root

    return find_root, lambda: root


def test_functions_of_one_factory_have_first_values_of_their_own():
    """A function that has its value, beside another one that is not called and has none."""
    roots = [lazy_root(16.0, 4.0), lazy_root(9.0)]

    def find_first_root(model, z):
        return roots[0][0](model, z)

    own = Counting(find_first_root), None, (torch.randn(3, 4), torch.randn(3, 4))
    assert find_differences(compile_keep_all(*own), *own) == []
    assert [stored_root() for _, stored_root in roots] == [4.0, None]


def test_a_counter_in_the_closure_of_a_further_function_is_followed_or_refused():
    """The second function of a factory counts, the first one was called before.

    PyTorch 2.14 counts without reading the numbers.
    """
    first, second = counter(), counter()
    first(None, None)

    def count_twice(model, z):
        return [count_calls(model, z) for count_calls in (first, second)]

    def counts():
        return [function.__closure__[0].cell_contents for function in (first, second)]

    own = Counting(count_twice), None, (torch.randn(3, 4), torch.randn(3, 4))
    try:
        step = compile_keep_all(*own)
    except pmt.CaptureError as error:
        assert re.search(r"forward changes .*cell_contents", str(error))  # noqa: PT017
    else:
        before = counts()
        step(*own[2])
        assert counts() == [count + 1 for count in before]
