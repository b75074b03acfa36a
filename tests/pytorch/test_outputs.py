"""What a step returns that gets its inputs by name: the output of the model, detached."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import keep_all  # noqa: E402
from kit.rotation import quick  # noqa: E402
from poetmodel.torch.capturing.inputs import OutputForm  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


class Output(OrderedDict):
    """Like the outputs of transformers: items are attributes too, and what is None is left out."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type] - it is a dataclass below
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Cache:
    """Like the caches of language models."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys


@dataclass(eq=False)
class Named(Output):
    """An output with names."""

    loss: Any = None
    logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None


Pair = namedtuple("Pair", ("loss", "logits"))  # noqa: PYI024 - what users have

RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "dataclass": lambda loss, y: Named(loss=loss, logits=y, hidden_states=(y * 2, y[:1])),
    "dict": lambda loss, y: {"logits": y, "loss": loss, "size": 3, "parts": [y + 1, None]},
    "tuple": lambda loss, y: (loss, y, (y.sum(), "words")),
    "list": lambda loss, y: [loss, {"y": y}],
    "named tuple": Pair,
    "UserDict": lambda loss, y: UserDict(loss=loss, y=y),
    "object": lambda loss, y: SimpleNamespace(loss=loss, logits=y, count=2),
    "tensor": lambda loss, _: loss,
    "twice": lambda loss, y: {"loss": loss, "again": loss, "y": y, "same": y},
}


class Model(nn.Module):
    """Batch norm between two layers, and dropout; what it returns is rows."""

    def __init__(self, result: Callable[[Any, Any], Any] = RESULTS["dict"]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.result = result

    def forward(self, x: Any, labels: Any = None, scale: Any = None) -> Any:
        """Return the output, with a loss where there are labels."""
        y = self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5, self.training))
        if scale is not None:
            y = y * scale
        loss = None if labels is None else nn.functional.cross_entropy(y, labels)
        return self.result(loss, y)


def batch(size: int = 5) -> dict[str, Any]:
    """Return a batch."""
    return {"x": torch.randn(size, 4), "labels": torch.randint(0, 3, (size,))}


def flat(value: Any) -> list[Any]:
    """Return all that is in an output, with its types, in order."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict | UserDict):
        return [type(value), *(leaf for key in value for leaf in (key, *flat(value[key])))]
    if isinstance(value, tuple | list):
        return [type(value), *(leaf for item in value for leaf in flat(item))]
    return [value]


def agree(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal bit for bit."""
    pairs = zip(flat(one), flat(other), strict=True)
    return type(one) is type(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


def loss_of(output: Any) -> Any:
    """Return the loss of an output."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict | UserDict):
        return output["loss"]
    return getattr(output, "loss", None) if hasattr(output, "loss") else output[0]


def compiled(model: Any, rows: Any, **options: Any) -> pmt.Step:
    """Return a step that is not measured."""
    return pmt.compile(model, None, rows, **{"ram": "100%", "device": "rpi4b", **options})


@pytest.mark.parametrize("kind", quick(RESULTS, ("dataclass", "dict", "tuple", "object")))
def test_a_step_returns_what_the_model_does(kind: str) -> None:
    """The same type with the same values, detached; gradients and buffers are those of eager."""
    torch.manual_seed(1)
    model = Model(RESULTS[kind])
    twin = copy.deepcopy(model)
    step = compiled(model, batch())
    for _ in range(2):
        rows = batch()
        state = torch.get_rng_state()
        expected = twin(**rows)
        loss_of(expected).backward()
        torch.set_rng_state(state)
        found = step(**rows)
        assert agree(found, expected)
        assert not any(leaf.requires_grad for leaf in flat(found) if isinstance(leaf, torch.Tensor))
        grads = [[parameter.grad for parameter in net.parameters()] for net in (model, twin)]
        assert all(map(torch.equal, *grads))
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
    assert step.verify().equal
    assert step.verify(**rows).equal


def test_results_of_a_call_are_its_own() -> None:
    """No later step changes them, though memory of the step is used again."""
    torch.manual_seed(1)
    model = Model(lambda loss, y: (loss, y, y[0], model.norm.running_mean.clone()))
    step = compiled(model, batch())
    found = step(**batch())
    before = copy.deepcopy(found)
    step(**batch())
    assert agree(found, before)


def test_caches_are_left_out() -> None:
    """An object that is no output of its own is None, and a dataclass goes without it."""
    torch.manual_seed(1)
    model = Model(lambda loss, y: Named(loss=loss, logits=y, past_key_values=Cache(y)))
    found = compiled(model, batch())(**batch())
    assert found.past_key_values is None
    assert list(found) == ["loss", "logits"]


def test_arguments_among_the_results_are_detached() -> None:
    """A parameter, a buffer or an input that a model returns takes no part in autograd."""
    torch.manual_seed(1)
    model = Model(lambda loss, y: (loss, model.last.weight, model.norm.running_mean, y))
    step = compiled(model, batch())
    _, weight, mean, _ = step(**batch())
    assert torch.equal(weight, model.last.weight)
    assert torch.equal(mean, model.norm.running_mean)
    assert not weight.requires_grad
    assert step.verify().equal


def test_batches_come_by_name() -> None:
    """As keywords or as one mapping of any type, in any order; its type does not matter."""
    torch.manual_seed(1)
    model = Model().eval()
    rows = batch()
    step = compiled(model, UserDict(rows))
    first = step(**rows)
    for other in (rows, UserDict(rows), OrderedDict(reversed(rows.items()))):
        assert agree(step(other), first)
    assert agree(step(**dict(reversed(rows.items()))), first)


@pytest.fixture(scope="module")
def kept() -> pmt.Step:
    """Return a step that tests do not run."""
    torch.manual_seed(1)
    return compiled(Model(), batch())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda step, b: step(x=b["x"]), r"\(labels, x\), and labels missing"),
        (lambda step, b: step(**b, scale=1.0), "and scale new"),
        (lambda step, b: step(x=b["x"], y=b["labels"]), "labels missing and y new"),
        (lambda step, b: step(b["x"], b["labels"]), r"by name.*step\(\*\*batch\); got 2 without"),
        (lambda step, b: step({"x": b["x"]}, labels=b["labels"]), "by name.*; got labels"),
        (lambda step, _: step(), "labels, x missing"),
        (
            lambda step, b: step(x=b["x"][:2], labels=b["labels"]),
            r"x was float32 \[5, 4\].*\[2, 4\]",
        ),
        (lambda step, b: step(x=[b["x"]], labels=b["labels"]), "nested as"),
        (lambda step, b: step(x=b["x"].numpy(), labels=b["labels"]), "x: expected.*of numpy"),
    ],
)
def test_other_names_are_told(call: Callable[..., Any], words: str, kept: pmt.Step) -> None:
    """Missing and unknown ones, inputs without names, and other forms by their name."""
    with pytest.raises(pmt.CaptureError, match=words):
        call(kept, batch())


@pytest.mark.parametrize(
    ("rows", "loss_fn", "words"),
    [
        ({"x": torch.ones(2, 4)}, None, "no loss .*dict.*labels"),
        ({"x": torch.ones(2, 4), "y": 1}, None, "unexpected keyword argument 'y'"),
        ({"labels": torch.ones(2)}, None, "missing a required argument: 'x'"),
        ({"x": torch.ones(2, 4)}, nn.functional.mse_loss, "loss_fn: a batch of named inputs"),
        ({1: torch.ones(2, 4)}, None, "names of parameters of forward as keys, got 1"),
        ({}, None, "expected inputs"),
    ],
)
def test_batches_that_do_not_fit_are_told(rows: Any, loss_fn: Any, words: str) -> None:
    """By what is wrong with their names."""
    with pytest.raises(pmt.CaptureError, match=words):
        keep_all(Model(), loss_fn, rows)


def test_other_batches_are_compiled_for_if_asked() -> None:
    """Of another size, and with other names."""
    torch.manual_seed(1)
    model = Model()
    step = compiled(model, batch(), dynamic="retrace")
    for rows in (batch(), batch(2), {**batch(), "scale": torch.tensor(2.0)}, batch()):
        assert step.verify(**rows).equal
        state = torch.get_rng_state()
        expected = copy.deepcopy(model)(**rows)
        torch.set_rng_state(state)
        assert agree(step(**rows), expected)


def test_a_batch_in_a_tuple_gives_the_loss() -> None:
    """As before: nothing else is held till the end."""
    torch.manual_seed(1)
    model, rows = Model().eval(), batch()
    step = compiled(model, (rows,))
    assert torch.equal(step(rows), model(**rows)["loss"])


def test_results_count_against_the_budget(tmp_path: Path) -> None:
    """They are held till the end of the step, with recomputing and paging around them."""

    class Wide(Model):
        def forward(self, x: Any, labels: Any = None) -> Any:  # type: ignore[override]
            y = x
            for _ in range(6):
                y = self.first(y).relu()[:, :4].sin()
            return {"loss": (y.sum(1) - labels).square().mean(), "y": y, "wide": y.repeat(1, 8)}

    torch.manual_seed(1)
    rows = {"x": torch.randn(2000, 4), "labels": torch.randn(2000)}
    model = Wide()
    step = compiled(model, rows, ram="70%", storage=tmp_path)
    certificate = step.verify()
    assert certificate.equal
    assert certificate.within_budget
    assert agree(step(**rows), model(**rows))
    alone = compiled(model, (rows,), ram="100%")
    assert compiled(model, rows).budget_bytes >= alone.budget_bytes + 2000 * 8 * 4


def test_updates_and_results_go_together() -> None:
    """With an optimizer the step returns what the model did before the updates."""
    torch.manual_seed(1)
    model = Model(lambda loss, y: (loss, y, model.last.weight))
    model.eval()
    before = model.last.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compiled(model, batch(), optimizer=optimizer)
    assert step.verify().equal
    _, _, weight = step(**batch())
    assert torch.equal(weight, before)
    assert not torch.equal(weight, model.last.weight)


def test_updates_go_on_with_batches_of_other_sizes() -> None:
    """One optimizer for all of them: the weights are those of eager."""
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (model, twin)]
    step = compiled(model, batch(), optimizer=optimizers[0], dynamic="retrace")
    for size in (5, 3, 5):
        rows = batch(size)
        state = torch.get_rng_state()
        loss = twin(**rows)["loss"]
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.set_rng_state(state)
        assert torch.equal(step(**rows)["loss"], loss)
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert step.verify(**batch(3)).equal


LEAVES = st.one_of(
    st.builds(torch.full, st.just((2,)), st.integers(0, 9)),
    st.none(),
    st.integers(),
    st.text(),
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Named, loss=inner, logits=inner),
    ),
    max_leaves=8,
)


@given(output=NESTS)
def test_a_form_gives_back_what_it_took(output: Any) -> None:
    """With the same types, for nests of all kinds; other tensors come in the same places."""
    loss = torch.zeros(())
    form, others = OutputForm.of({"loss": loss, "rest": output}, loss)
    assert len(form.names) == len(others)
    made = form.filled(loss, [value + 1 for value in others])
    again, found = OutputForm.of(made, loss)
    assert again.names == form.names
    assert all(torch.equal(a, b + 1) for a, b in zip(found, others, strict=True))
    assert agree(form.filled(loss, others), {"loss": loss, "rest": output})


def test_a_form_takes_any_tensors() -> None:
    """What is made of it has the rows ones in their places, and holds none of the first."""
    loss, y = torch.ones(()), torch.arange(3)
    form, others = OutputForm.of({"loss": loss, "deep": [(y, loss)], "n": 1}, loss)
    assert others == [y]
    assert form.names == ("deep[0][0]",)
    made = form.filled(loss * 2, [y * 2])
    assert agree(made, {"loss": loss * 2, "deep": [(y * 2, loss * 2)], "n": 1})
    assert agree(list(form.named(made).values()), [loss * 2, y * 2])
