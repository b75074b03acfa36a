"""A training run that goes on where a killed one ended."""

import os
import signal

import torch

import poetmodel.torch as pmt

RAM = "60%"
"""A budget that leaves some parameters and moments on storage, and some in RAM."""


def network():
    """Return a network with dropout, statistics, frozen and unused layers, and its optimizer."""
    torch.manual_seed(3)
    nn = torch.nn
    hidden = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.ReLU())]
    model = nn.Sequential(
        nn.Linear(32, 96),
        nn.BatchNorm1d(96),
        nn.ReLU(),
        nn.Linear(96, 96).requires_grad_(False),
        nn.Dropout(0.2),
        *hidden,
        nn.Linear(96, 10),
    )
    model[3].unused = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def batch(number):
    """Return the batch of a step."""
    source = torch.Generator().manual_seed(number)
    x = torch.randn(8, 32, generator=source)
    return x, torch.randint(0, 10, (8,), generator=source)


loss_fn = torch.nn.functional.cross_entropy


def compiled(model, optimizer, folder, **options):
    """Return the step, compiled."""
    given = {"device": "rpi4b", "time_limit": 2, "gap": 0.2, "ram": RAM} | options
    return pmt.compile(model, loss_fn, batch(0), optimizer=optimizer, storage=folder, **given)


def state(model, optimizer):
    """Return copies of parameters, buffers, moments, and of the random state."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, kept in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in kept.items()}
    return found | {"random": torch.get_rng_state()}


def eager_states(steps):
    """Return the states after each of 0 to `steps` steps of eager PyTorch."""
    model, optimizer = network()
    found = [state(model, optimizer)]
    for number in range(steps):
        x, y = batch(number)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(state(model, optimizer))
    return found


def kill_at(number):
    """Kill this process at one of its next calls that write to files or wait for them.

    Of a write half is done. With a negative number nothing is killed, and calls are counted.
    """
    left = number

    def counted(name, real):
        def call(descriptor, *given):
            nonlocal left
            left -= 1
            if left == -1:
                if name == "pwritev":
                    parts, offset = given
                    half = b"".join(parts)
                    os.pwrite(descriptor, half[: len(half) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return real(descriptor, *given)

        return call

    for name in ("pwritev", "fdatasync", "posix_fadvise"):
        setattr(os, name, counted(name, getattr(os, name)))


calls = []
"""What was called since `kill_at`."""


def main(folder, steps, output):
    """Train to the end, and write each step that is done to a descriptor.

    Nothing waits for the medium: a kill loses nothing that the system has.
    """
    os.fdatasync = os.posix_fadvise = lambda *_: None
    model, optimizer = network()
    done = pmt.recover(folder, model, optimizer)
    with compiled(model, optimizer, folder) as step:
        os.write(output, f"from {done}\n".encode())
        for number in range(done, steps):
            step(*batch(number))
            os.write(output, f"done {number + 1}\n".encode())
        torch.save(state(model, optimizer), folder / "state.pt")
