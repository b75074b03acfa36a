"""The worker processes of the explorer, where none can be started."""

import asyncio

import pytest

from poetmodel.explore import pool
from poetmodel.explore.pool import WorkerError


class DeadProcess:
    """A worker process that has died."""

    is_alive = False

    def end(self):
        """Do nothing."""


def test_requests_fail_where_no_process_can_be_started(monkeypatch):
    """The request that waits while the dead process is replaced fails, and so does a later one."""

    def refuse():
        raise OSError("no memory")

    monkeypatch.setattr(pool, "WorkerProcess", refuse)
    monkeypatch.setattr(pool, "MAX_STARTS", 1)

    async def request_twice():
        workers = pool.WorkerPool(1, 0, "{}")
        dead = DeadProcess()
        workers.workers, workers.free_workers = {dead}, [dead]
        with pytest.raises(WorkerError, match="no worker process could be started"):
            await asyncio.wait_for(workers.acquire(), 60)
        await asyncio.gather(*workers.recovery_tasks)
        with pytest.raises(WorkerError, match=r"could not be started \(no memory"):
            await asyncio.wait_for(workers.acquire(), 60)

    asyncio.run(request_twice())
