"""Plans as bytes: small, read again identically, and never misread."""

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import poetmodel as pm
from kit.instances import make_rng
from kit.plans import (
    HELD,
    PAGED_AND_FREED,
    STORED,
    alter_plan,
    parse_plan,
    random_plan,
    random_state_plan,
    state_step,
)
from kit.worked import skip_graph
from poetmodel.errors import PlanError
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import Plan, check_plan, decode, encode
from poetmodel.plan.binary import (
    HAS_BUDGET,
    HAS_DEVICE,
    LITERAL,
    MAGIC,
    MEMORY_MAPPED,
    is_binary,
)
from poetmodel.planner import make_plan
from poetmodel.schedule import GraphIdentity

FLAGS = len(MAGIC) + 1


def sealed(content):
    """Return content with a checksum that fits."""
    return content + zlib.crc32(content).to_bytes(4, "little")


def test_bytes_are_as_the_page_says():
    """The example of ``docs/reference/formats.md``, byte by byte."""
    graph = skip_graph()
    data = encode(parse_plan(PAGED_AND_FREED, ram_budget_bytes=300, device="m4"), graph)
    body = bytes(
        [
            *(0xAC, 0x02),  # budget 300
            *(2, ord("m"), ord("4")),  # device
            *(1 * 5 + 2, 0),  # after c0: page out the tensor just made
            *(2 * 5 + 1, 0),  # after c1 and c2: page in the tensor with number 0 more than 0
        ]
    )
    head = MAGIC + bytes([1, 1 | HAS_BUDGET | HAS_DEVICE]) + bytes.fromhex(graph.sha256)[:8]
    assert data == sealed(head + bytes([len(body)]) + body)


def test_homes_are_stored_as_bits():
    """State on storage has first reads as page-ins; resident state has only its bit."""
    graph = state_step()
    data = encode(parse_plan(STORED, "blocking", resident=()), graph)
    records = (6, 2, 6, 0, 1, 4, 12, 0)  # read w, page w in, read v, page out what u made
    head = MAGIC + bytes([2, 0]) + bytes.fromhex(graph.sha256)[:8]
    assert data == sealed(head + bytes([9, 0b00, *records]))
    kept = parse_plan(HELD, "blocking", resident=(1, 3))
    assert encode(kept, graph) == sealed(head + bytes([1, 0b11]))
    mapped = parse_plan(f"{HELD} o5 f5", "blocking", resident=(3,), memory_mapped=True)
    coded = encode(mapped, graph)
    assert coded[FLAGS] == MEMORY_MAPPED
    assert coded[len(MAGIC) + 11] == 0b10
    for case in (kept, mapped):
        assert decode(encode(case, graph), graph) == case


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_plans_with_state_come_back(mode):
    """Plans of the planner without their frees, other valid programs in the literal form."""
    literal = 0
    for seed in range(60):
        rng = make_rng(f"binary/state/{mode}/{seed}")
        graph, _, made = random_state_plan(rng, mode)
        data = encode(made, graph)
        assert mode == "blocking" or not data[FLAGS] & LITERAL
        assert decode(data, graph) == made
        for _ in range(6):
            case = alter_plan(rng, graph, made)
            if check_plan(graph, None, case).valid:
                data = encode(case, graph)
                assert decode(data, graph) == case
                literal += bool(data[FLAGS] & LITERAL)
    assert literal > 20


def test_homes_that_are_cut_off_or_false_are_told():
    """A body without its bits, and a plan that calls something resident that is no state."""
    graph = state_step()
    head = MAGIC + bytes([2, 0]) + bytes.fromhex(graph.sha256)[:8]
    with pytest.raises(PlanError, match="ends before the homes of state"):
        decode(sealed(head + bytes([0])), graph)
    with pytest.raises(PlanError, match="lists resident tensors that are not state"):
        encode(parse_plan(HELD, "blocking", resident=(0, 1, 3)), graph)


def test_recomputations_in_a_row_are_expected():
    """After three first computations a and b again: both are the expected index."""
    data = encode(parse_plan("c0 c1 f0 c2 f1 c0 c1 f1 c3 f0 f2 f3"), skip_graph())
    assert data[len(MAGIC) + 10 : -4] == bytes([4, 3 * 5, 0, 0, 0])


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_planned_programs_come_back(mode):
    """Each plan of the planner is read back identically, with its graph."""
    for seed in range(100):
        graph, _, made = random_plan(make_rng(f"binary/{mode}/{seed}"), mode)
        data = encode(made, graph)
        # A blocking plan keeps what its schedule keeps, also where that is of no use.
        assert mode == "blocking" or not data[FLAGS] & LITERAL
        back = decode(data, graph)
        assert back == made
        assert back.identity == GraphIdentity.from_graph(graph)


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_every_valid_program_comes_back(mode):
    """Programs with other waits or frees are read back, too, in the literal form."""
    literal = 0
    for seed in range(50):
        rng = make_rng(f"literal/{mode}/{seed}")
        graph, _, made = random_plan(rng, mode)
        for _ in range(8):
            case = alter_plan(rng, graph, made)
            if check_plan(graph, None, case).valid:
                data = encode(case, graph)
                assert decode(data, graph) == case
                literal += bool(data[FLAGS] & LITERAL)
    assert literal > 20


@given(
    budget=st.none() | st.integers(min_value=0, max_value=2**53),
    device=st.none() | st.text(max_size=40),
    mode=st.sampled_from(["blocking", "dma"]),
)
def test_budget_device_and_mode_come_back(budget, device, mode):
    """Any budget and any name."""
    made = parse_plan("c0 c1 c2 f1 c3 f0 f2 f3", mode, ram_budget_bytes=budget, device=device)
    assert decode(encode(made, skip_graph()), skip_graph()) == made


def test_any_cut_is_noticed():
    """Bytes that lack something at the end or have more there are refused."""
    graph = skip_graph()
    data = encode(parse_plan(PAGED_AND_FREED), graph)
    for length in range(len(data)):
        with pytest.raises(PlanError, match=r"cut off|expected a binary plan"):
            decode(data[:length], graph)
    with pytest.raises(PlanError, match="altered"):
        decode(data + b"\0", graph)


def test_any_flipped_bit_is_noticed():
    """One wrong bit anywhere is refused."""
    graph = skip_graph()
    data = encode(parse_plan(PAGED_AND_FREED), graph)
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PlanError):
            decode(bytes(wrong), graph)


@given(st.binary(max_size=60))
def test_no_bytes_bring_the_reader_down(body):
    """Whatever is sealed with a good checksum is either a plan or refused with a reason."""
    graph = skip_graph()
    head = MAGIC + bytes([1, 3]) + bytes.fromhex(graph.sha256)[:8]
    with suppress(PlanError):
        assert decode(sealed(head + bytes([len(body)]) + body), graph).program


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (4, 3, "has version 3; this poetmodel reads versions 1 and 2"),
        (5, 16, "unknown flags: 0x10"),
        (5, 0x80, "unknown flags: 0x80"),
        (14, 5, "states a body of 5 bytes, and 4 follow"),
        (15, 5 * 5, "more first computations than the graph has nodes"),
        (16, 40, "the index 20 in page_out, which the graph lacks"),
        (18, 0x80, "in the middle of a number"),
    ],
)
def test_sealed_nonsense_is_told(place, value, words):
    """Invalid content with a correct checksum is refused with its reason."""
    data = bytearray(encode(parse_plan(PAGED_AND_FREED), skip_graph())[:-4])
    data[place] = value
    with pytest.raises(PlanError, match=words):
        decode(sealed(bytes(data)), skip_graph())


def test_other_bytes_are_told_apart():
    """No JSON text is read as a binary plan."""
    assert is_binary(encode(parse_plan(PAGED_AND_FREED), skip_graph()))
    assert not is_binary(b'{"format": "poetmodel-plan"}')
    with pytest.raises(PlanError, match="expected a binary plan, which begins with 89504c4e"):
        decode(b'{"format": 1}', skip_graph())


def test_plan_of_another_graph_is_refused():
    """The fingerprint of the graph must fit, when coding and when decoding."""
    data = encode(parse_plan(PAGED_AND_FREED), skip_graph())
    with pytest.raises(PlanError, match="give the graph it was made for"):
        decode(data, skip_graph(mask=True))
    made = parse_plan(PAGED_AND_FREED, identity=GraphIdentity.from_graph(skip_graph(mask=True)))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        encode(made, skip_graph())


@pytest.mark.parametrize(
    ("text", "words"),
    [("c0 c1 c2 f1", "does not compute every node"), ("c0 c7", "instruction 1, compute 7")],
)
def test_what_is_no_plan_is_not_coded(text, words):
    """A program that leaves nodes out, or names others, is refused."""
    with pytest.raises(PlanError, match=words):
        encode(parse_plan(text), skip_graph())


def test_size_is_that_of_what_cannot_be_derived():
    """Two bytes a recomputation or transfer, 19 for everything else."""
    plain = parse_plan("c0 c1 c2 f1 c3 f0 f2 f3")
    assert len(encode(plain, skip_graph())) == 19
    assert len(encode(parse_plan(PAGED_AND_FREED), skip_graph())) == 19 + 2 * 2
    kept = parse_plan("c0 c1 c2 f1 c3 f0 f2")
    assert len(encode(kept, skip_graph())) == 19 + 3 * 2


@pytest.mark.parametrize(
    ("model", "ram", "max_bytes"),
    [
        ("paper/vgg16-cifar", "50%", 100),
        ("paper/resnet18-cifar", "40%", 150),
        pytest.param("paper/bert", "40%", 250, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_networks_of_the_paper_take_a_few_hundred_bytes(model, ram, max_bytes, mode, tmp_path):
    """The bytes are read back as the same plan, also through a file and without the graph."""
    graph = load_model(model)
    problem = pm.Problem(graph, pm.Costs.estimate(graph, pm.Device.load("paper-a72")), ram=ram)
    schedule = pm.solve(problem, gap=0.01, time_limit=30).require_schedule()
    made = make_plan(
        graph, problem.costs, schedule, mode=mode, ram_budget_bytes=problem.ram_budget_bytes
    )
    data = encode(made)
    assert len(data) <= max_bytes
    assert decode(data, graph) == made
    made.save(tmp_path / "p.plan.json")
    assert encode(Plan.load(tmp_path / "p.plan.json")) == data


def test_plan_without_its_graph_needs_it(tmp_path):
    """A plan from a file, of a graph that is not built in, needs the graph as an argument."""
    graph, _, made = random_plan(make_rng("binary/file"), "dma")
    made.save(tmp_path / "p.plan.json")
    loaded = Plan.load(tmp_path / "p.plan.json")
    with pytest.raises(PlanError, match=r"encode\(plan, graph\)"):
        encode(loaded)
    assert encode(loaded, graph) == encode(made)


def test_commits_come_back():
    """The number of steps between commits is stored where the plan has one."""
    graph = state_step()
    made = parse_plan(STORED, "blocking", resident=(), commit=300)
    assert decode(encode(made, graph), graph) == made
