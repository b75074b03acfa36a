"""Homes: state on storage is there as any tensor is, and steps change it as a whole."""

from __future__ import annotations

import copy
import errno
import gc
import os
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.rotation import quick  # noqa: E402
from poetmodel.torch import PageError  # noqa: E402
from poetmodel.torch.state.pages import blank, bytes_of  # noqa: E402
from poetmodel.torch.state.store import StateStore  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


class Run:
    """A model with its optimizer and homes; `step` adds 1 to all that a step updates."""

    def __init__(self, folder: Path, *, rollback: bool = True, share: float = 0.5) -> None:
        self.model, self.optimizer = network()
        inputs = (torch.randn(2, 40), torch.randint(0, 3, (2,)))
        loss_fn = torch.nn.functional.cross_entropy
        self.trace = pmt.trace(
            self.model, loss_fn, inputs, optimizer=self.optimizer, measure_workspace=False
        )
        storages = self.trace.parts.storages
        self.updated = {s.replaces: s.index for s in storages if s.replaces is not None}
        large = [i for i in self.updated if storages[i].bytes >= 4096]
        self.away = frozenset(large[: int(len(large) * share)])
        self.moments = [a.held for a in self.trace.joint.arguments if hasattr(a.held, "keep")]
        self.homes = StateStore(self.trace, self.away, folder=folder, rollback=rollback)

    def step(self, *, commits: bool = True) -> None:
        """Do what a step does: state on storage is paged, the rest is updated where it is."""
        self.homes.begin()
        file = self.homes.file
        for index in self.away:
            held, value = blank(file.storages[index])
            file.read(index, bytes_of(held))
            value.add_(1)
            file.write(index, bytes_of(held))
        for moment in self.moments:
            place = self.place(moment)
            if place not in self.away:
                value = moment.value()
                moment.keep(value.add_(1))
        with torch.no_grad():
            for argument in self.trace.joint.owned:
                index, _ = self.trace.parts.direct.get(argument.node, (None, 0))
                if index in self.updated and index not in self.away:
                    self.trace.joint.value(argument).add_(1)
        if commits:
            self.homes.commit()

    def place(self, moment: Any) -> int:
        """Return the number of a moment's storage."""
        for argument in self.trace.joint.arguments:
            if argument.held is moment:
                return int(self.trace.parts.direct[argument.node][0])
        raise AssertionError

    def state(self) -> dict[str, Any]:
        """Return copies of everything."""
        found = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for k, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{k}.{key}": value.clone() for key, value in kept.items()}
        return found


def network() -> tuple[Any, Any]:
    """Return a network with buffers, a layer without use, and an optimizer of all of it."""
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.ReLU(), torch.nn.Linear(60, 3)
    )
    model.unused = torch.nn.Linear(2, 2)
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states are the same."""
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def test_a_step_changes_the_state_and_a_failed_one_does_not(tmp_path: Path) -> None:
    """Wherever tensors have their homes, and also what the first step makes."""
    run = Run(tmp_path)
    start = run.state()
    run.step(commits=False)
    run.homes.rollback()
    assert equal(run.state(), start)
    run.step()
    first = run.state()
    assert not equal(first, start)
    for index in run.away:
        name = run.trace.parts.storages[index].name
        assert f"model.{name}" not in start or torch.equal(
            first[f"model.{name}"], start[f"model.{name}"] + 1
        )
    run.step(commits=False)
    run.homes.rollback()
    assert equal(run.state(), first)
    run.homes.close()
    assert equal(run.state(), first)
    assert list(tmp_path.iterdir()) == []


def test_recover_loads_the_last_whole_state(tmp_path: Path) -> None:
    """All is as after the last commit: buffers, what no step reads, the random generator too."""
    run = Run(tmp_path)
    run.step()
    run.step()
    expected, random = run.state(), torch.get_rng_state()
    run.step(commits=False)
    kill(run)
    torch.randn(3)
    model, optimizer = network()
    assert pmt.recover(tmp_path, model, optimizer) == 2
    assert torch.equal(torch.get_rng_state(), random)
    run.model, run.optimizer = model, optimizer
    assert equal(run.state(), expected)


@pytest.mark.parametrize(
    ("share", "rollback"),
    quick(
        [(share, rollback) for share in (0.0, 0.5, 1.0) for rollback in (True, False)],
        [(0.0, True), (0.5, True), (1.0, False)],
    ),
)
def test_what_a_user_changes_between_steps_counts(
    tmp_path: Path, share: float, *, rollback: bool
) -> None:
    """In place, by other data, by loaded states; it counts for the next step and its failure."""
    run = Run(tmp_path, share=share, rollback=rollback)
    early = run.state()
    run.step()
    saved = [
        {k: v.clone() for k, v in run.model.state_dict().items()},
        run.optimizer.state_dict(),
    ]
    saved[1]["state"] = {
        k: {n: v.clone() for n, v in kept.items()} for k, kept in saved[1]["state"].items()
    }
    kept = run.state()
    run.step()
    parameter = run.model[0].weight
    address = parameter.data_ptr()
    with torch.no_grad():
        parameter[3] = 7.0
    parameter.data[4] = 8.0
    run.step()
    assert run.state()["model.0.weight"][3].unique().tolist() == [8.0]
    assert run.state()["model.0.weight"][4].unique().tolist() == [9.0]
    assert parameter.data_ptr() == address
    parameter.data = torch.full_like(parameter, 2.0)
    run.model[1].running_mean.data = torch.full((60,), 3.0)
    run.step()
    assert run.state()["model.0.weight"].unique().tolist() == [3.0]
    before = run.state()
    run.model.share_memory()
    run.step()
    assert torch.equal(run.state()["model.0.weight"], before["model.0.weight"] + 1)
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    assert equal(run.state(), kept)
    if rollback:
        run.step(commits=False)
        run.homes.rollback()
        assert equal(run.state(), kept)
    run.step()
    after = run.state()
    assert torch.equal(after["0.exp_avg"], kept["0.exp_avg"] + 1)
    run.optimizer.state.clear()
    run.homes.begin()
    assert run.state().keys() == early.keys()
    run.step()
    assert run.state()["0.exp_avg"].unique().tolist() == [1.0]
    run.homes.close()


def test_changes_count_where_the_system_tells_nothing_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page map that can be opened and not read is as none: contents are compared."""
    asked = []

    def refused(descriptor: int, size: int, offset: int) -> NoReturn:
        asked.append((descriptor, size, offset))
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    run = Run(tmp_path, share=0.5, rollback=True)
    run.step()
    monkeypatch.setattr(os, "pread", refused)
    with torch.no_grad():
        run.model[0].weight[3] = 7.0
    before = run.state()
    run.step()
    assert asked
    assert torch.equal(run.state()["model.0.weight"], before["model.0.weight"] + 1)
    run.homes.close()


def test_homes_may_move(tmp_path: Path) -> None:
    """From RAM to storage and back, with the same addresses from the first move on."""
    run = Run(tmp_path, share=1.0)
    run.step()
    everything = run.away
    for away in (frozenset(list(everything)[:1]), frozenset(), everything):
        before = run.state()
        run.homes.begin(away)
        run.away = away
        assert run.homes.on_storage == away
        assert equal(run.state(), before)
        run.step()
        for key, value in run.state().items():
            fixed = key.startswith("model.unused")
            assert torch.equal(value, before[key] if fixed else before[key] + 1), key
    run.homes.close()


def test_trial_steps_are_seen_and_forgotten(tmp_path: Path) -> None:
    """Their results are where they belong; what is killed meanwhile leaves the state of before."""
    run = Run(tmp_path)
    run.step()
    before = run.state()
    with run.homes.trial():
        for _ in range(3):
            run.step()
            for key, value in run.state().items():
                fixed = key.startswith("model.unused")
                assert torch.equal(value, before[key] if fixed else before[key] + 1), key
            put_back(run, before)
        put_back(run, before)
    assert equal(run.state(), before)
    assert run.homes.file.record.steps == 1
    run.step()
    after = run.state()
    with pytest.raises(OSError, match="Bad file descriptor"):
        killed_trial(run)
    run.model, run.optimizer = network()
    assert pmt.recover(tmp_path, run.model, run.optimizer) == 2
    assert equal(run.state(), after)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_changes_outlive_a_medium_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """What a user has loaded is there when the next step cannot begin, and counts when it can."""
    run = Run(tmp_path, share=share)
    run.step()
    run.model[0].weight.data.fill_(5.0)
    run.model[3].weight.data = torch.full_like(run.model[3].weight, 6.0)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.optimizer.state[run.model[0].weight]["exp_avg"].fill_(7.0)
    changed = run.state()

    def fail(_: int) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        for _ in range(2):
            with pytest.raises(PageError):
                run.homes.begin()
            assert equal(run.state(), changed)
    run.step(commits=False)
    run.homes.rollback()
    assert equal(run.state(), changed)
    run.homes.close()
    assert equal(run.state(), changed)


def put_back(run: Run, state: dict[str, Any]) -> None:
    """Let everything be as it was, in place."""
    with torch.no_grad():
        for key, value in run.model.state_dict().items():
            value.copy_(state[f"model.{key}"])
        for k, kept in run.optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                value.copy_(state[f"{k}.{key}"])


def test_state_comes_back_when_homes_are_forgotten(tmp_path: Path) -> None:
    """The file goes with its object, and tensors stay where they are."""
    run = Run(tmp_path, share=1.0)
    run.step()
    expected, address = run.state(), run.model[0].weight.data_ptr()
    run.homes.close()
    other = Run(tmp_path, share=1.0)
    other.step()
    model, optimizer, before = other.model, other.optimizer, other.state()
    assert len(list(tmp_path.iterdir())) == 1
    del other
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert equal(
        {f"model.{k}": v for k, v in model.state_dict().items()}
        | {
            f"{k}.{key}": v
            for k, kept in optimizer.state_dict()["state"].items()
            for key, v in kept.items()
        },
        before,
    )
    assert equal(run.state(), expected)
    assert run.model[0].weight.data_ptr() == address
    run.model[0].weight.data.zero_()
    assert not run.model[0].weight.any()


def killed_trial(run: Run) -> None:
    """Be killed after two trial steps; what follows in this process fails."""
    with run.homes.trial():
        run.step()
        run.step()
        kill(run)


def kill(run: Run) -> None:
    """Let go of the file as the system does when a process is killed."""
    run.homes.file.leave()
