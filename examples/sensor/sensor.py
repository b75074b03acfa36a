"""A touchpad that knows three people's digits learns those of new users on an emulated board."""

import json
import re
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import poetmodel as pm
import poetmodel.torch as pmt

PROGRAM, OUT = Path(__file__).resolve().with_name("learn.c"), Path("out").resolve()
BOARD, LEARNING_RATE = pm.Device.load("nano33ble"), 0.002
KNOWN, SAMPLES = 3, 150  # people of the first training; digits to learn: 90 of these, 60 of a user
ROWS = ["new users", "known users", "RAM", "flash, without storage", "instructions"]
ROWS += ["energy of the core", "energy of writes to flash"]
data = load_digits()
images, labels = torch.tensor(data.images / 16).float()[:, None], torch.tensor(data.target)
# All writers filled in one form, which begins 0123456789 0123456789: so we know who wrote what.
STARTS = [m.start() for m in re.finditer("[08]123456789012345", "".join(map(str, data.target)))]
WRITERS = np.split(np.arange(len(labels)), STARTS[1:])


def train(digits: np.ndarray) -> nn.Sequential:
    """Train a small CNN in PyTorch for the known users."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 12, 3, padding=1)]
    layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=1e-4)
    for _ in range(30):
        for batch in torch.tensor(digits)[torch.randperm(len(digits))].split(16):
            optimizer.zero_grad()
            cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    return net


def learn(kind: str, user: int, cut: int = 0, driver: str = "nor") -> dict[str, list[int]]:
    """Let the board learn a user's digits; return the numbers that it prints, by name."""
    command = ["make", "--silent", "-C", OUT / kind, "run-m4", f"MAIN={PROGRAM}"]
    command += [f"DRIVER={driver}", f"ARGS=../user{user}.bin {LEARNING_RATE} {cut}"]
    done = subprocess.run(command, capture_output=True, text=True, check=not cut)  # noqa: S603
    lines = re.findall(r"^([a-z_]+(?: \d(?= ))?) ([\d ]+)$", done.stdout + done.stderr, re.M)
    return {name: [int(number) for number in numbers.split()] for name, numbers in lines}


def describe(kind: str, runs: list[dict[str, list[int]]]) -> list[str]:
    """Return a column of the table: counted on the board, energy by its device file."""
    cycles = json.loads((OUT / kind / "manifest.json").read_text())["cycles"]
    instructions = 40 * runs[0]["learning_ticks"][0]
    core_s = instructions / cycles["instructions_per_cycle"] / cycles["clock_hz"]
    erase_s = runs[0]["storage_erases"][0] * BOARD.flash.erase_s
    write_s = runs[0]["storage_bytes"][0] / BOARD.flash.write_bytes_per_s
    before, after = (np.mean([r[key] for r in runs], axis=0) for key in ("round 0", "best"))
    return [
        f"{before[1] / 30:.1%} to {after[1] / 30:.1%}",
        f"{before[2] / 90:.1%} to {after[2] / 90:.1%}",
        f"{runs[0]['ram_bytes'][0]:,} B",
        f"{runs[0]['flash_bytes'][0]:,} B",
        f"{1e-6 * instructions:,.0f} M",
        f"{1e3 * BOARD.compute.power_w * core_s:.0f} mJ",
        f"{1e3 * BOARD.flash.power_w * (erase_s + write_s):.0f} mJ",
    ]


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    known = np.concatenate([digits[:90] for digits in WRITERS[:KNOWN]])
    others = np.concatenate([digits[90:120] for digits in WRITERS[:KNOWN]])
    for user, own in enumerate(WRITERS[KNOWN:]):
        digits = np.concatenate([known[::3], own[:120], others])
        pairs = zip(data.images[digits].astype(np.uint8), data.target[digits], strict=True)
        content = b"".join(image.tobytes() + np.int32(label).tobytes() for image, label in pairs)
        (OUT / f"user{user}.bin").write_bytes(content)
    net, example, table, whole = train(known), (images[:1], labels[:1]), [ROWS], {}
    end = pmt.quantized(net, [images[known]], train="last-2")
    options = {"device": BOARD, "evaluate": True, "byte_inputs": {"inputs[0]": "uint8:0.0625"}}
    kinds = {"int8": (end, pmt.QuantizedSGD(end), SAMPLES)}
    kinds["float"] = (net, torch.optim.SGD(net.parameters()), 0)
    for kind, (model, optimizer, replay) in kinds.items():
        options |= {"optimizer": optimizer, "commit_every": SAMPLES, "replay": replay}
        pmt.export(model, cross_entropy, example, folder=OUT / kind, **options)
        runs = [learn(kind, user) for user in range(len(WRITERS) - KNOWN)]
        table.append(describe(kind, runs))
        whole[kind] = runs[0]
        right = np.mean([[run[f"round {k}"] for k in range(7)] for run in runs], axis=0)
        (line,) = plt.plot(right[:, 1] / 0.3, "o-", label=f"{kind}, new users")
        plt.plot(right[:, 2] / 0.9, ":", color=line.get_color(), label=f"{kind}, known users")
    lines = [f"| {' | '.join(row)} |" for row in zip(*table, strict=True)]
    print("| | int8 | float |", "|---|---:|---:|", *lines, sep="\n")
    plt.legend(frameon=False, title=f"digits recognized [%] after rounds of {SAMPLES} steps")
    plt.savefig(OUT / "learning.svg", bbox_inches="tight")
    (OUT / "int8/pm_storage.bin").unlink(missing_ok=True)  # stands for the flash without power
    learn("int8", 0, cut=whole["int8"]["learning_ticks"][0], driver="file")
    again = learn("int8", 0, driver="file")
    print(f"cut and resumed at step {again['resumed'][0]}:", again["best"], whole["int8"]["best"])
