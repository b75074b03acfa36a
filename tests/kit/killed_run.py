"""Training in a process that may be killed at a call, and continued by another process."""

import os
import signal

import torch

import poetmodel.torch as pmt

RAM = "60%"
"""RAM budget with which some parameters and moments are on storage, and others in RAM."""


def network():
    """Return a network with dropout, batch norm, frozen and unused layers, and its optimizer.

    The weights are the same in every call. Seeds the default generator of PyTorch.
    """
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
    """Return the inputs and labels of step `number`."""
    source = torch.Generator().manual_seed(number)
    x = torch.randn(8, 32, generator=source)
    return x, torch.randint(0, 10, (8,), generator=source)


loss_fn = torch.nn.functional.cross_entropy


def compile_step(model, optimizer, folder, **options):
    """Compile a network's step, with pages in `folder`; `options` replace those of `compile`."""
    settings = {"device": "rpi4b", "time_limit": 2, "gap": 0.9, "ram": RAM} | options
    return pmt.compile(model, loss_fn, batch(0), optimizer=optimizer, storage=folder, **settings)


def copy_state(model, optimizer):
    """Return copies of parameters, buffers, moments and the random state, by name."""
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        copies |= {f"{number}.{key}": value.clone() for key, value in moments.items()}
    return copies | {"random": torch.get_rng_state()}


def eager_states(steps):
    """Return the states after each of 0 to `steps` steps of eager PyTorch."""
    model, optimizer = network()
    states = [copy_state(model, optimizer)]
    for number in range(steps):
        x, y = batch(number)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy_state(model, optimizer))
    return states


def kill_at(number):
    """Kill this process at a later call of pwritev, fdatasync or posix_fadvise, counted from 0.

    Replaces these functions of `os`. A killed write has written half of its bytes. With a negative
    number the process is not killed, and `calls` lists the calls.
    """
    remaining = number

    def counted(name, real):
        def call(descriptor, *given):
            nonlocal remaining
            remaining -= 1
            if remaining == -1:
                if name == "pwritev":
                    parts, offset = given
                    data = b"".join(parts)
                    os.pwrite(descriptor, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return real(descriptor, *given)

        return call

    for name in ("pwritev", "fdatasync", "posix_fadvise"):
        setattr(os, name, counted(name, getattr(os, name)))


calls = []
"""Names of the functions called since `kill_at`."""


def main(folder, steps, output):
    """Recover the training in `folder`, continue it up to `steps` steps, and save the final state.

    Writes "from N" and, after each step, "done N" to the descriptor `output`. Replaces fdatasync
    and posix_fadvise by functions that do not wait for the medium: a killed process loses no data
    that it has written to the operating system.
    """
    os.fdatasync = os.posix_fadvise = lambda *_: None
    model, optimizer = network()
    done = pmt.recover(folder, model, optimizer)
    with compile_step(model, optimizer, folder) as step:
        os.write(output, f"from {done}\n".encode())
        for number in range(done, steps):
            step(*batch(number))
            os.write(output, f"done {number + 1}\n".encode())
        torch.save(copy_state(model, optimizer), folder / "state.pt")
