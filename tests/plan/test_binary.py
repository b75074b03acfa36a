"""Plans as bytes: small, read again identically, and never misread."""

from __future__ import annotations

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import poetmodel as pm
from kit.instances import seeded
from kit.plans import (
    FOLLOWS,
    HELD,
    STORED,
    altered,
    plan,
    random_plan,
    random_state_plan,
    state_step,
)
from kit.worked import skip_graph
from poetmodel.errors import PlanError
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import check_plan, decode, encode
from poetmodel.plan.binary import (
    HAS_BUDGET,
    HAS_DEVICE,
    LITERAL,
    MAGIC,
    MEMORY_MAPPED,
    is_coded,
)
from poetmodel.planner import make_plan
from poetmodel.schedule import GraphIdentity

FLAGS = len(MAGIC) + 1


def sealed(content: bytes) -> bytes:
    """Return content with a checksum that fits."""
    return content + zlib.crc32(content).to_bytes(4, "little")


def test_bytes_are_as_the_page_says() -> None:
    """The example of ``docs/concepts/plans.md``, byte by byte."""
    graph = skip_graph()
    data = encode(graph, plan(FOLLOWS, ram_budget_bytes=300, device="m4"))
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


def test_homes_are_stored_as_bits() -> None:
    """State on storage, with its first reads as page-ins; resident state takes its bit alone."""
    graph = state_step()
    data = encode(graph, plan(STORED, "blocking", resident=()))
    records = (6, 2, 6, 0, 1, 4, 12, 0)  # read w, page w in, read v, page out what u made
    head = MAGIC + bytes([2, 0]) + bytes.fromhex(graph.sha256)[:8]
    assert data == sealed(head + bytes([9, 0b00, *records]))
    kept = plan(HELD, "blocking", resident=(1, 3))
    assert encode(graph, kept) == sealed(head + bytes([1, 0b11]))
    mapped = plan(f"{HELD} o5 f5", "blocking", resident=(3,), memory_mapped=True)
    coded = encode(graph, mapped)
    assert coded[FLAGS] == MEMORY_MAPPED
    assert coded[len(MAGIC) + 11] == 0b10
    for case in (kept, mapped):
        assert decode(graph, encode(graph, case)) == case


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_plans_with_state_come_back(mode: str) -> None:
    """Plans of the planner without their frees, other valid programs in the literal form."""
    literal = 0
    for seed in range(60):
        rng = seeded(f"binary/state/{mode}/{seed}")
        graph, _, made = random_state_plan(rng, mode)
        data = encode(graph, made)
        assert mode == "blocking" or not data[FLAGS] & LITERAL
        assert decode(graph, data) == made
        for _ in range(6):
            case = altered(rng, graph, made)
            if check_plan(graph, None, case).valid:
                data = encode(graph, case)
                assert decode(graph, data) == case
                literal += bool(data[FLAGS] & LITERAL)
    assert literal > 20


def test_homes_that_are_cut_off_or_false_are_told() -> None:
    """A body without its bits, and a plan that calls something resident that is no state."""
    graph = state_step()
    head = MAGIC + bytes([2, 0]) + bytes.fromhex(graph.sha256)[:8]
    with pytest.raises(PlanError, match="ends before the homes of state"):
        decode(graph, sealed(head + bytes([0])))
    with pytest.raises(PlanError, match="lists tensors as resident that are no state"):
        encode(graph, plan(HELD, "blocking", resident=(0, 1, 3)))


def test_recomputations_in_a_row_are_expected() -> None:
    """After three first computations a and b again: both are the expected index."""
    data = encode(skip_graph(), plan("c0 c1 f0 c2 f1 c0 c1 f1 c3 f0 f2 f3"))
    assert data[len(MAGIC) + 10 : -4] == bytes([4, 3 * 5, 0, 0, 0])


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_planned_programs_come_back(mode: str) -> None:
    """Every plan of the planner comes back identical, with the graph that it is for."""
    for seed in range(100):
        graph, _, made = random_plan(seeded(f"binary/{mode}/{seed}"), mode)
        data = encode(graph, made)
        # A blocking plan keeps what its schedule keeps, also where that is of no use.
        assert mode == "blocking" or not data[FLAGS] & LITERAL
        back = decode(graph, data)
        assert back == made
        assert back.identity == GraphIdentity.of(graph)


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_every_valid_program_comes_back(mode: str) -> None:
    """Programs that wait or free elsewhere come back too, in the literal form."""
    literal = 0
    for seed in range(50):
        rng = seeded(f"literal/{mode}/{seed}")
        graph, _, made = random_plan(rng, mode)
        for _ in range(8):
            case = altered(rng, graph, made)
            if check_plan(graph, None, case).valid:
                data = encode(graph, case)
                assert decode(graph, data) == case
                literal += bool(data[FLAGS] & LITERAL)
    assert literal > 20


@given(
    budget=st.none() | st.integers(min_value=0, max_value=2**53),
    device=st.none() | st.text(max_size=40),
    mode=st.sampled_from(["blocking", "dma"]),
)
def test_budget_device_and_mode_come_back(
    budget: int | None, device: str | None, mode: str
) -> None:
    """Any budget and any name."""
    made = plan("c0 c1 c2 f1 c3 f0 f2 f3", mode, ram_budget_bytes=budget, device=device)
    assert decode(skip_graph(), encode(skip_graph(), made)) == made


def test_any_cut_is_noticed() -> None:
    """Bytes that lack something at the end or have more there are refused."""
    graph = skip_graph()
    data = encode(graph, plan(FOLLOWS))
    for length in range(len(data)):
        with pytest.raises(PlanError, match=r"cut off|expected a coded plan"):
            decode(graph, data[:length])
    with pytest.raises(PlanError, match="altered"):
        decode(graph, data + b"\0")


def test_any_flipped_bit_is_noticed() -> None:
    """One wrong bit anywhere is refused."""
    graph = skip_graph()
    data = encode(graph, plan(FOLLOWS))
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PlanError):
            decode(graph, bytes(wrong))


@given(st.binary(max_size=60))
def test_no_bytes_bring_the_reader_down(body: bytes) -> None:
    """Whatever is sealed with a good checksum is either a plan or refused with a reason."""
    graph = skip_graph()
    head = MAGIC + bytes([1, 3]) + bytes.fromhex(graph.sha256)[:8]
    with suppress(PlanError):
        assert decode(graph, sealed(head + bytes([len(body)]) + body)).program


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (4, 3, "has version 3; this poetmodel reads versions 1 and 2"),
        (5, 16, "unknown flags: 0x10"),
        (5, 0x80, "unknown flags: 0x80"),
        (14, 5, "says that 5 bytes follow, and 4 do"),
        (15, 5 * 5, "more first computations than the graph has nodes"),
        (16, 40, "the index 20 in page_out, which the graph lacks"),
        (18, 0x80, "in the middle of a number"),
    ],
)
def test_sealed_nonsense_is_told(place: int, value: int, words: str) -> None:
    """What has a good checksum and makes no sense is refused with its reason."""
    data = bytearray(encode(skip_graph(), plan(FOLLOWS))[:-4])
    data[place] = value
    with pytest.raises(PlanError, match=words):
        decode(skip_graph(), sealed(bytes(data)))


def test_other_bytes_are_told_apart() -> None:
    """No JSON text is taken for a coded plan."""
    assert is_coded(encode(skip_graph(), plan(FOLLOWS)))
    assert not is_coded(b'{"format": "poetmodel-plan"}')
    with pytest.raises(PlanError, match="expected a coded plan, which begins with 89504c4e"):
        decode(skip_graph(), b'{"format": 1}')


def test_plan_of_another_graph_is_refused() -> None:
    """The fingerprint of the graph must fit, when coding and when decoding."""
    data = encode(skip_graph(), plan(FOLLOWS))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        decode(skip_graph(mask=True), data)
    made = plan(FOLLOWS, identity=GraphIdentity.of(skip_graph(mask=True)))
    with pytest.raises(PlanError, match="give the graph it was made for"):
        encode(skip_graph(), made)


@pytest.mark.parametrize(
    ("text", "words"),
    [("c0 c1 c2 f1", "does not compute every node"), ("c0 c7", "instruction 1, compute 7")],
)
def test_what_is_no_plan_is_not_coded(text: str, words: str) -> None:
    """A program that leaves nodes out, or names others, is refused."""
    with pytest.raises(PlanError, match=words):
        encode(skip_graph(), plan(text))


def test_size_is_that_of_what_cannot_be_derived() -> None:
    """Two bytes a recomputation or transfer, 19 for everything else."""
    plain = plan("c0 c1 c2 f1 c3 f0 f2 f3")
    assert len(encode(skip_graph(), plain)) == 19
    assert len(encode(skip_graph(), plan(FOLLOWS))) == 19 + 2 * 2
    kept = plan("c0 c1 c2 f1 c3 f0 f2")
    assert len(encode(skip_graph(), kept)) == 19 + 3 * 2


@pytest.mark.parametrize(
    ("model", "ram", "most_bytes"),
    [
        ("paper/vgg16-cifar", "50%", 300),
        ("paper/resnet18-cifar", "30%", 300),
        pytest.param("paper/bert", "30%", 600, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_shipped_networks_take_a_few_hundred_bytes(
    model: str, ram: str, most_bytes: int, mode: str
) -> None:
    """At the least budgets of the page's table."""
    graph = load_model(model)
    problem = pm.Problem(graph, pm.Costs.estimate(graph, pm.Device.load("paper-a72")), ram=ram)
    schedule = pm.solve(problem, gap=0.01).require_schedule()
    made = make_plan(
        graph, problem.costs, schedule, mode=mode, ram_budget_bytes=problem.usable_ram_bytes
    )
    data = encode(graph, made)
    assert len(data) < most_bytes
    assert decode(graph, data) == made
