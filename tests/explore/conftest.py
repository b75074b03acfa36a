"""An explorer inside this process, shared by the tests of one module."""

import socket
import threading
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("fastapi", "uvicorn", "httpx", "jinja2", "plotly"))):
    collect_ignore_glob = ["*.py"]


@pytest.fixture(scope="module")
def visitor(tmp_path_factory):
    """Return a visitor on an explorer with one process that solves and one that draws."""
    import httpx
    import uvicorn

    from kit.explorers import MLP, STEP, Visitor
    from kit.patience import PATIENCE_S, wait_until
    from poetmodel.explore.running import open_explorer
    from poetmodel.explore.settings import Catalogue
    from poetmodel.solver.request import SearchOptions

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    made = open_explorer(
        port=port,
        store=tmp_path_factory.mktemp("explore") / "store.sqlite",
        catalogue=Catalogue(steps={STEP.name: str(STEP)}),
        initial=MLP,
        search=SearchOptions(time_limit_s=20.0),
        workers=1,
    )
    server = uvicorn.Server(uvicorn.Config(made.app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    wait_until(lambda: server.started)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        client.get("/", params={"token": made.token})
        yield Visitor(client)
    server.should_exit = True
    thread.join()
    made.store.close()
