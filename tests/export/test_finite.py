"""Numbers that are not finite: a step refuses such a loss, and export such first values."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.digits import STEP, digit_batches
from kit.export_agreement import SCHEDULES, Exported, make_batches_like, train_in_torch
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from kit.shared_objects import link_program
from kit.traced_models import FunctionModule
from kit.worked import make_state_node, make_update_node
from poetmodel.errors import InputError
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.graph import Graph, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, NamedTensor, Ref, ScaledLearningRate
from poetmodel.lowered.io import load_step
from poetmodel.lowered.step import LoweredStep
from poetmodel.tiling.choice import divide_step
from poetmodel.torch.exporting import export
from poetmodel.torch.lowering.inference import with_inference
from poetmodel.torch.lowering.step import lower

LIBRARY = Path(__file__).with_name("library")
PLAIN = ("gcc", "-std=c11", "-O0", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
SANITIZED = (*PLAIN, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
REFUSED = 15
LATE = ("out", "in", "wait")
"""What `driver_late.c` wraps: a slot in use again before its wait is an error."""


def normed(*, frozen=False):
    """Return a classifier with batch norm and dropout; with a front that only has statistics."""
    front = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    front.requires_grad_(not frozen)
    return nn.Sequential(front, nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 5))


def terms():
    """Return a loss of two terms, of which one has its gradient before the loss is computed."""
    values = {"w": nn.Parameter(torch.ones(3)), "v": nn.Parameter(torch.ones(4))}
    return FunctionModule(lambda own, x: own.w.sum() + (own.v * x * x).sum(), **values)


def deep():
    """Return layers whose activations wait on storage while the loss is computed."""
    layers = [part for _ in range(6) for part in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 24), *layers, nn.Linear(24, 4))


IMAGES = (torch.randn(2, 3, 10), torch.randn(2, 5))
ROWS = (torch.randn(6, 6), torch.randn(6, 4))
DMA = {"device": "stm32h743", "ram": "40%", "stack": "1KiB"}
CASES = {
    "statistics": (normed, functional.mse_loss, IMAGES, {}, {}),
    "frozen front": (lambda: normed(frozen=True), functional.mse_loss, IMAGES, {}, {}),
    "read in place": (
        lambda: normed(frozen=True), functional.mse_loss, IMAGES, {},
        {"device": "nano33ble", "ram": "70%", "commit": True},
    ),
    "committed": (
        normed, functional.mse_loss, IMAGES, {}, {"ram": "90%", "commit": True}
    ),
    "summed": (
        normed, functional.mse_loss, IMAGES, {"accumulate": 2, "clip_grad_norm": 0.5}, {}
    ),
    "two terms": (terms, None, (torch.randn(4),), {}, {}),
    "transfers under way": (deep, functional.mse_loss, ROWS, {}, DMA),
}  # fmt: skip
QUICK = ("frozen front", "two terms")


@cache
def captured(case, *, optimizer=True):
    """Return the step of a case, with Adam."""
    torch.manual_seed(1)
    make, loss_fn, inputs, options, _ = CASES[case]
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    given = torch.optim.Adam(trained, lr=0.01) if optimizer else None
    return lower(model, loss_fn, inputs, optimizer=given, **options)


def built(step, folder, compiler, **options):
    """Export a step with a program that passes it refused batches; return the folder's code."""
    require_programs("gcc")
    settings = {"ram": "101%", "paging": False} | options
    if settings["ram"] != "101%":
        del settings["paging"]
    made = export_step(step, folder, gap=0.5, **settings)
    parts = [*sorted((folder / "src").glob("*.c")), LIBRARY / "refuse.c"]
    flags, includes = [], (folder / "include", folder)
    if made.slots:
        parts.append(folder / "port" / "driver_ram.c")
    if made.slots and str(made.plan.mode) != "blocking":
        parts.append(folder / "host" / "driver_late.c")
        flags = [f"-Wl,--wrap=pm_page_{name}" for name in LATE]
    link_program(compiler, parts, includes, folder / "refuse", *flags)
    return (folder / "src" / "pm_step.c").read_text(encoding="utf-8")


def refused(folder, inputs):
    """Pass the program batches with an element of the last input whose square overflows."""
    batch = b"".join(
        x.numpy().astype("<f4" if x.is_floating_point() else "<i4").tobytes() for x in inputs
    )
    (folder / "batch.bin").write_bytes(batch)
    words = [REFUSED, len(inputs) - 1, min(5, inputs[-1].numel() - 1), "1e30", "-2e33"]
    return run_command(["./refuse", "batch.bin", *map(str, words)], folder)


@pytest.mark.parametrize(
    ("case", "compiler"),
    [
        *((case, PLAIN) for case in QUICK),
        pytest.param("transfers under way", PLAIN, marks=pytest.mark.slow),
        pytest.param("committed", SANITIZED, marks=pytest.mark.slow),
        *mark_seeds_except([(case, SANITIZED) for case in CASES if case != "committed"], ()),
    ],
)
def test_a_loss_that_is_not_finite_updates_nothing(tmp_path, case, compiler):
    """In one call and in slices: state and loss as before, and training continues without it."""
    code = built(captured(case), tmp_path, compiler, **CASES[case][-1])
    if case == "transfers under way":
        (check,) = (line for line in code.splitlines() if "pm_is_finite" in line)
        assert "(void)pm_page_wait(" in check
    assert code.count("pm_is_finite(") == 1
    assert code.index("pm_is_finite(") < code.index("pm_adam(")
    assert refused(tmp_path, CASES[case][2]) == ""


def test_without_an_optimizer_gradients_stay_those_of_the_step_before(tmp_path):
    """The step that is refused writes none of them."""
    code = built(captured("two terms", optimizer=False), tmp_path, PLAIN)
    assert refused(tmp_path, CASES["two terms"][2]) == ""
    assert code.index("pm_is_finite(") < code.index("pm_page_out(", code.index("pm_mul("))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", [None, "64B"])
def test_state_is_replaced_after_the_loss(case, tile):
    """Whatever computes it: in the graph, whose order each schedule keeps; in tiles too."""
    step = divide_step(captured(case), tile)
    (loss,) = (
        k for k, node in enumerate(step.graph.nodes)
        if step.loss.buffer in [tensor.name for tensor in node.outputs]
    )  # fmt: skip
    replaced = [step.graph.node_of[new] for new in step.graph.replacement_of.values()]
    assert replaced
    assert min(replaced) > loss


@pytest.mark.slow
def test_a_front_with_statistics_alone_computes_what_pytorch_does(tmp_path):
    """The order of updates changes no bit: losses, weights and statistics agree."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    )
    model[:2].requires_grad_(requires_grad=False)
    training = (model, functional.mse_loss, IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = make_batches_like(IMAGES, 3)
    program = Exported(lower(*training, optimizer=optimizer), tmp_path, **SCHEDULES["recomputed"])
    found, expected = program.outcome(batches, 4), train_in_torch(training, batches, 4, "sgd")
    assert max(found.differences(expected).values()) < 1e-12


@pytest.mark.parametrize("target", [Target.HOST, pytest.param(Target.M4, marks=pytest.mark.slow)])
def test_a_refused_batch_commits_nothing(tmp_path, target):
    """After a restart, training continues from the step before, to the state without that batch."""
    program = Exported(load_step(STEP), tmp_path, ram="150%", commit=True)
    good = [np.frombuffer(digit_batches(1, seed=seed), np.uint8).copy() for seed in (1, 2)]
    bad = good[1].copy()
    bad[:4].view("<f4")[0] = math.inf

    def run(batches, steps, *words):
        raw = [(torch.from_numpy(x[:2304].view("<f4")), torch.from_numpy(x[2304:].view("<i4")))
               for x in batches]  # fmt: skip
        return program.run(raw, steps, target=target, settings=(), words=words)

    whole = run(good, 2).require_success()
    (tmp_path / "pm_storage.bin").unlink()
    stopped = run([good[0], bad], 2)
    assert (stopped.error_number, len(stopped.losses)) == (REFUSED, 1)
    rest = run(good, 1, "resume").require_success()
    assert rest.state == whole.state


def test_a_kernel_that_replaces_state_before_the_loss_is_torn(tmp_path):
    """If the node of the loss also replaces state, that cannot be undone, and the step is torn."""
    real, y = DataType.REAL, Tensor(name="y", bytes=4)
    new = Tensor(name="s+", bytes=4, replaces="s")
    seen = replace(make_update_node("seen", "w", s=4), inputs=("s",), outputs=(y, new))
    nodes = (
        make_state_node("s", 4),
        make_state_node("w", 4),
        replace(make_update_node("first", w=4), inputs=("w",)),
        seen,
    )
    rate = (1, ScaledLearningRate(), 1.0, 0.0)
    calls = (
        (),
        (),
        (Call("pm_sgd", (Ref("w"), Ref("x"), *rate)),),
        (Call("pm_mul", (Ref("y"), Ref("s"), Ref("x"), (1, 1, 1, 1, 1))),
         Call("pm_sgd", (Ref("s"), Ref("x"), *rate))),
    )  # fmt: skip
    value = {
        name: NamedTensor(name=name, shape=(1,), type=real, pieces=(Ref(name),)) for name in "xsw"
    }
    step = LoweredStep(
        graph=Graph(name="seen", nodes=nodes), calls=calls,
        buffers={name: Buffer(elements=1, type=real) for name in "xswy"},
        inputs=(value["x"],), states=(value["s"], value["w"]), gradients=(), loss=Ref("y"),
        values={name: np.ones(1, "<f4") for name in "sw"}, learning_rate=0.1,
    ).edit({})  # fmt: skip
    assert [node.name for node in step.graph.nodes] == ["s", "w", "seen", "first"]
    export_step(step, tmp_path, gap=0.5)
    code = (tmp_path / "src" / "pm_step.c").read_text(encoding="utf-8")
    (line,) = (line.strip() for line in code.splitlines() if "pm_is_finite" in line)
    assert line.endswith("return PM_TORN;")


CHECK = """\
#include "pm.h"
#include "pm_runtime.h"
#include <stdio.h>

int main(void)
{
    volatile pm_real zero = 0, large = PM_LARGEST;
    const pm_real bad[] = {zero / zero, -(zero / zero), 1 / zero, -1 / zero, large * 2};
    const pm_real good[] = {zero, -zero, large, -large, 1 / large, PM_EPSILON};
    for (int k = 0; k < 5; k++) if (pm_is_finite(bad[k])) return 1;
    for (int k = 0; k < 6; k++) if (!pm_is_finite(good[k])) return 2;
    return 0;
}
"""


@pytest.mark.parametrize("real", ["float", "double"])
def test_fast_math_takes_no_check_away(tmp_path, real):
    """Compilers may assume finite numbers; the check tests bits."""
    require_programs("gcc")
    export_step(load_step(STEP), tmp_path, gap=0.5, ram="100%", paging=False)
    (tmp_path / "check.c").write_text(CHECK, encoding="utf-8")
    given = ("-O2", "-ffast-math", f"-DPM_REAL={real}", "-Iinclude", "-Isrc", "check.c")
    run_command(["gcc", "-std=c11", *given, "-o", "check"], tmp_path)
    run_command(["./check"], tmp_path)


RATES = """\
#include <math.h>
#include <string.h>
#include "pm.h"
#define PM_FLASH_DRIVER
#include "port/pm_pages.h"

static unsigned char storage[PM_STORED_BYTES];
static unsigned long writes;
static pm_real data[PM_INPUTS][4096];

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    memcpy(to, storage + address, bytes);
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    writes++;
    memcpy(storage + address, from, bytes);
    return PM_OK;
}

int main(void)
{
    const pm_real bad[] = {(pm_real)NAN, -(pm_real)NAN, (pm_real)INFINITY, -(pm_real)INFINITY};
    const void *inputs[PM_INPUTS];
    pm_real loss = -1;
    for (int k = 0; k < PM_INPUTS; k++) inputs[k] = data[k];
    if (pm_init()) return 1;
    const unsigned long before = writes;
    for (int k = 0; k < 4; k++) {
        if (pm_step(inputs, bad[k], &loss) != PM_ERROR_NUMBER || loss != -1) return 2;
        if (pm_step_begin(inputs, bad[k]) != PM_ERROR_NUMBER) return 3;
        if (pm_step_some(1) != PM_ERROR_IDLE || pm_steps != 0 || writes != before) return 4;
    }
    return pm_step(inputs, (pm_real)0.1, &loss) || pm_steps != 1 || writes == before ? 5 : 0;
}
"""


def test_a_learning_rate_that_is_not_finite_writes_nothing(tmp_path):
    """In one call and in slices; no step is under way after it, and one with a number trains."""
    require_programs("gcc")
    export_step(load_step(STEP), tmp_path, gap=0.5, ram="90%", commit=True)
    (tmp_path / "rates.c").write_text(RATES, encoding="utf-8")
    parts = [*sorted(tmp_path.glob("src/*.c")), tmp_path / "rates.c"]
    app = link_program(PLAIN, parts, (tmp_path, tmp_path / "include"), tmp_path / "rates")
    run_command([app], tmp_path)


COST = """\
#include <string.h>
#include "pm.h"
#include "pm_runtime.h"
extern pm_real arena[], loss;
int end(void);
int node(void)
{
    CHECK
    loss = arena[40];
    return end();
}
"""


def test_the_check_is_three_instructions_at_most(tmp_path):
    """On a Cortex-M4, in addition to the two that return, as in the guide."""
    require_programs("arm-none-eabi-gcc", "arm-none-eabi-objdump")
    export_step(load_step(STEP), tmp_path, gap=0.5, ram="100%", paging=False)
    board = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
    found = []
    for check in ("", "if (!pm_is_finite(arena[40])) return PM_ERROR_NUMBER;"):
        (tmp_path / "cost.c").write_text(COST.replace("CHECK", check), encoding="utf-8")
        run_command(["arm-none-eabi-gcc", *board, "-std=c11", "-O2", "-Iinclude", "-Isrc", "-c",
                     "cost.c"], tmp_path)  # fmt: skip
        listing = run_command(["arm-none-eabi-objdump", "-d", "cost.o"], tmp_path)
        lines = [line.split("\t") for line in listing.splitlines() if line.count("\t") >= 2]
        found.append([fields[2].strip() for fields in lines])
    without, with_check = map(len, found)
    returning = 2  # the number, and back
    assert 0 < with_check - without - returning <= 3


# -- first values ----------------------------------------------------------------------------------
def changed(value, *, of):
    """Return a training whose first value of one tensor is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    model[0].requires_grad_(requires_grad=False)
    if of == "momentum_buffer":
        for parameter in model[1:].parameters():
            buffer = torch.full_like(parameter, value if parameter is model[2].bias else 0.0)
            optimizer.state[parameter]["momentum_buffer"] = buffer
    else:
        model.state_dict()[of].view(-1)[1] = value
    return model, optimizer


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "of",
    [
        pytest.param("2.weight", marks=pytest.mark.slow),
        "0.bias",
        "1.running_var",
        "momentum_buffer",
    ],
)
def test_first_values_that_are_not_finite_are_refused(tmp_path, told, value, of):
    """Parameters, trained or frozen, buffers and optimizer state: a sentence names the tensor."""
    model, optimizer = changed(value, of=of)
    inputs = (torch.randn(3, 6), torch.tensor([0, 1, 2]))
    with pytest.raises(InputError) as error:
        export(model, functional.cross_entropy, inputs, optimizer=optimizer, folder=tmp_path / "a")
    told(str(error.value))
    assert not (tmp_path / "a").exists()


def broken(case):
    """Return a model, its loss, and the tensor that gets a value that is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    weights = torch.ones(5)
    tensors = {
        "weights of classes": [weights],
        "statistics": [model[1].running_mean],
        "several": [*model.parameters(), model[1].running_var],
    }
    for tensor in tensors[case]:
        tensor.data[-1] = math.inf
    return model, nn.CrossEntropyLoss(weight=weights)


@pytest.mark.parametrize("case", ["weights of classes", "statistics", "several"])
def test_constants_and_inference_are_looked_at_too(tmp_path, told, case):
    """All that a program reads; several tensors are one sentence."""
    training = (*broken(case), (torch.randn(3, 6), torch.tensor([0, 1, 2])))
    step = with_inference(lower(*training), *training)
    with pytest.raises(InputError) as error:
        export_step(step, tmp_path / "a", infer=True)
    told(str(error.value))


class Masked(nn.Module):
    """Attention whose mask is a constant of minus infinity."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 4)
        later = torch.full((4, 4), -math.inf).triu(1)
        self.register_buffer("later", later)

    def forward(self, x):
        """Return sums of rows up to each one."""
        return torch.softmax(self.scores(x) + self.later, -1) @ x


def test_masks_and_new_momenta_are_no_faults(tmp_path):
    """Minus infinity in a constant is a mask; a momentum that is not there yet is NaN in C."""
    torch.manual_seed(0)
    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    export(model, functional.mse_loss, inputs, optimizer=optimizer, folder=tmp_path)
