"""Requests of a page to the explorer, its replies, and refusals."""

import json
import shlex
import signal
import socket

import httpx
import pytest

from kit.explorers import MLP, STEP
from kit.rotation import mark_seeds_except
from poetmodel.cli.application import app as command_line
from poetmodel.device import Costs, Device
from poetmodel.errors import WorkersLostError
from poetmodel.explore.running import serve
from poetmodel.explore.settings import Catalogue
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.schedule.document import load_document
from poetmodel.solver import solve
from poetmodel.solver.request import SearchOptions


def solved(visitor, share=0.3, **more):
    """Return a point of the small network once it is over."""
    return visitor.wait_for_end(visitor.request_point(visitor.open(MLP), share, **more)["id"])


def test_choices_name_networks_and_devices(visitor):
    """All built-in networks and devices are listed, and the command line's are selected.

    Minimum RAM and keep-all peak of the problem are marks of its sliders; charts get the graph.
    """
    found = visitor.client.get("/api/choices").json()
    assert {"name": "mlp", "group": "network"} in found["models"]
    assert {"name": "mkr1000", "ram_bytes": 32768} in found["devices"]
    assert found["initial"] == MLP
    found = visitor.open(MLP)
    assert (found["floor_bytes"], found["keep_all_bytes"]) == (4336, 6736)
    assert found["deadline"]["min_s"] < found["deadline"]["max_s"]
    assert len(found["graph"]["nodes"]) > 5
    assert visitor.open(MLP)["problem"] == found["problem"]
    assert visitor.open({**MLP, "batch": 2})["problem"] != found["problem"]


@pytest.fixture
def restored_signals():
    """Restore the handlers of the signals that end a server, which replaces them for good."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_signals")
def test_server_whose_workers_do_not_start_is_an_error(tmp_path, monkeypatch):
    """The command then ends with an error instead of success."""

    async def start(_):
        raise OSError("no processes left")

    monkeypatch.setattr("poetmodel.explore.pool.WorkerPool.start", start)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(WorkersLostError):
        serve(
            listener,
            store=tmp_path / "store.sqlite",
            catalogue=Catalogue(steps={}),
            initial=MLP,
            search=SearchOptions(),
            workers=1,
        )


def test_point_is_solved_to_the_optimum(visitor):
    """Its figures are those of `poetmodel.solve`, and its gap is closed.

    An answer has the charts of the page, decisions and words, and is the same for ever; instead
    of a revision that is over the newest one is named.
    """
    point = solved(visitor)
    assert (point["state"], point["status"]) == ("done", "optimal")
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("mkr1000"))
    direct = solve(Problem(graph, costs, ram=point["ram_bytes"]))
    assert point["energy_j"] == pytest.approx(direct.energy_j)
    assert point["peak_ram_bytes"] <= point["ram_bytes"]
    assert point["gap"] <= 1e-4
    again = visitor.request_point(visitor.open(MLP), 0.3)  # a known point: answered at once
    assert again == visitor.point(point["id"])
    point = solved(visitor)
    path = f"/api/points/{point['id']}/answer?revision={point['revision']}"
    reply = visitor.client.get(path)
    found = reply.json()
    assert found["charts"].keys() == {"timeline", "map", "gauge", "decisions"}
    assert found["facts"]["energy_j"] == pytest.approx(point["energy_j"])
    assert found["facts"]["valid"]
    assert len(found["answers"]) == 3
    known = {"If-None-Match": reply.headers["etag"]}
    assert visitor.client.get(path, headers=known).status_code == 304
    assert visitor.client.get(path).content == reply.content
    point = solved(visitor)
    path = f"/api/points/{point['id']}/answer?revision="
    reply = visitor.client.get(f"{path}99")
    assert reply.status_code == 307
    assert reply.headers["location"] == f"{path}{point['revision']}"


def test_neighbour_answers_at_once(visitor):
    """A schedule of less RAM is valid with more: it is there before anything was solved."""
    problem = visitor.open({**MLP, "batch": 3})
    tight = visitor.wait_for_end(visitor.request_point(problem, 0.0)["id"])
    begun = visitor.request_point(problem, 0.01)
    assert begun["revision"] == 1
    assert begun["energy_j"] == pytest.approx(tight["energy_j"])
    assert begun["neighbour_bytes"] == tight["ram_bytes"]
    ended = visitor.wait_for_end(begun["id"])
    assert ended["value"] <= tight["value"]
    assert not ended["provisional"]


def test_makespan_of_more_ram_is_not_lent_to_less(visitor):
    """In less RAM page-ins begin later: a figure that is shown is that of the plan at its RAM."""
    problem = visitor.open(
        {"model": "mlp", "device": "jetson-tx2", "minimize": "time", "recompute": False}
    )
    roomy = visitor.wait_for_end(visitor.request_point(problem, 0.8)["id"])
    assert roomy["needs_bytes"] < roomy["ram_bytes"]
    tight = visitor.wait_for_end(visitor.request_point(problem, 0.05)["id"])
    assert tight["needs_bytes"] <= roomy["needs_bytes"]
    assert tight["makespan_s"] > roomy["makespan_s"]
    told = visitor.answer(tight["id"])["facts"]
    assert told["makespan_s"] == tight["makespan_s"]


def test_bound_of_more_ram_holds_for_less(visitor):
    """If the bound equals the value of a neighbour's schedule, no solve is needed."""
    problem = visitor.open({**MLP, "batch": 5})
    low, high = (
        visitor.wait_for_end(visitor.request_point(problem, share)["id"]) for share in (0.5, 0.6)
    )
    between = visitor.request_point(problem, 0.55)
    assert low["value"] >= high["value"]
    if low["value"] == high["value"]:
        assert (between["state"], between["status"]) == ("done", "optimal")
    assert between["bound"] >= high["bound"] * (1 - 1e-9)
    assert visitor.wait_for_end(between["id"])["status"] == "optimal"


def test_less_than_the_minimum_is_infeasible_and_says_why(visitor):
    """The node of the largest working set and its tensors are listed, and their bytes sum up."""
    problem = visitor.open(MLP)
    point = visitor.wait_for_end(visitor.request_point(problem, -0.5)["id"])
    assert (point["state"], point["status"], point["revision"] > 0) == ("done", "infeasible", True)
    assert "the minimum RAM is 4,336 B" in point["reason"]
    path = f"/api/problems/{problem['problem']}/why"
    why = visitor.client.get(path, params={"ram_bytes": point["ram_bytes"]}).json()
    assert (why["node"], why["min_ram_bytes"]) == ("fc1", 4336)
    assert why["missing_bytes"] == 4336 - point["ram_bytes"]
    held = sum(one["bytes"] for one in why["tensors_in_ram"])
    assert held + why["workspace_bytes"] - why["shared_bytes"] == why["min_ram_bytes"]
    late = visitor.client.get(path, params={"ram_bytes": 9999, "deadline_s": 1e-6}).json()
    assert "a single pass over all nodes" in late["text"]
    assert visitor.client.get(f"/api/points/{point['id']}/answer").status_code == 204


def test_deadline_is_kept(visitor):
    """A tight one forces another schedule, and its time is within it."""
    problem = visitor.open(MLP)
    loose = solved(visitor)
    deadline_s = (problem["deadline"]["min_s"] + loose["time_s"]) / 2
    tight = visitor.wait_for_end(visitor.request_point(problem, 0.3, deadline_s=deadline_s)["id"])
    assert tight["status"] in ("optimal", "infeasible")
    if tight["value"] is not None:
        assert tight["time_s"] <= deadline_s
        assert tight["value"] >= loose["value"] * (1 - 1e-9)


def test_exported_schedule_and_plan_are_valid_files(visitor, tmp_path):
    """The verifier accepts the schedule under the problem that it states, and its figures."""
    point = solved(visitor)
    path = f"/api/points/{point['id']}/export"
    reply = visitor.client.get(f"{path}/schedule")
    assert 'filename="mlp.schedule.json"' in reply.headers["content-disposition"]
    (tmp_path / "mlp.schedule.json").write_bytes(reply.content)
    (tmp_path / "mlp.plan.json").write_bytes(visitor.client.get(f"{path}/plan").content)
    for name in ("mlp.schedule.json", "mlp.plan.json"):
        assert run("verify", str(tmp_path / name), "--graph", "mlp", "--device", "mkr1000") == 0
    document = load_document(tmp_path / "mlp.schedule.json")
    assert document.stated_metrics["energy_j"] == point["energy_j"]
    assert document.status == "optimal"
    page = visitor.client.get(f"{path}/report")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>mlp on " in page.text
    assert '<section id="addresses">' in page.text


def command_of(visitor, point):
    """Return the lines that reproduce a point."""
    reply = visitor.client.get(f"/api/points/{point['id']}/export/command")
    assert reply.status_code == 200, reply.text
    return reply.text


def run(*words):
    """Return the exit status of a command."""
    with pytest.raises(SystemExit) as end:
        command_line(list(words))
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    "more",
    mark_seeds_except(
        [{}, {"minimize": "time"}, {"recompute": False, "in_place": True}, {"state": "sgd"}],
        [{}, {"recompute": False, "in_place": True}],
    ),
    ids=["energy", "time", "no-recompute", "state"],
)
def test_command_reproduces_the_point(visitor, more, tmp_path, monkeypatch):
    """The lines, run as they are, end with a schedule of the same value, proven."""
    problem = visitor.open({**MLP, "batch": 2, **more})
    pass_s = problem["deadline"]["single_pass_s"]
    point = visitor.wait_for_end(visitor.request_point(problem, 0.4, deadline_s=1.5 * pass_s)["id"])
    assert point["status"] == "optimal"
    text = command_of(visitor, point)
    monkeypatch.chdir(tmp_path)
    for line in text.splitlines():
        program, *words = shlex.split(line)
        assert program == "poetmodel"
        assert run(*words) == 0
    document = load_document(next(tmp_path.glob("*.schedule.json")))
    assert document.problem.ram_budget_bytes == point["ram_bytes"]
    assert document.problem.deadline_s == point["deadline_s"]
    assert document.stated_metrics["energy_j"] == pytest.approx(point["energy_j"], rel=1e-6)


@pytest.mark.slow
def test_command_of_a_step_file_makes_its_c(visitor, tmp_path, monkeypatch):
    """The tensors of the folder have no more RAM than the point."""
    problem = visitor.open({"model": STEP.name, "device": "nrf52840"})
    point = visitor.wait_for_end(visitor.request_point(problem, 0.6)["id"])
    line = command_of(visitor, point)
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(line)[1:]) == 0
    (made,) = tmp_path.glob("*/manifest.json")
    stated = json.loads(made.read_text(encoding="utf-8"))
    assert stated["arena"]["bytes"] <= stated["budget"]["arena_bytes"] <= point["ram_bytes"]


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"model": "/etc/passwd", "device": "mkr1000"}, "expected a listed model"),
        ({"model": "mlp", "device": "../mkr1000.toml"}, "expected a listed device"),
        ({"model": "mlp", "device": "mkr1000", "sequence": 64}, "only accepts --batch and --image"),
        ({"model": "paper/linear", "device": "mkr1000", "batch": 2}, "graphs are fixed"),
    ],
)
def test_choice_that_cannot_be_is_a_sentence(visitor, choice, sentence):
    """Only files in the catalogue are read, never a path in a request."""
    reply = visitor.client.post("/api/problems", json=choice)
    assert reply.status_code == 409
    assert sentence in reply.json()["detail"]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/api/problems", {"model": "mlp"}),
        ("/api/problems", {"model": "mlp", "device": "mkr1000", "batch": -1}),
        ("/api/problems", {"model": "mlp", "device": "mkr1000", "other": 1}),
        ("/api/problems", {"model": "x" * 500, "device": "mkr1000"}),
        ("/api/points", {"problem": "p", "ram_bytes": 0, "session": "s"}),
        ("/api/points", {"problem": "p", "ram_bytes": 1.5, "session": "s"}),
        ("/api/points", {"problem": "p", "ram_bytes": 9, "session": "a b"}),
        ("/api/points", {"problem": "p", "ram_bytes": 9, "session": "s", "deadline_s": -1}),
    ],
)
def test_request_that_makes_no_sense_is_refused(visitor, path, given):
    """The sentence names the field."""
    reply = visitor.client.post(path, json=given)
    assert reply.status_code == 422
    assert isinstance(reply.json()["detail"], str)


def test_what_is_not_known_is_gone(visitor):
    """A page that is older than its server is asked to choose again."""
    for reply in (
        visitor.client.get("/api/points/none"),
        visitor.client.get("/api/problems/none/why?ram_bytes=5"),
        visitor.client.post("/api/points", json={"problem": "no", "ram_bytes": 9, "session": "s"}),
    ):
        assert reply.status_code == 410
        assert "choose model and device again" in reply.json()["detail"]
    assert visitor.client.get("/nowhere").status_code == 404
    other = visitor.client.put("/api/choices")
    assert (other.status_code, other.headers["allow"]) == (405, "GET")
    assert "accepts GET" in other.json()["detail"]


@pytest.mark.parametrize("batch", [7, 9])
def test_first_schedule_is_valid(visitor, batch, tmp_path):
    """A schedule without a proof is within all limits, too."""
    problem = visitor.open({**MLP, "batch": batch})
    point = visitor.wait_for_schedule(visitor.request_point(problem, 0.2)["id"])
    path = tmp_path / "first.schedule.json"
    path.write_bytes(visitor.client.get(f"/api/points/{point['id']}/export/schedule").content)
    assert run("verify", str(path), "--graph", "mlp", "--batch", str(batch)) == 0


# -- who it talks to ---------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/", "/api/choices", "/api/events?session=s", "/?token=wrong"])
def test_nothing_is_told_without_the_token(visitor, path):
    """The refusal names the address to open."""
    with httpx.Client(base_url=visitor.client.base_url) as client:
        reply = client.get(path)
    assert reply.status_code == 403
    assert "open the address" in reply.json()["detail"]


def test_token_goes_into_a_cookie_and_out_of_the_address(visitor):
    """Scripts cannot read the cookie, and other sites cannot send it.

    Replies may not be framed, sniffed or stored, by their headers.
    """
    token = next(iter(visitor.client.cookies.values()))
    with httpx.Client(base_url=visitor.client.base_url) as client:
        reply = client.get("/", params={"token": token})
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert client.get("/").status_code == 200
    for path in ("/", "/api/choices", "/nowhere"):
        headers = visitor.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example:{port}"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=lambda headers: " ".join(map(str, *headers.items())),
)
def test_other_names_and_other_pages_are_refused(visitor, headers):
    """Neither a name that resolves to this machine nor a page of another port will do."""
    port = str(visitor.client.base_url.port)
    given = {name: text.replace("{port}", port) for name, text in headers.items()}
    reply = visitor.client.get("/api/choices", headers=given)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers


def test_own_page_is_answered_and_large_bodies_are_refused(visitor):
    """By each name that this machine has in an address bar.

    Large bodies are refused, with a length that is stated, and in pieces without one.
    """
    port = visitor.client.base_url.port
    for name in ("127.0.0.1", "localhost", "[::1]"):
        host = f"{name}:{port}"
        given = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert visitor.client.get("/api/choices", headers=given).status_code == 200
    reply = visitor.client.post("/api/problems", content=b"x" * 100_000)
    assert reply.status_code == 413
    pieces = (b"x" * 1000 for _ in range(100))
    with pytest.raises(httpx.HTTPError):  # the server hangs up, or answers with an error
        visitor.client.post("/api/problems", content=pieces).raise_for_status()
    assert visitor.client.get("/api/choices").status_code == 200
