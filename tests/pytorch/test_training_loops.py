"""Loops as people write them: a compiled step in place of forward pass, loss and `backward()`."""

import copy
import os

import pytest
import torch

import poetmodel.torch as pmt
from kit.networks import resnet
from kit.rotation import mark_seeds_except
from poetmodel.errors import InputError
from poetmodel.torch.wrapping import loss_module

nn = torch.nn

QUICK = {"ram": "100%", "device": "rpi4b", "dynamic": "retrace"}
"""Options of steps that are neither measured nor squeezed."""


class Classifier(nn.Module):
    """Batch norm and dropout between two layers; its loss is one of its outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x, labels):
        """Return loss and logits."""
        y = self.norm(self.first(x)).relu()
        logits = self.last(nn.functional.dropout(y, 0.3, self.training))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Images(nn.Module):
    """A residual network, called as `Classifier` is."""

    shape = (3, 16, 16)

    def __init__(self):
        super().__init__()
        self.net = resnet(blocks=2)

    def forward(self, x, labels):
        """Return loss and logits."""
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count, shape=(6,)):
    """Return a data set."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(shape, generator=generator), "labels": torch.tensor(k % 3)}
        for k in range(count)
    ]


class Loop:
    """A plain loop of its own model: everything that people have in one."""

    def __init__(self, model, count, accumulate=1):
        torch.manual_seed(2)
        self.model = copy.deepcopy(model)
        self.accumulate = accumulate
        self.rows = rows(count, getattr(model, "shape", (6,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)
        self.step = None
        self.done = 0
        self.losses = []

    def compiled(self, **options):
        """Return the same loop with a compiled step."""
        batch = torch.utils.data.default_collate(self.rows[:4])
        given = {**QUICK, "accumulate": self.accumulate, **options}
        self.step = pmt.compile(self.model, None, batch, **given)
        return self

    def epoch(self, *, until=100):
        """Run an epoch from where it is, in an order of its own; evaluate at its end."""
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(3)).tolist()
        batches = [[self.rows[k] for k in order[i : i + 4]] for i in range(0, len(order), 4)]
        self.model.train()
        for batch in map(torch.utils.data.default_collate, batches[self.done : until]):
            if self.step is None:
                out = self.model(**batch)
                (out["loss"] / self.accumulate).backward()
            else:
                out = self.step(**batch)
            self.done += 1
            self.losses.append(out["loss"].item())
            if self.done % self.accumulate == 0 or self.done == len(batches):
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.average.update_parameters(self.model)
        self.average.eval()
        with torch.no_grad():
            whole = torch.utils.data.default_collate(self.rows)
            self.losses.append(self.average(**whole)["loss"].item())

    def saved(self):
        """Return a checkpoint."""
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return {
            "schedule": self.schedule.state_dict(),
            "done": self.done,
            "random": torch.get_rng_state(),
            **{name: part.state_dict() for name, part in parts.items()},
        }

    def load(self, saved):
        """Go on from a checkpoint."""
        for name in ("model", "average", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(saved[name])
        self.done = saved["done"]
        torch.set_rng_state(saved["random"])

    def weights(self):
        """Return all that was trained."""
        return [*self.model.state_dict().values(), *self.average.state_dict().values()]


CASES = [(Classifier, 16, 1, "100%"), (Classifier, 26, 2, "100%"), (Classifier, 18, 3, "100%")]
CASES += [(Images, 18, 2, "60%"), (Images, 100, 3, "50%")]


@pytest.mark.parametrize(
    ("make", "count", "accumulate", "ram"), mark_seeds_except(CASES, CASES[1:2], CASES[3:4])
)
def test_a_plain_loop_gives_the_weights_of_eager(
    make, count, accumulate, ram, tmp_path, monkeypatch
):
    """With accumulation, clipping, a schedule, averaged weights, and a smaller last batch.

    So it is in a smaller budget.
    """
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing here depends on the medium
    model = make()
    ours = Loop(model, count, accumulate).compiled(
        ram=ram, storage=None if ram == "100%" else tmp_path, time_limit=5
    )
    assert (ours.step.result.overhead_j > 0) == (ram != "100%")
    eager = Loop(model, count, accumulate)
    for loop in (eager, ours):
        torch.manual_seed(4)
        for _ in range(2):
            loop.done = 0
            loop.epoch()
    assert ours.losses == eager.losses
    assert all(map(torch.equal, ours.weights(), eager.weights()))
    assert ours.step is not None
    assert ours.step.verify().equal


def test_modes_of_parts_stay():
    """A norm that is frozen in a model that trains is not set to training."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model[0].eval()
    wrapped = loss_module(model, lambda network, x: network(x).sum())
    assert (wrapped.training, model.training, model[0].training) == (True, True, False)


def test_a_loop_resumes_within_an_epoch(tmp_path):
    """A checkpoint in the middle, read by a new process as it were, ends in the same weights."""
    model = Classifier()
    eager = Loop(model, 24)
    torch.manual_seed(4)
    eager.epoch()
    first = Loop(model, 24).compiled()
    torch.manual_seed(4)
    first.epoch(until=3)
    torch.save(first.saved(), tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    second = Loop(Classifier(), 24).compiled()
    second.load(torch.load(tmp_path / "checkpoint.pt"))
    second.epoch()
    assert second.done == eager.done == 6
    names = [*model.state_dict(), *eager.average.state_dict()]
    pairs = zip(names, second.weights(), eager.weights(), strict=True)
    assert [name for name, a, b in pairs if not torch.equal(a, b)] == []


def test_the_loss_that_comes_back_is_not_divided():
    """Gradients are those of the part; a second step adds its own."""
    model = Classifier().eval()
    batch = torch.utils.data.default_collate(rows(4))
    whole = pmt.compile(model, None, batch, **QUICK)
    part = pmt.compile(model, None, batch, **QUICK, accumulate=4)
    loss = whole(**batch)["loss"]
    gradients = [parameter.grad / 4 for parameter in model.parameters()]
    model.zero_grad()
    assert torch.equal(part(**batch)["loss"], loss)
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert part.verify().equal
    assert "accumulate=4" in part.report()["call"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="updates at once"):
        pmt.compile(model, None, batch, ram="100%", accumulate=2, optimizer=optimizer)


@pytest.mark.large
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accumulate):
    """``accumulate``, ``clip_grad_norm_`` and prepared parts around a compiled step."""
    accelerate = pytest.importorskip("accelerate")
    model = Classifier()

    def trained(*, ours):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(rows(18), batch_size=4)
        net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
        step = None
        if ours:
            batch = next(iter(loader))
            step = pmt.compile(net, None, batch, **QUICK, accumulate=accumulate)
        torch.manual_seed(4)
        for batch in loader:
            with accelerator.accumulate(net):
                if step is None:
                    accelerator.backward(net(**batch)["loss"])
                else:
                    step(**batch)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return list(net.state_dict().values())

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))
