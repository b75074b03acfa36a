"""The runs of studies: complete, distinct, and in a fair order if a study is interrupted."""

import json
from collections import Counter
from dataclasses import replace

import pytest

import against
import compared
import published
from compared import (
    CURVES,
    EQUAL_METHOD,
    LAYERED,
    MAIN,
    list_methods,
    list_problems,
    load_layered_graph,
)
from grid import (
    FLOOR,
    METHODS,
    PROFILE,
    Course,
    Instance,
    instances,
    load_graph,
    measure,
    mix_instances,
)
from harness import open_records
from measured import read_records
from poetmodel.baselines import METHODS as SHIPPED
from poetmodel.errors import GraphError, InputError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.solver import SolveProgress
from poetmodel.sweeps.measurement import FAILED
from pytorch import compare
from pytorch.runs import AT_PEERS, FUSED_SHARES, KNOBS, SHARES, make_fused_runs, make_training_runs
from pytorch.runs import METHODS as TRAINING_METHODS
from pytorch.runs import NETWORKS as TRAINING_NETWORKS

SMALL = Instance(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)


# -- the grid --------------------------------------------------------------------------------------
def test_published_grid_is_a_full_product():
    """Seven graphs, three devices, ten budgets and four deadlines, none chosen by hand."""
    published = instances((1,))
    assert len(published) == 7 * 3 * 10 * 4
    for key, count in (("model", 7), ("device", 3), ("ram", 10), ("deadline", 4)):
        assert len({getattr(each, key) for each in published}) == count
    assert len(instances((2,))) == 7 * 4 * 4
    names = [each.name for each in instances()]
    assert len(set(names)) == len(names)


def test_large_and_captured_graphs_have_their_own_limits():
    """BERT of 24, 48 and 96 blocks has a minute, three and ten; whole steps have two."""
    limits = {each.model: each.limit_s for each in instances((4,))}
    assert limits == {"paper/bert-24": 60.0, "paper/bert-48": 180.0, "paper/bert-96": 600.0}
    assert [len(load_graph(model).nodes) for model in limits] == [387, 771, 1539]
    for goal, folder, count, limit_s in ((6, "models", 12, 60.0), (7, "whole-steps", 6, 120.0)):
        found = instances((goal,))
        models = Counter(each.model for each in found)
        assert (set(models.values()), len(models)) == ({4}, count)
        assert all(model.startswith(f"traced/{folder}/") for model in models)
        assert {(each.device, each.limit_s) for each in found} == {(PROFILE, limit_s)}


def test_comparison_solves_each_instance_by_every_method():
    """All methods solve the same instances."""
    met = {}
    for each in instances((5,)):
        same = replace(each, method="default", limit_s=0.0)
        met.setdefault(same.name, set()).add(each.method)
    assert all(methods >= {"default", "compact", "paper"} for methods in met.values())
    assert set.union(*met.values()) == set(METHODS)


def test_problem_states_what_the_instance_says():
    """Budget, deadline and its meaning reach the problem; without a deadline the device decides."""
    each = replace(SMALL, ram=FLOOR, deadline="115%")
    problem = each.problem()
    assert problem.ram_budget_bytes == int(1.02 * floor(load_graph(each.model)).bytes)
    assert problem.deadline_counts == "serial"
    assert problem.deadline_s == pytest.approx(1.15 * problem.pass_time_s)
    assert replace(each, deadline=None).problem().deadline_s is None


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_order_cut_short_keeps_the_share_of_every_goal(share):
    """The first part of the order has that part of each goal's instances, to within one."""
    whole = Counter(each.goal for each in instances())
    order = mix_instances(instances())
    assert order == mix_instances(instances())
    part = Counter(each.goal for each in order[: int(share * len(order))])
    for goal, count in whole.items():
        assert part[goal] == pytest.approx(share * count, abs=1.0)


def test_course_notes_the_first_schedule_and_each_fall_of_the_gap():
    """Gaps that fall by little are left out, the first schedule and a closed gap never."""
    course = Course()
    states = [(0.1, None, 1.0), (0.2, 4.0, 1.0), (0.3, 3.99, 1.0), (0.4, 2.0, 1.0), (0.5, 1.0, 1.0)]
    for seconds, incumbent, bound in (*states, (0.6, 1.0, 1.0)):
        course.record_progress(
            SolveProgress(seconds=seconds, overhead=incumbent, overhead_bound=bound)
        )
    assert course.first_schedule_s == 0.2
    assert course.gaps == [(0.2, 0.75), (0.4, 0.5), (0.5, 0.0)]


def test_measurement_is_plain_data_and_ends_where_the_solve_ended():
    """A proven instance has a gap, the history down to it, and only values that JSON supports."""
    facts = measure(SMALL.to_dict())
    json.dumps(facts, allow_nan=False)
    assert (facts["cell"], facts["status"]) == (SMALL.to_dict(), "optimal")
    assert facts["gap"] <= facts["requested_gap"]
    assert 0 < facts["first_schedule_s"] <= facts["seconds"]
    assert facts["gaps"][-1][1] <= facts["requested_gap"]
    paper = measure(replace(SMALL, method="paper", ram="90%", limit_s=30.0).to_dict())
    assert paper["formulation"] == "paper"
    assert paper["gap"] <= paper["requested_gap"]  # of the published model
    hopeless = measure(replace(SMALL, ram="1%").to_dict())
    assert (hopeless["status"], hopeless["first_schedule_s"]) == ("infeasible", None)


# -- two states of the code ------------------------------------------------------------------------
def test_both_states_solve_each_instance_in_turns():
    """One right after the other, and which one is first changes."""
    found = list(against.runs(2, "drawn"))
    assert len({run.key for run in found}) == len(found) == 4 * len(against.SAMPLE)
    assert [run.code for run in found[:4]] == ["before", "here", "here", "before"]
    assert len({run.instance for run in found[:4]}) == 1
    assert len({run.instance for run in against.runs(1)}) == 36
    with pytest.raises(InputError, match="sample: expected one of pinned, drawn"):
        list(against.runs(1, "other"))


def test_states_are_compared_by_answers_and_median_times():
    """A value that differs is named; of times the ratio of medians counts, if all are proved."""

    def solved(instance, code, turn, cpu_s, value, status="optimal"):
        run = against.CodeRun(instance=instance, code=code, turn=turn)
        facts = {"cpu_s": cpu_s, "objective_value": value, "status": status}
        return {"cell": run.to_dict(), **facts}

    first, second, third, half = against.load_pinned()[:4]
    found = against.compare(
        [
            *(solved(first, "before", turn, cpu_s, 1.0) for turn, cpu_s in enumerate((1, 1, 9))),
            *(solved(first, "here", turn, cpu_s, 1.0) for turn, cpu_s in enumerate((2, 7, 2))),
            *(solved(second, code, 0, 3.0, value) for code, value in (("here", 2), ("before", 1))),
            *(solved(third, code, 0, 60.0, 1.0, "feasible") for code in ("here", "before")),
            solved(half, "here", 0, 1.0, 1.0),
        ]
    )
    assert found.different == (second.name,)
    assert found.ratios == {first.name: 2.0, second.name: 1.0}
    assert found.mean_ratio == pytest.approx(2**0.5)
    assert "answers that differ: 1" in found.format_text()


# -- every method ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_problems_are_many_and_can_be_solved():
    """At least 170, of six kinds, none below the minimum RAM, none twice."""
    found = list_problems(MAIN)
    assert len(found) >= 170
    assert len({problem.key for problem in found}) == len(found)
    assert {problem.kind for problem in found} == set(MAIN)
    curves = {(run.kind, run.model, run.device, run.ram) for run in found}
    assert [kind for kind, *_ in CURVES] == list(MAIN)
    for kind, model, device, budgets in CURVES:
        assert sum((kind, model, device, ram) in curves for ram in budgets) >= 4


def test_every_shipped_method_is_run_on_whole_steps():
    """All methods of the registry but one, and more; all runs of a problem are consecutive."""
    steps = list_methods(compared.STEPS)
    assert set(SHIPPED) - {EQUAL_METHOD} < set(steps)
    runs = [run for run in compared.runs((compared.STEPS,)) if run.ram == "least+30%"]
    assert tuple(run.method for run in runs[: len(steps)]) == steps


@pytest.mark.slow
def test_every_run_of_the_comparison_is_on_record():
    """Each registered run has its record, with its commit; none failed, all had the same limit."""
    found = {key(record["cell"]): record for record in read_records("compared")}
    for run in compared.runs():
        record = found[key(run.to_dict())]
        assert record["commit"]
        assert record["status"] != FAILED
        assert record["cell"]["limit_s"] == run.limit_s


def key(cell):
    """Return the problem and the method of a run."""
    return tuple(cell[name] for name in ("kind", "model", "device", "ram", "method"))


def test_published_layered_graph_is_read(tmp_path, monkeypatch):
    """Its order, sizes and durations are those of the file."""
    sizes = {0: 100, 1: 10, 2: 100, 3: 100}
    content = {
        "nodes": [{"name": k, "out_cost": size, "duration": k} for k, size in sizes.items()],
        "links": [{"0": a, "1": b} for a, b in ((0, 2), (2, 3), (3, 1), (0, 1))],
        "graph": {"order": [0, 2, 3, 1]},
    }
    (tmp_path / "random_layered_n4.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setenv("MOCCASIN_DATA", str(tmp_path))
    graph = load_layered_graph("random_layered_n4")
    assert [node.name for node in graph.nodes] == ["v0", "v2", "v3", "v1"]
    assert [node.inputs for node in graph.nodes] == [(), ("v0",), ("v2",), ("v3", "v0")]
    assert (graph.nodes[3].output_bytes, graph.nodes[3].flops) == (10 * 1024, 1_000_000)
    assert "random_layered_n4" in {run.model for run in compared.runs((LAYERED,))}


# -- training methods ------------------------------------------------------------------------------
def record_of(run, peak_bytes, **changes):
    """Return the record of a run."""
    return {"cell": run.to_dict(), "status": "ran", "heap_peak_bytes": peak_bytes, **changes}


def test_peers_run_before_those_that_need_their_peak():
    """In any order, a peer is first; all names differ."""
    names = [run.name for run in make_training_runs()]
    count = len(TRAINING_NETWORKS) * (5 + 5 * len(SHARES) + len(AT_PEERS) - 1)
    assert len(names) == len(set(names)) == count
    asked = ("both@file-hooks", "file-hooks", "both@memory-budget", "memory-budget")
    found = make_training_runs(("unet-b8",), asked, (0.5,))
    assert [run.method for run in found] == [
        "file-hooks", "memory-budget", "both@file-hooks", "both@memory-budget",
    ]  # fmt: skip
    for run in make_training_runs():
        if run.peer is not None:
            assert TRAINING_METHODS.index(run.peer) < TRAINING_METHODS.index(run.method)


def test_peaks_of_peers_become_budgets(tmp_path):
    """The peak on record, with the slack, is the budget, share by share; peers have none."""
    store = open_records(tmp_path / "x-training.jsonl")
    methods = ("memory-budget", "both@memory-budget")
    half, quarter, own_half, own_quarter = make_training_runs(
        ("unet-b8",), methods, (0.5, 0.25), slack=0.01
    )
    store.add(record_of(half, 1000))
    store.add(record_of(quarter, 500))
    assert compare.compute_budget_bytes(own_half, store) == 1010
    assert compare.compute_budget_bytes(own_quarter, store) == 505
    assert compare.compute_budget_bytes(half, store) is None


def test_fused_kernels_are_compared_with_stock_at_its_peaks(tmp_path):
    """Each setting of stock runs before the back end at its peak; a share alone is one of all."""
    store = open_records(tmp_path / "x-fused.jsonl")
    runs = {run.name: run for run in make_fused_runs(("unet-b8",))}
    names = list(runs)
    for knob in KNOBS:
        stock, own = (f"unet-b8 | {method} | {knob:.0%}" for method in ("stock", "fused@stock"))
        assert names.index(stock) < names.index(own)
    least = runs[f"unet-b8 | fused | {min(FUSED_SHARES):.0%}"]
    assert compare.compute_budget_bytes(least, store) is None
    without = compare.measure(least.to_dict(), (None, ""))
    assert (without["status"], without["reason"]) == ("failed", "stock has no peak on record")
    store.add(record_of(runs["unet-b8 | stock"], 1000))
    store.add(record_of(runs["unet-b8 | stock | 40%"], 700))
    assert compare.compute_budget_bytes(least, store) == int(1000 * min(FUSED_SHARES))
    assert compare.compute_budget_bytes(runs["unet-b8 | fused@stock | 40%"], store) == 700


# -- published graphs ----------------------------------------------------------------------------
@pytest.fixture(scope="module", params=sorted(published.MODELS))
def graph(request):
    """Return each model at its default size."""
    return published.MODELS[request.param]()


def node(graph, name):
    """Return a node by name."""
    return graph.nodes[graph.node_index[name]]


def forward(graph):
    """Return the indices of the nodes before the backward pass."""
    return [k for k, each in enumerate(graph.nodes) if each.phase != "backward"]


def test_nodes_have_one_output_and_nothing_special(graph):
    """As in the paper: one tensor per node, no workspace, no tensor on storage.

    Walking back, each gradient reads its layer, the layer after it and the gradient before.
    """
    for each in graph.nodes:
        assert [tensor.name for tensor in each.outputs] == [each.name]
        assert (each.workspace_bytes, each.on_aux, each.recomputable) == (0, False, True)
        assert each.bytes_moved is None
    assert graph.dtype == "float32"
    layers = [graph.nodes[k] for k in forward(graph)]
    gradients = graph.nodes[len(layers) :]
    assert len(gradients) == len(layers) - 1
    upstream = layers[-1].name
    for step, gradient in enumerate(gradients, 1):
        layer, after = layers[-1 - step], layers[-step]
        assert gradient.name == f"grad.{layer.name}"
        assert set(gradient.inputs) == {layer.name, after.name, upstream}
        assert gradient.output_bytes == after.output_bytes
        assert gradient.flops == 2 * layer.flops
        upstream = gradient.name


def test_vgg_follows_the_published_rules():
    """Convolution, rectifier, pooling, flattening, linear and loss figures, worked out by hand."""
    vgg = published.vgg16_cifar()
    assert node(vgg, "grad.fc3").inputs == ("fc3", "loss")  # which it reads once
    stem = node(published.resnet18(), "conv")  # its stride does not lower the count
    assert stem.flops == 2 * 49 * (3 * 224 * 224) * 64 + 64 * 112 * 112
    first = node(vgg, "conv1_1")
    assert first.inputs == ("input",)
    assert first.flops == 2 * 9 * (3 * 32 * 32) * 64 + 64 * 32 * 32
    assert first.output_bytes == 64 * 32 * 32 * 4
    assert node(vgg, "relu1_1").flops == 64 * 32 * 32
    assert node(vgg, "pool1").flops == 2 * 4 * 64 * 16 * 16
    assert node(vgg, "pool5").output_bytes == 512 * 4
    assert node(vgg, "flatten").flops == 512
    assert node(vgg, "fc1").flops == 2 * 513 * 4096 + 4096
    assert node(vgg, "dropout1").flops == 4096
    assert node(vgg, "loss").flops == 10 * 10
    assert vgg.parameters == 33_638_218
    assert vgg.resident_bytes == {"parameters": 134_552_872, "gradients": 134_552_872}


def test_residuals_start_where_the_published_code_has_them():
    """Inside the block for ImageNet, at a convolved shortcut for CIFAR-10."""
    assert node(published.resnet18(), "block2_1.add").inputs == ("block2_1.relu1", "block2_1.bn2")
    assert node(published.resnet50(), "block2_1.add").inputs == ("block2_1.bn3", "block2_1.relu1")
    cifar = published.resnet18_cifar()
    assert node(cifar, "block2_1.conv3").inputs == ("block1_2.relu3",)
    assert node(cifar, "block2_1.add").inputs == ("block2_1.relu2", "block2_1.bn3")


def test_transformer_follows_the_published_rules():
    """Attention figures worked out by hand: 512 tokens, 768 wide, 12 heads of 64."""
    transformer = published.transformer()
    assert node(transformer, "block1.qkv").flops == 3 * 512 * 768 * 768
    assert node(transformer, "block1.qkv").output_bytes == 3 * 512 * 768 * 4
    assert node(transformer, "block1.scores").flops == 512 * 512 * 768 + 2 * 512 * 512 * 12
    assert node(transformer, "block1.scores").output_bytes == 512 * 512 * 12 * 4
    assert node(transformer, "block1.context").flops == 2 * 512 * 512 * 768
    assert node(transformer, "block1.context").inputs == ("block1.scores",)
    assert node(transformer, "block1.projection").flops == 2 * 769 * 768 + 768
    assert node(transformer, "block1.ffn1").flops == 2 * 769 * 3072 + 3072 + 512 * 3072
    assert node(transformer, "block1.ffn2").flops == 2 * 3073 * 768 + 768
    assert node(transformer, "loss").flops == 512 * 768 * 512
    # The published sum skips the first residual.
    assert node(transformer, "block1.add1").inputs == ("input", "block1.projection")
    assert node(transformer, "block1.add2").inputs == ("block1.projection", "block1.ffn2")


@pytest.mark.parametrize(
    ("name", "nodes", "peak_bytes", "flops"),
    [
        ("paper/bert", 195, 383_778_816, 55_253_637_120),
        ("paper/resnet18", 127, 28_577_536, None),
        ("paper/resnet18-cifar", 133, 2_453_760, 316_493_950),
        ("paper/resnet50", 335, 127_759_104, None),
        ("paper/vgg16", 81, 115_505_152, None),
        ("paper/vgg16-cifar", 81, 2_465_832, 1_995_204_286),
    ],
)
def test_nodes_peak_and_flops(name, nodes, peak_bytes, flops):
    """Budgets are fractions of these peaks; ResNet needs 7.89 J at the A72's 40.1 MFLOP/J."""
    graph = published.MODELS[name]()
    assert (graph.name, len(graph.nodes)) == (name, nodes)
    assert checkpoint_all_peak_bytes(graph) == peak_bytes
    assert flops in (None, graph.flops)
    assert len(published.bert(blocks=24).nodes) == 195 + 12 * 16


@pytest.mark.parametrize(
    ("name", "published_bytes"),
    [
        ("paper/vgg16", 2.57e7),
        ("paper/resnet18", 6.42e6),
        ("paper/resnet50", 6.97e6),
        ("paper/resnet18-cifar", 196_608),
    ],
)
def test_forward_floor_is_where_the_published_sweeps_start(name, published_bytes):
    """The published budget sweeps start at the largest forward working set, to three digits."""
    graph = published.MODELS[name]()
    largest = max(graph.step_bytes[k] for k in forward(graph))
    assert largest == pytest.approx(published_bytes, rel=1e-3)


def test_batch_scales_images_but_not_linear_layers():
    """The published rule of a linear layer forgets the batch, and so does the loss's shape."""
    one, four = published.vgg16_cifar(), published.vgg16_cifar(batch_size=4)
    assert four.batch_size == 4
    assert node(four, "conv3_1").flops == 4 * node(one, "conv3_1").flops
    assert node(four, "fc1").output_bytes == 4 * node(one, "fc1").output_bytes
    assert node(four, "fc1").flops == node(one, "fc1").flops
    assert node(four, "loss").output_bytes == node(one, "loss").output_bytes


@pytest.mark.parametrize(
    ("make", "size", "words"),
    [
        (published.bert, {"blocks": 0}, "a whole number from 1 to 1000000, got 0"),
        (published.vgg16, {"batch_size": True}, "a whole number from 1 to 1000000, got True"),
        (published.vgg16, {"image_size": 100}, "a multiple of 32, got 100"),
        (published.linear, {"batch_size": 1.5}, "a whole number from 1 to 1000000, got 1.5"),
    ],
)
def test_wrong_sizes_are_refused(make, size, words):
    """A size without a network is refused with the valid sizes."""
    with pytest.raises(GraphError, match=f"{next(iter(size))}: expected {words}"):
        make(**size)


def test_unknown_kinds_are_named():
    """An unknown kind, such as a setting in its place, is refused with a list of the kinds."""
    with pytest.raises(InputError, match=rf"no kind is called own=F.py:f; known are {MAIN[0]}, "):
        next(compared.runs((MAIN[0], "own=F.py:f")))
