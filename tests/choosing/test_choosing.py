"""Which layers to train: held against the enumeration of all sets, each with the solver itself."""

import copy
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import poetmodel as pm
import poetmodel.torch as pmt
from kit.kernel_calls import execute_steps
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule
from poetmodel.choosing.freezing import Freezable, graph_signature
from poetmodel.choosing.pebbling import PebbleGame
from poetmodel.choosing.relaxation import ChoiceRelaxation, costs_for
from poetmodel.choosing.search import group_by_layer, select_layers
from poetmodel.errors import InputError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.calls import Ref
from poetmodel.result import Status
from poetmodel.solver.facade import execute
from poetmodel.solver.request import Request
from poetmodel.torch.lowering.step import lower

LABELS = torch.tensor([1, 0])


def chain():
    """Return four linear layers."""
    layers = (nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 14))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(14, 4)), (torch.randn(2, 12), LABELS)


def norms():
    """Return convolutions, and a batch norm whose statistics each step renews."""
    layers = (nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 5, 3, 1, 1))
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))
    return model, (torch.randn(2, 1, 8, 8), LABELS)


def settled():
    """Return the same in evaluation: statistics stay, weights and biases of the norm may train."""
    model, inputs = norms()
    return model.eval(), inputs


def pooled():
    """Return convolutions of which the first one costs the most to train."""
    norm = nn.BatchNorm2d(2, affine=False)
    layers = (nn.Conv2d(1, 2, 3, 1, 1), norm, nn.ReLU(), nn.AvgPool2d(2))
    model = nn.Sequential(*layers, nn.Conv2d(2, 4, 1, 1, 1), nn.BatchNorm2d(4), nn.ReLU())
    model.extend((nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)))
    return model, (torch.randn(2, 1, 8, 8), LABELS)


def shortcut():
    """Return two convolutions with a shortcut around them."""

    def classify(own, x):
        x = torch.relu(own.a(x))
        return own.d((own.c(torch.relu(own.b(x))) + x).mean((2, 3)))

    layers = {"a": nn.Conv2d(1, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1)}
    model = FunctionModule(classify, **layers, c=nn.Conv2d(4, 4, 1), d=nn.Linear(4, 3))
    return model, (torch.randn(2, 1, 6, 6), LABELS)


def feed_forward():
    """Return layers of a transformer on a sequence, with layer norms."""
    layers = (nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(40, 4)), (torch.randn(2, 5, 8), LABELS)


NETWORKS = {
    "chain": chain,
    "norms": norms,
    "settled norms": settled,
    "pooled": pooled,
    "shortcut": shortcut,
    "feed forward": feed_forward,
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@cache
def freezable(name, optimizer="sgd"):
    """Return a network's step that trains everything."""
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    made = OPTIMIZERS[optimizer](model.parameters())
    return Freezable(
        step=lower(model, functional.cross_entropy, inputs, optimizer=made, masks=False)
    )


def problem_of(step, device, **limits):
    """Return the limits for the step that trains everything."""
    board = pm.Device.load(device)
    return pm.Problem(step.graph, pm.Costs.estimate(step.graph, board), **limits).resolved()


def best_by_enumeration(step, problem, layers, scores):
    """Return the highest score of all sets that have a schedule; None where none has."""
    sets = (each for n in range(len(layers)) for each in combinations(layers, n + 1))
    scored = ((sum(scores[layer] for layer in chosen), chosen) for chosen in sets)
    for score, chosen in sorted(scored, reverse=True):
        graph = step.graph_for([name for layer in chosen for name in layers[layer]])
        stated = replace(problem, graph=graph, costs=costs_for(graph, problem))
        result = pm.solve(stated, gap=1.0, time_limit=30)
        assert result.status != Status.UNKNOWN
        if result.schedule is not None:
            return score
    return None


def selected(step, problem, scores, per="layer"):
    """Return the best set, to no gap."""
    layers = group_by_layer(step.parameters, per)
    return select_layers(step, problem, layers, scores, request=Request(time_limit_s=60.0, gap=0.0))


# -- frozen graphs ---------------------------------------------------------------------------------
def _sets(names):
    yield tuple(names[::2])
    yield tuple(names[-3:])
    yield from ((name,) for name in names[::3])
    yield tuple(names)


@pytest.mark.parametrize(
    ("name", "optimizer", "count"),
    [
        ("shortcut", "sgd", 3),
        *mark_seeds_except(
            list(product(NETWORKS, OPTIMIZERS, (None,))),
            (),
            [(*each, None) for each in (("settled norms", "adam"), ("pooled", "adam"))],
        ),
    ],
)
def test_derived_graph_is_that_of_a_capture(name, optimizer, count):
    """Without updates, nodes and order are those of a step that is captured frozen."""
    step = freezable(name, optimizer)
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    parameters = dict(model.named_parameters())
    assert set(step.parameters) == set(parameters)
    for chosen in islice(_sets(tuple(parameters)), count):
        for each, parameter in parameters.items():
            parameter.requires_grad_(each in chosen)
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        made = OPTIMIZERS[optimizer](trained)
        captured = lower(model, functional.cross_entropy, inputs, optimizer=made, masks=False)
        assert graph_signature(step.graph_for(chosen)) == graph_signature(captured.graph), chosen


@pytest.mark.parametrize(
    "name", mark_seeds_except(NETWORKS, ("chain", "norms", "pooled", "shortcut"), NETWORKS)
)
def test_padded_graphs_have_the_same_stages(name):
    """Whatever is trained, there are as many nodes, and those of a part are among the others."""
    step = freezable(name)
    names = list(step.parameters)
    part, whole = step.padded_graph(names[-1:]), step.padded_graph(names)
    assert len(part.nodes) == len(whole.nodes) >= len(step.graph.nodes)
    for one, other in zip(part.nodes, whole.nodes, strict=True):
        assert one.name == other.name
        assert set(one.inputs) <= set(other.inputs)
        assert {t.name for t in one.outputs} <= {t.name for t in other.outputs}


@pytest.mark.parametrize(
    "name", mark_seeds_except(["chain", "norms", "shortcut"], ["chain"], ["norms", "shortcut"])
)
def test_pebbles_bound_the_least_peak(name):
    """Without paging, no peak is below the state and the minimum memory of recomputation."""
    step = freezable(name)
    for parameter in step.parameters:
        graph = step.graph_for([parameter])
        board = pm.Device.load("nrf52840")
        problem = pm.Problem(
            graph, pm.Costs.estimate(graph, board), ram="100%", paging=False, minimize="ram"
        )
        least = pm.solve(problem, gap=0.0, time_limit=30)
        bound = PebbleGame(step).min_bytes(parameter, 0)
        assert 0 < bound + graph.state_bytes <= least.simulation.peak_ram_bytes


def test_pebbles_see_what_waits_beside_a_recomputation():
    """The gradient waits while the activation is made again, or the other way round."""
    state = pm.Node(name="w", op="p", phase="state", outputs=(pm.Tensor(name="w", bytes=4),))
    sizes = {"x": 20, "a": 100, "s": 10, "g": 30, "d": 4}
    reads = {"x": (), "a": ("x",), "s": ("a",), "g": ("s",), "d": ("a", "g")}
    made = [
        pm.operation(
            name, output_bytes=sizes[name], inputs=reads[name],
            phase="backward" if name in "gd" else "forward",
        )
        for name in sizes
    ]  # fmt: skip
    new = pm.Tensor(name="w+", bytes=4, replaces="w")
    update = pm.Node(
        name="u", op="sgd", phase="update", inputs=("w", "d"), outputs=(new,), recomputable=False
    )
    graph = pm.Graph(name="waits", nodes=(state, *made, update))
    step = freezable("chain").step
    weight = replace(step.states[0], name="w", pieces=(Ref("w"),))
    step = replace(
        step, graph=graph, calls=((),) * len(graph.nodes), states=(weight,), loss=Ref("s")
    )
    # d reads a and g. Is a the last of them, then g waits beside x and a: 150. Is g the last, then
    # a waits beside s and g: 140. The largest working set is that of d: 134.
    assert floor(graph, memory_mapped=True).bytes == 134
    assert PebbleGame(Freezable(step=step)).min_bytes("w", 0) == 140


# -- sets ------------------------------------------------------------------------------------------
LIMITS = {
    "recompute": ("nrf52840", {"ram": "45%", "paging": False}),
    "recompute in time": ("nrf52840", {"ram": "60%", "paging": False, "deadline": "90%"}),
    "keep all": ("nrf52840", {"ram": "70%", "paging": False, "recompute": False}),
    "page": ("nrf52840", {"ram": "30%"}),
    "page in time": ("nrf52840", {"ram": "40%", "deadline": "95%"}),
    "flash": ("stm32f746", {"ram": "40%", "deadline": "85%"}),
    "energy": ("stm32f746", {"ram": "60%", "energy_budget": "80%"}),
    "tight": ("nrf52840", {"ram": "20%", "paging": False}),
    "commit in time": ("nano33ble", {"ram": "60%", "commit": 1, "deadline": "75%"}),
    "commit": ("nano33ble", {"ram": "40%", "commit": 1, "energy_budget": "70%"}),
    "commit seldom": ("nano33ble", {"ram": "60%", "commit": 3, "deadline": "90%"}),
}


QUICK = {
    *product(("chain",), ("recompute", "page in time", "energy", "tight", "commit in time")),
    ("norms", "recompute in time"), ("norms", "commit"), ("shortcut", "recompute"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "limits"), mark_seeds_except(product(("chain", "norms", "shortcut"), LIMITS), QUICK)
)
def test_best_set_is_that_of_the_enumeration(name, limits):
    """Verdict and score are those of all sets, each solved by itself; the bound is the score."""
    step = freezable(name)
    device, stated = LIMITS[limits]
    problem = problem_of(step, device, **stated)
    layers = group_by_layer(step.parameters, "layer")
    scores = {layer: 1.0 + 0.37 * (3 * place % 4) for place, layer in enumerate(layers)}
    found, best = (
        selected(step, problem, scores),
        best_by_enumeration(step, problem, layers, scores),
    )
    if best is None:
        assert found.status == Status.INFEASIBLE
        assert found.layers == ()
        assert found.bound == 0
        return
    assert found.status == Status.OPTIMAL
    assert found.score == pytest.approx(best, rel=1e-9)
    assert found.bound == pytest.approx(best, rel=1e-9)
    assert found.gap == 0


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    widths=st.lists(st.integers(2, 24), min_size=3, max_size=4),
    scores=st.lists(st.floats(0, 10), min_size=3, max_size=3),
    ram=st.integers(25, 100),
    deadline=st.none() | st.integers(60, 120),
    paging=st.booleans(),
)
def test_best_set_of_random_chains(widths, scores, ram, deadline, *, paging):
    """The same for linear layers of random widths, scores and limits."""
    torch.manual_seed(0)
    sizes = [*widths[:3], 3]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers)
    made = torch.optim.SGD(model.parameters())
    inputs = (torch.randn(2, sizes[0]), LABELS)
    step = Freezable(
        step=lower(model, functional.cross_entropy, inputs, optimizer=made, masks=False)
    )
    given_limits = {"ram": f"{ram}%", "paging": paging}
    if deadline is not None:
        given_limits["deadline"] = f"{deadline}%"
    problem = problem_of(step, "nrf52840", **given_limits)
    modules = group_by_layer(step.parameters, "layer")
    worth = dict(zip(modules, scores, strict=True))
    if not any(worth.values()):
        return
    found, best = selected(step, problem, worth), best_by_enumeration(step, problem, modules, worth)
    assert found.score == pytest.approx(best or 0.0, rel=1e-9)
    assert found.bound >= found.score


def test_tensors_are_chosen_alone():
    """With ``tensor``, a bias may train whose weight does not fit; one without score does not."""
    step = freezable("chain")
    problem = problem_of(step, "nrf52840", ram="35%", paging=False)
    scores = dict.fromkeys(step.parameters, 1.0)
    found = selected(step, problem, scores, "tensor")
    best = best_by_enumeration(step, problem, group_by_layer(step.parameters, "tensor"), scores)
    assert found.score == best
    assert any(name.endswith("bias") for name in found.layers)
    problem = problem_of(step, "nrf52840", ram="100%", paging=False)
    names = list(group_by_layer(step.parameters, "layer"))
    found = selected(step, problem, {name: float(name == names[0]) for name in names})
    assert found.layers == (names[0],)
    with pytest.raises(InputError, match="all are 0"):
        selected(step, problem, dict.fromkeys(names, 0.0))


@pytest.mark.parametrize(
    ("name", "counted"),
    mark_seeds_except(
        product(("norms", "settled norms", "pooled", "feed forward"), ("time", "energy")),
        {("norms", "energy"), ("pooled", "time")},
        {("settled norms", "time"), ("feed forward", "energy")},
    ),
)  # fmt: skip
def test_limits_that_a_set_just_keeps_allow_it(name, counted):
    """The proof counts no more than a set needs, and excludes layers of score 0.

    It also excludes unread gradients, and buffers that are read before their update. The limits
    are the RAM of keep-all, and time or energy of one pass.
    """
    step = freezable(name)
    names = list(step.parameters)
    sets = [*((each,) for each in names), tuple(names[2:6]), tuple(names[-2:])]
    for chosen in sets:
        graph = step.graph_for(chosen)
        costs = pm.Costs.estimate(graph, pm.Device.load("nrf52840"))
        alone = pm.Problem(graph, costs, ram="100%", paging=False, recompute=False, minimize="ram")
        least = pm.solve(alone, gap=0.0, time_limit=30).simulation.peak_ram_bytes
        assert least
        limits = {"ram": least, "paging": False, "recompute": False}
        if counted == "time":
            limits["deadline"] = alone.pass_time_s
        else:
            limits["energy_budget"] = alone.baseline_energy_j
        relaxation = ChoiceRelaxation(
            freezable=step,
            problem=problem_of(step, "nrf52840", **limits),
            layers={each: (each,) for each in chosen},
            scores=dict.fromkeys(chosen, 1.0),
        )
        assert relaxation.selected_layers(relaxation.solve(Request(time_limit_s=30.0))) == chosen


@pytest.mark.parametrize("limit", ["deadline", "energy_budget"])
@pytest.mark.parametrize("device", ["nrf52840", "nano33ble"])
def test_commits_of_layers_of_score_0_are_not_counted(device, limit):
    """Limits that training one layer just keeps, with its commit, allow this layer."""
    step = freezable("chain")
    last, names = list(group_by_layer(step.parameters, "layer").items())[-1]
    graph = step.graph_for(names)
    costs = pm.Costs.estimate(graph, pm.Device.load(device))
    alone = pm.solve(pm.Problem(graph, costs, ram="100%", commit=1), gap=0.0, time_limit=30)
    least = {"deadline": alone.simulation.time_s, "energy_budget": alone.simulation.energy_j}
    relaxation = ChoiceRelaxation(
        freezable=step,
        problem=problem_of(step, device, ram="100%", commit=1, **{limit: least[limit]}),
        layers={last: names},
        scores={last: 1.0},
    )
    assert relaxation.selected_layers(relaxation.solve(Request(time_limit_s=30.0))) == (last,)


def test_what_is_not_known_stays_in_the_bound(monkeypatch):
    """A set that the solver leaves open is no cut: its score stays a bound, and a gap is shown."""
    step = freezable("chain")
    problem = problem_of(step, "nrf52840", ram="100%", paging=False)
    scores = dict.fromkeys(group_by_layer(step.parameters, "layer"), 1.0)

    def open_for_all(stated, request):
        result = execute(stated, request)
        if len(stated.graph.nodes) == len(step.graph.nodes):
            return replace(result, schedule=None, simulation=None, status=Status.UNKNOWN)
        return result

    monkeypatch.setattr("poetmodel.choosing.search.execute", open_for_all)
    found = selected(step, problem, scores)
    assert found.status == Status.FEASIBLE
    assert found.score == 3
    assert found.bound == 4
    assert found.gap == 0.25


# -- layers and scores -----------------------------------------------------------------------------
def test_layers_are_modules():
    """Parameters of one module are one layer; one without a module is a layer of its own."""
    names = ("a.weight", "a.bias", "scale", "b.norm.weight")
    expected = {"a": ("a.weight", "a.bias"), "scale": ("scale",), "b.norm": ("b.norm.weight",)}
    assert group_by_layer(names, "layer") == expected
    assert group_by_layer(names, "tensor") == {name: (name,) for name in names}
    with pytest.raises(InputError, match="per: expected layer or tensor, got 'module'"):
        group_by_layer(names, "module")


# -- tiles -----------------------------------------------------------------------------------------


def images():
    """Return convolutions whose activations are larger than their weights."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
    more = (nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *more, nn.Linear(12, 4)), (torch.randn(2, 2, 8, 8), LABELS)


SCORES = {"0": 1.0, "1": 0.5, "3": 4.0, "7": 2.0}


def chosen(**options):
    """Return the trained parts of the convolutions."""
    model, inputs = images()
    given = {"scores": SCORES, "device": "nrf52840", "gap": 0.3, "time_limit": 12}
    return model, inputs, pmt.choose(model, functional.cross_entropy, inputs, **given | options)


class ReturnedLoss(nn.Module):
    """A model that returns its loss, in a dict."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, labels):
        """Return the loss by name."""
        return {"loss": functional.cross_entropy(self.body(x), labels)}


@pytest.mark.parametrize("by_name", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradient_norms_are_those_of_a_returned_loss(by_name):
    """In a dict, for inputs in a tuple or by name."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs = (torch.randn(2, 6), LABELS)
    options = {"scores": "gradient-norm", "device": "nrf52840", "gap": 0.5, "time_limit": 5}
    scores = pmt.choose(model, functional.cross_entropy, inputs, **options).scores
    by_loss = ReturnedLoss(model)
    own = dict(zip(("x", "labels"), inputs, strict=True)) if by_name else inputs
    found = pmt.choose(by_loss, None, own, **options).scores
    assert found == pytest.approx({f"body.{layer}": score for layer, score in scores.items()})


@pytest.mark.slow
def test_tiles_let_more_layers_train():
    """In RAM below that of the whole step, tiles let more layers train, with PyTorch's results."""
    *_, whole = chosen(ram="12KiB")
    model, inputs, choice = chosen(ram="12KiB", tile="2KiB")
    assert choice.score > whole.score
    assert choice.tile_bytes == 2048
    assert choice.result.require_schedule()
    assert choice.result.simulation.peak_ram_bytes <= 12 * 1024
    twin = copy.deepcopy(model).double()
    choice.freeze(twin)
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad])
    x, labels = inputs
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(twin(x.double()), labels).backward()
        optimizer.step()
    found = execute_steps(choice.step, *inputs, steps=2)
    expected = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for value in choice.step.states:
        mine = np.concatenate([found[ref.buffer] for ref in value.pieces])
        its = expected[value.name].detach().flatten()
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12, err_msg=value.name)


def test_infeasible_is_said_of_the_whole_step_or_of_tiles(told):
    """With a size in which the least RAM is less."""
    *_, whole = chosen(ram="4KiB")
    *_, tiles = chosen(ram="3KiB", tile="3KiB")
    assert (whole.status, tiles.status) == (Status.INFEASIBLE, Status.INFEASIBLE)
    told(whole.note)
    told(tiles.note, "tiles")


@pytest.mark.slow
def test_budgets_of_tiles_are_shares_of_the_whole_step():
    """Where sizes of tiles are chosen, one is found in which the step fits."""
    *_, share = chosen(ram="60%", tile="2KiB")
    model, inputs = images()
    step = lower(model, functional.cross_entropy, inputs, masks=False,
                 optimizer=torch.optim.SGD(model.parameters()))  # fmt: skip
    most = checkpoint_all_peak_bytes(step.graph)
    assert share.result.problem.ram_budget_bytes == 6 * most // 10
    *_, auto = chosen(ram="12KiB", tile="auto")
    tried = {trial.tile_bytes: trial.value for trial in auto.tile_trials}
    assert len(tried) > 1
    assert tried[auto.tile_bytes] == min(tried.values())
    assert auto.to_dict()["choice"]["tile_trials"][0]["tile_bytes"] == max(tried)


def transposed():
    """Return products of batches, for which PyTorch has other operators if one is frozen."""

    def classify(own, x):
        return (torch.relu(own.a(x.transpose(1, 2))) @ own.b.weight.T).mean(1)

    layers = {"a": nn.Linear(8, 6, bias=False), "b": nn.Linear(6, 4, bias=False)}
    return FunctionModule(classify, **layers), (torch.randn(2, 8, 5), LABELS)


@pytest.mark.parametrize("commit", [pytest.param(None, marks=pytest.mark.slow), 10])
def test_without_a_bound_estimates_of_a_device_are_costs_of_any_step(commit):
    """Also with commits, which the estimates of a problem have, and those of a graph have not."""
    model, inputs = transposed()
    limits = {"ram": "900B", "paging": False, "commit": commit}
    options = {"scores": {"a": 1.0, "b": 4.0}, "device": "nrf52840", "time_limit": 10}
    choice = pmt.choose(model, functional.cross_entropy, inputs, **options, **limits)
    assert choice.layers == ("b",)
    assert choice.note
    assert choice.result.require_schedule()
    assert (choice.status, choice.bound) == (Status.FEASIBLE, 5.0)


def test_costs_of_a_device_without_storage_have_no_page_costs(tmp_path):
    """Of an object and of a file."""
    model, inputs = nn.Sequential(nn.Linear(6, 4)), (torch.randn(2, 6), LABELS)
    optimizer = torch.optim.SGD(model.parameters())
    graph = lower(model, functional.cross_entropy, inputs, optimizer=optimizer, masks=False).graph
    device = pm.Device.load("nrf52840")
    costs = pm.Costs.estimate(graph, device)
    costs.save(tmp_path / "profile.csv")
    bare = replace(device, storage=None)
    options = {"scores": {"0": 1.0}, "device": bare, "gap": 0.5}
    for profile in (costs, tmp_path / "profile.csv"):
        choice = pmt.choose(model, functional.cross_entropy, inputs, profile=profile, **options)
        assert choice.result.problem.costs.pages is None
