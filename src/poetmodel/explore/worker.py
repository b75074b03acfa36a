"""A worker process: reads jobs from its input, one at a time, and writes replies to its output.

The server starts it as ``python -m poetmodel.explore.worker``. It ends when its input ends, so that
none outlives the server, however that died.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import PoetModelError
from poetmodel.explore.choice import Catalogue
from poetmodel.explore.frames import Frame, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from poetmodel.explore.tasks import Talk

    Tasks = Mapping[str, Callable[[dict[str, Any], Talk], Frame]]

OUTPUT: Final = 1
"""The file descriptor of the standard output."""
PATIENCE_S: Final = 0.2
"""How long a job that nobody wants may take to hear of it, before it is interrupted [s]."""


@dataclass(slots=True)
class Server:
    """The server as a worker sees it: jobs come from it, and frames go to it."""

    source: BinaryIO
    target: BinaryIO
    jobs: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)
    outbox: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)
    dropped: set[int] = field(default_factory=set)
    """Jobs that nobody wants any more."""
    doing: int | None = None
    """The job that is being done."""

    def listen(self) -> None:
        """Take what comes until the server is gone; whatever is done then, nobody waits for it."""
        while (frame := read_frame(self.source)) is not None:
            number = frame.values.get("cancel")
            if number is None:
                self.jobs.put(frame)
            else:
                self.dropped.add(number)
                threading.Timer(PATIENCE_S, self.interrupt, (number,)).start()
        os._exit(0)

    def speak(self) -> None:
        """Write what is to be said: the main thread may be interrupted, this one is not."""
        while True:
            self.target.write(self.outbox.get().encode())
            self.target.flush()

    def interrupt(self, number: int) -> None:
        """Interrupt a job that goes on, as Ctrl-C would."""
        main = threading.main_thread().ident
        if self.doing == number and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def on_signal(self, *_: object) -> None:
        """End the job if nobody wants it."""
        if self.doing in self.dropped:
            raise KeyboardInterrupt

    def do(self, tasks: Tasks, frame: Frame, catalogue: Catalogue) -> Frame:
        """Return the reply to a job."""
        from poetmodel.explore.tasks import Talk

        number = self.doing = frame.values["job"]

        def tell(told: Frame) -> None:
            self.outbox.put(Frame(values={"job": number, "told": told.values}, body=told.body))

        def cancelled() -> bool:
            return number in self.dropped

        try:
            talk = Talk(catalogue=catalogue, tell=tell, cancelled=cancelled, body=frame.body)
            return _reply(tasks, frame, talk)
        except KeyboardInterrupt:
            return Frame(values={"job": number, "refused": "nobody wants it any more"})
        finally:
            self.doing = None
            self.dropped.discard(number)


def _reply(tasks: Tasks, frame: Frame, talk: Talk) -> Frame:
    number = frame.values["job"]
    try:
        made = tasks[frame.values["task"]](frame.values, talk)
    except PoetModelError as error:
        return Frame(values={"job": number, "refused": "; ".join(str(error).splitlines())})
    except MemoryError:
        return Frame(values={"job": number, "failed": "there is not enough memory for it"})
    except Exception as error:  # noqa: BLE001 - the server says it, and goes on
        import traceback

        traceback.print_exc()
        name = type(error).__name__
        return Frame(values={"job": number, "failed": f"an error of poetmodel: {name}: {error}"})
    return Frame(values={"job": number, "reply": made.values}, body=made.body)


def load_tasks() -> Tasks:
    """Import all that jobs need, once and before the first one."""
    import poetmodel.solver.lazy
    import poetmodel.solver.monolithic  # noqa: F401 - pyomo, which takes a second to load
    from poetmodel.explore import answers, exports, tasks

    return {
        "prepare": tasks.prepare,
        "begin": tasks.begin,
        "solve": tasks.solve,
        "draw": answers.draw,
        "why": answers.why,
        "export": exports.export,
    }


def main() -> None:
    """Serve the server that started this process: its arguments are niceness and catalogue."""
    target = os.fdopen(os.dup(OUTPUT), "wb")
    os.dup2(2, OUTPUT)  # what solvers print is no frame
    os.nice(int(sys.argv[1]))
    catalogue = Catalogue.from_json(sys.argv[2])
    server = Server(sys.stdin.buffer, target)
    signal.signal(signal.SIGINT, server.on_signal)
    for loop in (server.listen, server.speak):
        threading.Thread(target=loop, daemon=True).start()
    tasks = load_tasks()
    server.outbox.put(Frame(values={"ready": os.getpid()}))
    while True:
        frame = server.jobs.get()
        server.outbox.put(server.do(tasks, frame, catalogue))


if __name__ == "__main__":
    main()
