"""Exported steps that need no PyTorch: the tutorial's step, a linear one, and the toy in C.

Functions build them, execute them, and return their state.
"""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

import poetmodel
from kit.programs import require_programs
from kit.shared_objects import STORE, build, digest
from kit.worked import make_state_node, make_update_node
from poetmodel.export.board import Target, run_program
from poetmodel.export.exporting import export_step
from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, NamedTensor, Ref, ScaledLearningRate
from poetmodel.lowered.io import load_step
from poetmodel.lowered.step import LoweredNode, LoweredStep

STEP = Path(__file__).parents[2] / "docs" / "digits.step.json"
"""File of the tutorial's step."""


def exporter(tmp_path_factory, plans):
    """Return a function that exports the tutorial's step with a plan, and returns the folder.

    `plans` maps names of plans to options of `export_step`; each is exported once.
    """

    @cache
    def folder(name):
        path = tmp_path_factory.mktemp(name)
        step = load_step(STEP)
        step = freeze_front(step) if plans[name].get("replay") else step
        step = add_evaluation(step) if plans[name].get("evaluate") else step
        export_step(step, path, gap=0.5, **plans[name])
        return path

    return folder


def add_evaluation(step):
    """Return a step whose evaluation is its own forward pass, up to the loss."""
    graph, loss = step.graph, step.loss
    end = graph.node_of[graph.tensor_index[loss.buffer]] + 1
    pairs = zip(graph.nodes[:end], step.calls, strict=False)
    pairs = [(node, calls) for node, calls in pairs if not node.is_state and node.op != "mask"]
    state = {node.name for node in graph.nodes if node.is_state}
    nodes = [replace(n, inputs=tuple(x for x in n.inputs if x not in state)) for n, _ in pairs]
    output = Ref("output")
    nodes.append(Node(name="output", op="output", phase=Phase.FORWARD, inputs=(loss.buffer,)))
    calls = [*(calls for _, calls in pairs), (Call("pm_copy", (output, loss, (1, 1, 1, 1))),)]
    buffers = {**step.buffers, "output": Buffer(elements=1, type=DataType.REAL)}
    evaluation = replace(
        step,
        graph=Graph(name="evaluation", nodes=tuple(nodes)),
        calls=tuple(calls),
        buffers=buffers,
        states=(),
        values={},
        output=NamedTensor(name="output", shape=(), type=DataType.REAL, pieces=(output,)),
    )
    return replace(step, evaluation=evaluation.edit({}))


def freeze_front(step):
    """Return the tutorial's step with a frozen first layer, without its gradients and updates.

    Its convolution, ReLU and pool then depend on inputs alone.
    """
    frozen, front = {"0.weight", "0.bias"}, "2/max_pool2d_with_indices"
    omitted = {f"{front}_backward", "1/threshold_backward", "1/relu.mask", "3/convolution_backward"}
    nodes, calls = [], []
    for node, its in zip(step.graph.nodes, step.calls, strict=True):
        backward = node.name.startswith("0/") and node.name != "0/convolution"
        if (
            node.name in frozen | omitted
            or backward
            or node.name.startswith(("0.weight", "0.bias"))
        ):
            continue
        nodes.append(replace(node, inputs=tuple(x for x in node.inputs if x not in frozen)))
        calls.append(its)
    return step.with_operations(map(LoweredNode, nodes, calls))


def digit_batches(count, *, seed):
    """Return random batches as bytes in the input format of the program: images, then labels."""
    random = np.random.default_rng(seed)
    return b"".join(
        random.normal(size=576).astype("<f4").tobytes()
        + random.integers(0, 4, 4).astype("<i4").tobytes()
        for _ in range(count)
    )


def build_and_run(folder, target=Target.HOST, *, settings=(), inputs, steps, rate=0.1, words=()):
    """Build an exported folder, and train `steps` steps; return the program's results.

    Fails if the program fails. `rate` is the learning rate, `words` are further arguments.
    """
    return build_runner(folder, target, settings=settings, inputs=inputs)(
        steps, rate=rate, words=words
    )


def build_runner(folder, target=Target.HOST, *, settings=(), inputs):
    """Build an exported folder; return a function that trains as `build_and_run` does."""
    program = build(folder, target, settings=settings)

    def run(steps, *, rate=0.1, words=()):
        given = {"inputs": inputs, "steps": steps, "learning_rate": rate, "words": words}
        return run_program(program, target, folder, **given).require_success()

    return run


def compute_state(step, folder, inputs, steps, options=None, settings=(), rate=0.05):
    """Export a step to `folder`, and train; return the bytes of the state.

    `options` are those of the export, by default keep-all without paging.
    """
    export_step(step, folder, gap=0.5, **options or {"ram": "100%", "paging": False})
    return build_and_run(folder, settings=settings, inputs=inputs, steps=steps, rate=rate).state


ROWS, COLUMNS = 12, 16
"""Shape of the weight of `linear_step`."""


def linear_step():
    """Return a step: y = w x, the gradient y x^T of w, and an update of w; its loss is y[0]."""
    sizes = {"x": COLUMNS, "w": ROWS * COLUMNS, "y": ROWS, "g": ROWS * COLUMNS}
    weight_bytes = 4 * sizes["w"]
    y, g = Tensor(name="y", bytes=4 * ROWS), Tensor(name="g", bytes=weight_bytes)
    gradient = {"op": "mm", "phase": Phase.BACKWARD, "inputs": ("y",), "outputs": (g,)}
    nodes = (
        make_state_node("w", weight_bytes),
        Node(name="linear", op="mm", phase=Phase.FORWARD, inputs=("w",), outputs=(y,)),
        Node(name="gradient", **gradient),
        replace(make_update_node("update", "g", w=weight_bytes), inputs=("w", "g")),
    )
    w, x, y, g = map(Ref, "wxyg")
    calls = (
        (),
        (Call("pm_mm", (y, w, x, ROWS, COLUMNS, 1, 1, COLUMNS, 1, 1, 1, 0)),),
        (Call("pm_mm", (g, y, x, ROWS, 1, COLUMNS, COLUMNS, 1, 1, COLUMNS, 1, 0)),),
        (Call("pm_sgd", (w, g, sizes["w"], ScaledLearningRate(), 1.0, 0.0)),),
    )
    real = DataType.REAL
    step = LoweredStep(
        graph=Graph(name="linear", nodes=nodes),
        calls=calls,
        buffers={name: Buffer(elements=size, type=real) for name, size in sizes.items()},
        inputs=(NamedTensor(name="x", shape=(COLUMNS,), type=real, pieces=(x,)),),
        states=(NamedTensor(name="w", shape=(ROWS, COLUMNS), type=real, pieces=(w,)),),
        gradients=(),
        loss=y,
        values={"w": np.linspace(-1, 1, sizes["w"], dtype="<f4")},
        learning_rate=0.1,
    )
    return step.with_operations(map(LoweredNode, nodes, calls))


SOURCES = Path(poetmodel.__file__).parent / "c"
TOY = Path(__file__).parents[1] / "export" / "toy"
"""Folder of the toy: a step in C, written by hand."""
GENERATED = {"pm_state.c", "pm_state.h", "pm_mapped.c", "pm_slices.c", "kernels"}
"""Sources of the export that the toy replaces or does not need."""
LEARNING_RATE = 0.05
BATCHES = 3


class Toys:
    """Programs of the toy, each built once, in folders below `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self._built = {}

    def sources(self):
        """Return a new folder with the sources of the toy."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns(*GENERATED))
        shutil.copytree(TOY, folder, dirs_exist_ok=True)
        return folder

    def program(self, target, *settings):
        """Return the program for a target, built with variables of the Makefile."""
        require_programs(target)
        key = (target, settings)
        if key not in self._built:
            self._built[key] = build(self.sources(), target, settings=settings)
        return self._built[key]

    def run(self, target, settings, folder, *, steps, words=()):
        """Execute the toy on its batches, in a folder; return the program's results."""
        return run_program(
            self.program(target, *settings),
            target,
            folder,
            inputs=batches(target),
            steps=steps,
            learning_rate=LEARNING_RATE,
            words=words,
            time_limit_s=120.0,
        )


@cache
def samples():
    """Return the toy's inputs in each batch: five numbers, and a factor."""
    random = np.random.default_rng(7)
    return tuple((random.random(5, np.float32), 1 + k % 2) for k in range(BATCHES))


def batches(target):
    """Return the content of the toy's file of inputs, with reals in the target's type."""
    kind = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    return b"".join(x.astype(kind).tobytes() + np.int32(k).tobytes() for x, k in samples())


def library(folder, *sources, flags=()):
    """Build a library of C files of the toy or the runtime; load a new copy of it.

    Each call has separate global variables. Writes the copy to `folder`.
    """
    require_programs(Target.HOST)
    paths = (TOY / "include", SOURCES, *(SOURCES / part for part in ("src", "port", "host")))
    options = ["-std=c11", "-O2", "-shared", "-fPIC", *(f"-I{path}" for path in paths), *flags]
    files = [TOY / each if (TOY / each).is_file() else SOURCES / each for each in sources]
    name = f"{Path(sources[0]).stem}{digest(*options, *files)}.so"
    command = ["cc", *options, *files, "-lm", "-o"]
    stored = STORE.get_or_make(name, lambda path: subprocess.run([*command, path], check=True))
    copy = folder / f"{len(list(folder.iterdir()))}{name}"
    shutil.copyfile(stored, copy)
    return ctypes.CDLL(str(copy))
