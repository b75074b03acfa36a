"""The golden set: results that a refactoring must not change.

``python tests/golden_set.py check`` solves, plans, exports and compiles what the files in
``tests/golden`` record, and prints each difference. A change that is meant to change an entry
records it anew in the same commit, ``python tests/golden_set.py record PART...``, and says why.
The parts are

- `problems`: status, value and bound of 400 random problems, by ``lazy`` and ``compact``;
- `schedules`: the relations of schedules of built-in networks, one thread, proved within seconds;
- `commands`: exit status and JSON of commands, without times and versions, where all is proved;
- `plans`: programs with addresses, without version and costs;
- `folders`: every file of exported C;
- `calls`: identities and files of lowered steps, their calls and instruction counts in tiles, and
  C and code sizes with paged and with memory-mapped storage;
- `steps`: source and peak of compiled PyTorch steps.

A solver's or PyTorch's next release may change entries: the versions are on record, and another
one is named beside the differences.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["POETMODEL_CACHE"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
# Scales of int8 networks follow from activations, whose last bits differ between processors.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}

import torch  # noqa: E402

import poetmodel as pm  # noqa: E402
from kit.claims import KINDS  # noqa: E402
from kit.commands import invoke  # noqa: E402
from poetmodel.device import Device  # noqa: E402
from poetmodel.errors import PoetModelError  # noqa: E402
from poetmodel.export.exporting import export_step  # noqa: E402
from poetmodel.export.reserves import parse_stack, reserved_bytes  # noqa: E402
from poetmodel.headers import WRITTEN_BY  # noqa: E402
from poetmodel.lowered.identity import step_identity  # noqa: E402
from poetmodel.lowered.io import save_step  # noqa: E402
from poetmodel.schedule.identity import COSTS  # noqa: E402
from poetmodel.tiling.choice import needed_bytes  # noqa: E402
from poetmodel.tiling.tiles import tile_step  # noqa: E402

torch.backends.mkldnn.set_flags(False)
FOLDER = ROOT / "tests" / "golden"
VERSIONS = ("highspy", "numpy", "torch")
DIGITS = 9
"""Significant digits of values and bounds: column order may change the last ones."""
VOLATILE = frozenset(
    {"build_s", "solve_s", "wall_s", "primal_integral_s", "history", "statistics", "log"}
    | {"versions", "poetmodel", WRITTEN_BY}
)
"""Keys of JSON that no two runs share."""
RELATIONS = ("R", "S_RAM", "S_AUX", "M_in", "M_out", "resident")
NETWORKS = ("mlp", "autoencoder", "ds-cnn", "mobilenetv1-vww", "resnet8", "resnet18-cifar")
DEVICES = ("rpi4b", "nrf52840", "mkr1000", "paper-m4", "jetson-tx2")
SHARES = ("80%", "60%", "40%")
STEPS = ("residual_step", "plain_step", "depthwise_step", "transformer_step", "unet_step")


def called(*arguments):
    """Run a command in this process; exported folders name it."""
    sys.argv = ["poetmodel", *map(str, arguments)]
    return invoke(*arguments)


def digest(content):
    """Return a hash of bytes for a record."""
    return hashlib.sha256(content).hexdigest()[:16]


def as_bytes(document):
    """Return JSON as bytes that depend on its content alone."""
    return json.dumps(document, sort_keys=True).encode()


def rounded(value):
    """Return a number as it is recorded."""
    return None if value is None else f"{value:.{DIGITS}g}"


def stable(document):
    """Return JSON without values that differ between runs."""
    if isinstance(document, dict):
        return {key: stable(value) for key, value in document.items() if key not in VOLATILE}
    if isinstance(document, list):
        return [stable(value) for value in document]
    return rounded(document) if isinstance(document, float) else document


# -- parts ---------------------------------------------------------------------------------------
def problems():
    """Yield status, value and bound of random problems, forty of each kind."""
    for kind, draw in KINDS.items():
        for number in range(40):
            seed = f"{kind}/golden{number}"
            for formulation in ("lazy", "compact"):
                try:
                    result = pm.solve(draw(seed), formulation=formulation, gap=1e-6)
                except PoetModelError as error:
                    yield f"{seed} {formulation}", type(error).__name__
                    continue
                value, bound = map(rounded, (result.value, result.objective_bound))
                yield f"{seed} {formulation}", [result.status.value, value, bound]


def schedules():
    """Yield the relations of schedules, where they were proved to be the best."""
    for device in DEVICES:
        for network in NETWORKS:
            for share in SHARES:
                document = _solved(network, device, share)
                if document is not None:
                    relations = {key: document.get(key) for key in RELATIONS}
                    yield f"{network} {device} {share}", digest(as_bytes(relations))


def _solved(network, device, share):
    """Solve a problem; write ``golden.schedule.json``, and return it where it was proved."""
    file = Path("golden.schedule.json")
    file.unlink(missing_ok=True)
    how = ("--device", device, "--ram", share, "--time-limit", "10", "--quiet")
    called("solve", network, *how, "--out", file)
    document = json.loads(file.read_text()) if file.exists() else None
    return document if document is not None and document["status"] == "optimal" else None


def commands():
    """Yield exit status and JSON of commands."""
    lines = [f"inspect {network} --json" for network in NETWORKS]
    lines += [f"inspect mlp --device {device} --json" for device in DEVICES]
    lines += [f"solve {name} --device rpi4b --ram 70% --json" for name in NETWORKS]
    lines += [f"solve {name} --device stm32h743 --ram 60% --state sgd --json" for name in NETWORKS]
    lines += [f"limits {name} --device rpi4b --json" for name in NETWORKS[:3]]
    aims = ("time", "ram", "writes")
    lines += [f"solve mlp --device mkr1000 --ram 70% --minimize {aim} --json" for aim in aims]
    lines += ["models --json", "devices --json", "models mlp --json", "devices rpi4b --json"]
    lines += ["solve mlp --device rpi4b --ram 1B --json", "solve nothing --device rpi4b --json"]
    lines += ["solve mlp --ram 70% --json", "verify nothing.json --graph mlp --device rpi4b --json"]
    yield from _proved_answers(lines)
    called("solve", "autoencoder", "--device", "rpi4b", "--ram", "60%", "--out", "a.schedule.json")
    called("solve", "autoencoder", "--device", "rpi4b", "--ram", "90%", "--out", "b.schedule.json")
    board = "--graph autoencoder --device rpi4b"
    lines = [f"verify a.schedule.json {board} --json", f"explain a.schedule.json {board} --json"]
    lines += [f"diff a.schedule.json b.schedule.json {board} --json"]
    yield from _proved_answers(lines)


def _proved_answers(lines):
    """Yield the exit status of commands and their JSON, unless it holds what a time limit ended."""
    for line in lines:
        outcome = called(*line.split())
        answer = stable(outcome.json) if outcome.out.startswith("{") else outcome.out
        if '"status": "feasible"' not in (content := as_bytes(answer).decode()):
            yield line, [outcome.status, digest(content.encode())]


def plans():
    """Yield programs with addresses."""
    for network in NETWORKS:
        for device in DEVICES:
            if _solved(network, device, "60%") is not None:
                yield f"{network} {device}", _planned(network, device)


def _planned(network, device):
    """Return the exit status of planning a schedule, and a hash of the file.

    Who wrote the file, and whether the costs are those of the schedule, is no part of it.
    """
    out = Path("golden.plan")
    out.unlink(missing_ok=True)
    how = ("--graph", network, "--device", device, "--arena", "--quiet")
    status = called("plan", "golden.schedule.json", *how, "--out", out).status
    if not out.exists():
        return [status, None]
    lines = out.read_bytes().splitlines(keepends=True)
    keys = tuple(f' "{key}":'.encode() for key in (WRITTEN_BY, COSTS))
    return [status, digest(b"".join(line for line in lines if not line.startswith(keys)))]


def folders():
    """Yield every file of exported C."""
    step = Path("digits.step.json")
    step.write_bytes((ROOT / "docs" / step).read_bytes())
    for share in ("100%", "95%", "90%", "88%"):
        for options in ((), ("--commit",), ("--tile", "2KiB")):
            name = " ".join((share, *options))
            out = Path(f"folder {name}")
            # All are proved, however busy the machine is: the manifest has the status.
            how = ("--ram", share, "--out", out, "--quiet", "--time-limit", "20min", *options)
            status = called("export", step, *how).status
            yield name, status
            for path in sorted(path for path in out.rglob("*") if path.is_file()):
                yield f"{name}: {path.relative_to(out)}", digest(path.read_bytes())


def steps():
    """Yield source and peak of compiled steps, with and without an update."""
    import poetmodel.torch as pmt
    from kit import networks

    for name in STEPS:
        for update in (False, True):
            for ram in ("100%", "80%"):
                torch.manual_seed(1)
                model, loss_fn, inputs = getattr(networks, name)()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if update else None
                options = {"optimizer": optimizer} if update else {}
                try:
                    step = pmt.compile(model, loss_fn, inputs, ram=ram, device="rpi4b", **options)
                except PoetModelError as error:
                    yield f"{name} {update} {ram}", type(error).__name__
                    continue
                source = digest(step.source.encode())
                yield f"{name} {update} {ram}", [source, step.compiled.peak_bytes]


def calls():
    """Yield hashes of lowered steps, whole and in tiles, and of the C of some."""
    from kit import networks
    from kit.export_agreement import OPTIMIZERS, lower_training
    from tiling import test_tiles

    nets = [(each.__name__, each, "sgd") for each in test_tiles.NETWORKS]
    nets += [(name, getattr(networks, name), "gradients") for name in STEPS]
    nets += [(f"pools {name}", test_tiles.pools, name) for name in OPTIMIZERS]
    nets += [("lstm clipped", test_tiles.recurrent, "clipped")]
    for name, network, optimizer in nets:
        torch.manual_seed(0)
        step = lower_training(network(), optimizer, name=name)
        is_exported = name.startswith("pools") or network is test_tiles.residual
        yield from _recorded(name, step, is_exported=is_exported)
    for rounding in ("16 bits", "stochastic"):
        step = test_tiles.trained_int8(rounding=rounding)
        yield from _recorded(f"int8 {rounding}", step, is_exported=True)
    summed = test_tiles.lowered(test_tiles.residual, "adam", accumulate=2, infer=True)
    yield from _recorded("summed", summed, is_exported=True)


def _recorded(name, step, *, is_exported):
    """Yield hashes of a step, of its tiles, and if `is_exported` of its C."""
    file = Path("golden.step.json")
    save_step(replace(step, versions={}), file)
    document = json.loads(file.read_bytes())
    del document[WRITTEN_BY]
    yield f"{name}: file", digest(as_bytes(document))
    yield f"{name}: identity", step_identity(step)
    for size in (100, 300, 800, 3000):
        tiled = tile_step(step, size)
        passes = [(one.graph.nodes, one.calls) for one in (tiled, *tiled.forward_passes)]
        yield f"{name}: in tiles of {size} B", digest(repr(passes).encode())
    for device, share in (("stm32h743", 2.0), ("nano33ble", 1.2)) if is_exported else ():
        board = Device.load(device)
        least_bytes = needed_bytes(step, board, paging=True)
        ram = reserved_bytes(step, parse_stack(None, commit=False)) + int(share * least_bytes)
        board = replace(board, flash=replace(board.flash, size_bytes=2**40))
        options = {"tile": "none", "infer": step.inference is not None, "gap": 0.3}
        options["time_limit"] = 1200.0  # all are proved, however busy the machine is
        out = Path("golden export")
        deployment = export_step(step, out, ram=ram, device=board, **options)
        text = b"".join(path.read_bytes() for path in sorted(out.glob("src/*step*.c")))
        yield f"{name}: on {device}", [digest(text), deployment.program_bytes]


PARTS = {
    part.__name__: part for part in (problems, schedules, commands, plans, folders, calls, steps)
}


# -- record and check ----------------------------------------------------------------------------
def say(line):
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def entries_of(part):
    """Make a part, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return dict(PARTS[part]())


def main():
    """Record parts, or check them; return 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    versions = {name: version(name) for name in VERSIONS}
    differing = 0
    for part in arguments.parts or PARTS:
        path = FOLDER / f"{part}.json"
        made = json.loads(json.dumps(entries_of(part)))
        if arguments.action == "record":
            FOLDER.mkdir(exist_ok=True)
            document = {"versions": versions, "entries": made}
            path.write_text(json.dumps(document, indent=0, sort_keys=True) + "\n")
            say(f"{part}: {len(made)} recorded")
            continue
        recorded = json.loads(path.read_text())
        expected = recorded["entries"]
        changed = [key for key, entry in expected.items() if made.get(key) != entry]
        for key in changed:
            say(f"{part}: {key}: {made.get(key)} in place of {expected.get(key)}")
        say(f"{part}: {len(changed)} of {len(expected)} differ")
        if changed and recorded["versions"] != versions:
            say(f"recorded with {recorded['versions']}, run with {versions}")
        differing += len(changed)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
