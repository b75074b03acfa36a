"""Killed processes: whatever a compiled step was at, the state of one whole step is found."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit import killed_run  # noqa: E402
from poetmodel.torch.state.file import PREFIX  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = Path(killed_run.__file__)


def apart(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of what differs."""
    names = sorted(found.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


def recovered(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the steps and the state that are found, and leave the file."""
    model, optimizer = killed_run.network()
    steps = pmt.recover(folder, model, optimizer)
    return steps, killed_run.state(model, optimizer)


def killed_child(folder: Path, number: int, options: dict[str, Any]) -> int:
    """Train a forked process for two steps, and kill it at a call of the second; return the calls.

    With a number that is negative nothing is killed.
    """
    child = os.fork()
    if child == 0:
        try:
            model, optimizer = killed_run.network()
            step = killed_run.compiled(model, optimizer, folder, **options)
            step(*killed_run.batch(0))
            killed_run.kill_at(number)
            step(*killed_run.batch(1))
            (folder / "calls").write_text(str(len(killed_run.calls)))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    counted = folder / "calls"
    return int(counted.read_text()) if number < 0 else 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"background_io": True}, {"ram": "100%"}], ids=str)
def test_a_kill_at_any_write_or_sync_leaves_one_whole_state(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Before the record is on the medium that of the step before, after it the new one."""
    expected = killed_run.eager_states(2)
    count = killed_child(tmp_path / "all", -1, options)
    assert count > 10
    seen = []
    for number in sorted({*range(0, count, max(1, count // 8)), *range(count - 5, count)}):
        folder = tmp_path / str(number)
        killed_child(folder, number, options)
        steps, found = recovered(folder)
        assert not apart(found, expected[steps])
        seen.append(steps)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """Each process goes on with the state that the killed one left."""
    steps, kills = 300, 5
    chance = random.Random(5)  # noqa: S311 - no secret
    expected = killed_run.eager_states(steps)
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(steps)]
    latest = at_work = 0
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"from {latest}\n"
            time.sleep(chance.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().splitlines()
        said = [int(line.split()[1]) for line in told if line.startswith("done ")]
        latest, found = recovered(tmp_path)
        assert not apart(found, expected[latest])
        assert latest >= max(said, default=0)
        at_work += bool(said)
        gc.collect()
    assert at_work > kills // 2
    assert latest < steps
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert not apart(torch.load(tmp_path / "state.pt"), expected[steps])
    assert not list(tmp_path.glob(f"{PREFIX}*"))
