"""Files of state: from an exported program to a model of PyTorch, and back."""

import json

import numpy as np
import pytest
import torch

import poetmodel.torch as pmt
from kit.commands import invoke
from kit.digits import build_and_run
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from kit.shared_objects import build
from poetmodel.errors import InputError
from poetmodel.export.board import STATE_FILE, Target, ToolchainError, run_program
from poetmodel.export.state import load_state_tensors, read_state, write_state

RATE = 0.01
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=RATE, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=RATE, eps=1e-3),
}


def model():
    """Return a network with running statistics and a frozen layer."""
    torch.manual_seed(2)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(3 * 16, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4),
    )  # fmt: skip
    made[0].weight.requires_grad_(False)
    return made


def batches():
    """Return three batches."""
    torch.manual_seed(3)
    return [(torch.randn(4, 1, 6, 6), torch.randint(0, 4, (4,))) for _ in range(3)]


def trained(net, optimizer, steps):
    """Train in place."""
    for x, y in steps:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def file_of(steps):
    """Return batches as a program reads them."""
    return b"".join(x.numpy().tobytes() + y.int().numpy().tobytes() for x, y in steps)


@pytest.fixture(scope="module", params=mark_seeds_except(list(OPTIMIZERS), ["nadam"]))
def exported(request, tmp_path_factory):
    """Return a folder in tiles with state on storage, its optimizer, and a way to run it."""
    require_programs(Target.HOST)
    make, folder = OPTIMIZERS[request.param], tmp_path_factory.mktemp(request.param)
    net = model()
    pmt.export(
        net, torch.nn.functional.cross_entropy, batches()[0], folder=folder, gap=0.5,
        optimizer=make([p for p in net.parameters() if p.requires_grad]), ram="80%", tile=128,
    )  # fmt: skip
    program = build(folder, Target.HOST)

    def program_state(steps, *words):
        done = run_program(
            program, Target.HOST, folder, inputs=file_of(steps), steps=len(steps),
            learning_rate=RATE, words=words,
        )  # fmt: skip
        return done.require_success().state

    return folder, make, program_state


def distance(one, other):
    """Return the largest difference of a tensor of two models."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def test_model_goes_on_where_the_program_ended(exported, tmp_path):
    """Loaded after two steps, PyTorch's third is the program's; saved, the file is the same."""
    folder, make, program_state = exported
    state = program_state(batches()[:2])
    net, other = model(), model()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = make(parameters)
    pmt.load_state(folder, net, optimizer=optimizer)
    trained(other, make([p for p in other.parameters() if p.requires_grad]), batches()[:2])
    assert distance(net, other) < 1e-5
    pmt.save_state(net, tmp_path / "again.bin", optimizer=optimizer, folder=folder)
    assert (tmp_path / "again.bin").read_bytes() == state
    trained(net, optimizer, batches()[2:])
    whole = program_state(batches())
    (tmp_path / "whole.bin").write_bytes(whole)
    pmt.load_state(tmp_path / "whole.bin", other, folder=folder)
    assert distance(net, other) < 1e-5


def test_program_goes_on_where_the_model_ended(exported):
    """The program begins with the saved file; without a step, it writes the state that it read."""
    folder, make, program_state = exported
    net = model()
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    trained(net, optimizer, batches()[:2])
    pmt.save_state(net, folder / "first.bin", optimizer=optimizer)
    program_state(batches()[2:], "state=first.bin")
    after = model()
    pmt.load_state(folder / STATE_FILE, after)
    trained(net, optimizer, batches()[2:])
    assert distance(net, after) < 1e-5
    state = program_state(batches()[:1])
    (folder / "one.bin").write_bytes(state)
    assert program_state([], "state=one.bin") == state


def test_moments_of_an_optimizer_without_a_step_are_the_first(exported, tmp_path):
    """They are 0, a product of none is 1; without an optimizer they cannot be known."""
    folder, make, _ = exported
    net = model()
    with pytest.raises(InputError, match="pass the optimizer"):
        pmt.save_state(net, tmp_path / "a.bin", folder=folder)
    fresh = make([p for p in net.parameters() if p.requires_grad])
    pmt.save_state(net, tmp_path / "a.bin", optimizer=fresh, folder=folder)
    arrays = read_state(tmp_path / "a.bin", load_state_tensors(folder))
    own = {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    assert arrays.keys() > own
    products = {name for name in arrays if name.endswith("mu_product")}
    assert all(arrays[name] == 1 for name in products)
    assert all(not arrays[name].any() for name in arrays.keys() - own - products)


def test_dampened_momentum_begins_with_the_first_gradient(tmp_path):
    """In a file of an optimizer without a step, and in a model that reads one of a program."""
    require_programs(Target.HOST)

    def make(net):
        trained_ones = [p for p in net.parameters() if p.requires_grad]
        return torch.optim.SGD(trained_ones, lr=RATE, momentum=0.9, dampening=0.5)

    def states(steps, *words):
        return run_program(
            program, Target.HOST, tmp_path, inputs=file_of(batches()), steps=len(steps),
            learning_rate=RATE, words=words,
        ).require_success().state  # fmt: skip

    net = model()
    loss_fn, optimizer = torch.nn.functional.cross_entropy, make(net)
    pmt.export(net, loss_fn, batches()[0], folder=tmp_path, gap=0.5, optimizer=optimizer)
    program = build(tmp_path, Target.HOST)
    pmt.save_state(net, tmp_path / "first.bin", optimizer=optimizer, folder=tmp_path)
    assert states(batches(), "state=first.bin") == states(batches())
    (tmp_path / STATE_FILE).write_bytes(states([]))
    other = model()
    begun = make(other)
    pmt.load_state(tmp_path, other, optimizer=begun)
    expected = model()
    trained(expected, make(expected), batches())
    assert distance(trained(other, begun, batches()), expected) == 0


def test_files_and_models_that_do_not_fit_are_refused(exported, tmp_path):
    """Before anything is changed."""
    folder, make, _ = exported
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    (tmp_path / "short.bin").write_bytes(b"1234")
    with pytest.raises(InputError, match=r"short.bin: expected [\d,]+ B"):
        pmt.load_state(tmp_path / "short.bin", net, folder=folder)
    with pytest.raises(InputError, match=r"manifest.json: no such file"):
        pmt.load_state(tmp_path / "short.bin", net)
    tensors = load_state_tensors(folder)
    zeros = {tensor.name: np.zeros(tensor.shape) for tensor in tensors}
    write_state(tmp_path / "zeros.bin", tensors, zeros)
    wrong = model()
    wrong[6] = torch.nn.Linear(6, 5)
    with pytest.raises(InputError, match=r"6.weight: expected shape \[4, 6\]"):
        pmt.load_state(tmp_path / "zeros.bin", wrong, folder=folder)
    with pytest.raises(InputError, match=r"^model: "):
        pmt.load_state(tmp_path / "zeros.bin", wrong[:5], folder=folder)
    other = make([p for p in wrong.parameters() if p.requires_grad])
    with pytest.raises(InputError, match=r"^optimizer: "):
        pmt.load_state(tmp_path / "zeros.bin", net, optimizer=other, folder=folder)
    another = torch.optim.Adagrad([p for p in net.parameters() if p.requires_grad])
    with pytest.raises(InputError, match="Adagrad has step, sum; use an optimizer like"):
        pmt.load_state(tmp_path / "zeros.bin", net, optimizer=another, folder=folder)
    with pytest.raises(InputError, match="Adagrad has step, sum; use an optimizer like"):
        pmt.save_state(net, tmp_path / "zeros.bin", optimizer=another, folder=folder)
    assert all(kept.keys() == {"step", "sum"} for kept in another.state.values())
    with pytest.raises(InputError, match=r"has no memory in the model \(device meta\)"):
        pmt.load_state(tmp_path / "zeros.bin", model().to("meta"), folder=folder)
    another = "adam"
    with pytest.raises(InputError, match=r"^optimizer: .*'adam'"):
        pmt.load_state(tmp_path / "zeros.bin", net, optimizer=another, folder=folder)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_frozen_values_of_another_model_are_refused(exported):
    """They lie in flash: a program that passed over them would train beside other features."""
    folder, make, program_state = exported
    net = model()
    net[0].weight.data[0] += 1
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    pmt.save_state(net, folder / "other.bin", optimizer=optimizer)
    with pytest.raises(ToolchainError, match=r"other.bin: has other values of state that no step"):
        program_state([], "state=other.bin")


def test_folder_of_gradients_has_no_file_of_state(tmp_path):
    """The program writes gradients: of the size of the weights, but no weights."""
    net = torch.nn.Linear(4, 3)
    samples = torch.randn(2, 4), torch.tensor([0, 1])
    pmt.export(net, torch.nn.functional.cross_entropy, samples, folder=tmp_path)
    (tmp_path / STATE_FILE).write_bytes(bytes(4 * (12 + 3)))
    before = net.weight.detach().clone()
    with pytest.raises(InputError, match="hands out gradients and changes no state"):
        pmt.load_state(tmp_path, net)
    with pytest.raises(InputError, match="export it with an optimizer"):
        pmt.save_state(net, tmp_path)
    assert torch.equal(net.weight, before)
    assert invoke("state", tmp_path).status == 0
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "pm_read_gradient(0, gradient)" in readme
    assert "STATE is an output: the gradients of the last step" in readme
    assert "load_state" not in readme


@pytest.mark.slow
def test_doubles_are_read(exported):
    """A build for double writes reals of eight bytes."""
    folder, *_ = exported
    given = {"inputs": file_of([(x.double(), y) for x, y in batches()]), "steps": 1, "rate": RATE}
    state = build_and_run(folder, Target.HOST_DOUBLE, **given).state
    net, other = model(), model()
    pmt.load_state(folder, net)
    assert len(state) > sum(tensor.bytes for tensor in load_state_tensors(folder))
    parameters = [p for p in other.parameters() if p.requires_grad]
    trained(other, torch.optim.SGD(parameters, lr=0.0), batches()[:1])
    assert torch.allclose(net[1].running_mean, other[1].running_mean, atol=1e-6)


def test_command_lists_state(exported):
    """In the order of the functions; all of it as JSON."""
    folder, *_ = exported
    listed = invoke("state", folder, "--json")
    names = [entry["name"] for entry in listed.json]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert names == [entry["name"] for entry in manifest["states"]]
    assert listed.json[0] == {
        "name": "0.weight", "shape": [3, 1, 3, 3], "dtype": "float32", "bytes": 108, "home": "flash"
    }  # fmt: skip
    told = invoke("state", folder).out
    assert "0.weight" in told
    assert f"{len(names)} tensors" in told


def test_command_names_what_is_no_exported_folder(tmp_path):
    """The error states the missing file."""
    missing = invoke("state", tmp_path, status=2)
    assert "manifest.json: no such file" in missing.err
    (tmp_path / "manifest.json").write_text('{"format": "other"}', encoding="utf-8")
    assert "expected the manifest of a folder" in invoke("state", tmp_path).err
    later = {"format": "poetmodel-export", "version": 2, "versions": {"poetmodel": "0.3.0"}}
    (tmp_path / "manifest.json").write_text(json.dumps(later), encoding="utf-8")
    refused = invoke("state", tmp_path, status=2).err
    assert "version: expected 1, got 2: the file was written by poetmodel 0.3.0" in refused
    state = {"name": "w", "dtype": "float32", "home": "ram"}
    for shape in ([-1], [1.5], [True], "12", [1e400], None):
        broken = {"format": "poetmodel-export", "states": [state | {"shape": shape}]}
        (tmp_path / "manifest.json").write_text(json.dumps(broken), encoding="utf-8")
        refused = invoke("state", tmp_path, status=2)
        assert "states: expected name, shape, dtype and home of each" in refused.err
