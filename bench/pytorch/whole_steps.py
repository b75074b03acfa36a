"""Measuring one whole step, its optimizer's updates included: the peak of everything it holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel import torch as pmt
from poetmodel.errors import BudgetError, NoScheduleError
from pytorch.measurement import RAN, NoPlanError, details_of, facts_of, no_plan, pairs_of, share_of
from pytorch.networks import NETWORKS
from pytorch.peers import TrainingMethod, checkpoint_per_block, eager, hooks_to_file
from pytorch.process_memory import anonymous_bytes, give_back_at_once, process_peak
from pytorch.runs import FILE_HOOKS, KEEP_ALL, SAFE, TrainingRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytorch.networks import Training

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: Final[dict[str, Maker]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
}
"""What makes each optimizer for parameters."""
WARM_UP_STEPS: Final = 2
"""Steps before those whose peak is measured; the first makes the moments."""
MEASURED_STEPS: Final = 2
"""Steps whose peak is measured."""


def measured(run: TrainingRun, *, folder: str, ram_bytes: int | None = None) -> dict[str, Any]:
    """Run one method on one network, with its optimizer; return what a record says of it.

    Parameters and result are those of `pytorch.measurement.measured`.
    """
    give_back_at_once()
    return facts_of(partial(_compared, run, folder, ram_bytes))


def _compared(run: TrainingRun, folder: str, ram_bytes: int | None) -> dict[str, Any]:
    """Return what steps of a method hold, and what they do beside those of eager.

    Notes
    -----
    Peaks are measured before there is a model to compare with. Then both train side by side, from
    the same weights and with the same random numbers; parameters, moments and buffers are compared
    after the last step, and the losses of all steps. Steps run in a thread of their own, see
    `process_peak`.
    """
    training = _made(run)
    method = _method(run, training, folder, ram_bytes)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_trained, run, training, method).result()


def _trained(run: TrainingRun, training: Training, method: TrainingMethod) -> dict[str, Any]:
    torch.set_num_threads(1)
    steps = _Steps(method, run.seed)
    inputs = training[2]
    for _ in range(WARM_UP_STEPS):
        steps(*inputs)
    before = method.written_bytes()

    def work() -> None:
        for _ in range(MEASURED_STEPS):
            steps(*inputs)

    facts = _peaks(work, _tensors(training, method))
    written = (method.written_bytes() - before) // MEASURED_STEPS
    twin = _made(run)
    reference = updated(eager(twin), twin, MAKERS[run.optimizer or ""])
    expected = _Steps(reference, run.seed)
    for _ in steps.losses:
        expected(*inputs)
    pairs = pairs_of(TrainingMethod(run=steps), TrainingMethod(run=expected), inputs, run.pairs)
    unequal = list(_unequal(training, method, twin, reference))
    return {
        "status": RAN,
        "reason": "",
        **facts,
        "written_bytes": written,
        "pairs": pairs,
        "unequal": len(unequal),
        "unequal_names": unequal[:5],
        "equal": not unequal and steps.losses == expected.losses,
        **method.details,
    }


def _made(run: TrainingRun) -> Training:
    torch.manual_seed(run.seed)
    return NETWORKS[run.network]()


class _Steps:
    """Runs steps, each from random numbers of its own, and keeps the losses."""

    def __init__(self, method: TrainingMethod, seed: int) -> None:
        self._method, self._seed = method, seed
        self.losses: list[float] = []

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(self._seed + 1 + len(self.losses))
        loss = self._method.run(*inputs)
        self.losses.append(loss.item())
        return loss


def _peaks(work: Callable[[], object], tensors: list[torch.Tensor]) -> dict[str, int]:
    """Return peaks of the process over what it holds that is no tensor: libraries and programs."""
    there = anonymous_bytes(tensors)
    peak = process_peak(work)
    return {
        "baseline_bytes": peak.before_bytes - there,
        "state_bytes": there,
        "peak_bytes": there + peak.anonymous_bytes - peak.before_bytes,
        "process_peak_bytes": there + peak.total_bytes - peak.total_before_bytes,
    }


def _tensors(training: Training, method: TrainingMethod) -> list[torch.Tensor]:
    """Return what is there between steps: parameters, moments, buffers and inputs."""
    model, _, inputs = training
    moments = (t for p in model.parameters() for t in method.moments(p).values())
    return [*model.parameters(), *model.buffers(), *inputs, *moments]


def _unequal(
    training: Training, method: TrainingMethod, twin: Training, reference: TrainingMethod
) -> Iterator[str]:
    """Yield the names of parameters, moments and buffers that are not eager's."""
    others = dict(twin[0].named_parameters())
    for name, parameter in training[0].named_parameters():
        found, expected = method.moments(parameter), reference.moments(others[name])
        if not torch.equal(parameter, others[name]):
            yield name
        for key in found.keys() | expected.keys():
            mine, its = (held.get(key) for held in (found, expected))
            if mine is None or its is None or not torch.equal(mine, its):
                yield f"{key} of {name}"
    buffers = dict(twin[0].named_buffers())
    for name, buffer in training[0].named_buffers():
        if not torch.equal(buffer, buffers[name]):
            yield f"buffer {name}"


# -- methods ---------------------------------------------------------------------------------------


def _method(
    run: TrainingRun, training: Training, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    make = MAKERS[run.optimizer or ""]
    if run.own is not None:
        return compiled(training, make, run, folder=folder, ram_bytes=ram_bytes)
    if run.method.endswith("checkpoint"):
        checkpoint_per_block(training)
    if run.method.startswith("in-backward"):
        return in_backward(training, make)
    files = run.method == FILE_HOOKS
    learns = hooks_to_file(training, folder) if files else eager(training)
    return updated(learns, training, make)


def updated(method: TrainingMethod, training: Training, make: Maker) -> TrainingMethod:
    """Return a method that updates all parameters after it has computed the gradients."""
    optimizer = make(training[0].parameters())
    learn = method.run

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        loss = learn(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return replace(method, run=run, moments=lambda parameter: dict(optimizer.state[parameter]))


def in_backward(training: Training, make: Maker) -> TrainingMethod:
    """Update each parameter as soon as its gradient is there, which then goes."""
    of = {p: make([p]) for p in training[0].parameters() if p.requires_grad}

    def update(parameter: torch.Tensor) -> None:
        of[parameter].step()
        parameter.grad = None

    for parameter in of:
        parameter.register_post_accumulate_grad_hook(update)
    moments = lambda parameter: dict(of[parameter].state.get(parameter, {}))  # noqa: E731
    return replace(eager(training), moments=moments)


def compiled(
    training: Training, make: Maker, run: TrainingRun, *, folder: str, ram_bytes: int | None
) -> TrainingMethod:
    """Compile a whole step that keeps a budget.

    Raises
    ------
    NoPlanError
        If there is no plan.
    """
    optimizer = make(training[0].parameters())
    frees = run.own != KEEP_ALL
    try:
        step = pmt.compile(
            *training, optimizer=optimizer, storage=folder,
            ram=f"{share_of(run):.0%}" if ram_bytes is None else ram_bytes,
            paging=frees, recompute=frees, time_limit=run.limit_s, rollback=run.own == SAFE,
            cache=Path(folder) / "cache",
        )  # fmt: skip
    except (NoScheduleError, BudgetError) as error:
        raise NoPlanError(no_plan(error)) from error
    runner = step.compiled.runner
    return TrainingMethod(
        run=step,
        written_bytes=lambda: runner.traffic[0] + runner.mirrored_bytes,
        moments=lambda parameter: dict(optimizer.state[parameter]),
        details=details_of(step),
    )
