"""A worker process: reads jobs from its input, one at a time, and writes replies to its output.

The server starts it as ``python -m poetmodel.explore.worker``. It ends when its input ends, so that
none outlives the server, however that died.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import PoetModelError
from poetmodel.explore.choice import Catalogue
from poetmodel.explore.frames import Frame, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from poetmodel.explore.tasks import Talk

OUTPUT: Final = 1
"""The file descriptor of the standard output."""


def serve(source: BinaryIO, target: BinaryIO, catalogue: Catalogue) -> None:
    """Do jobs until the input ends."""
    from poetmodel.explore.tasks import Talk

    tasks = _tasks()
    jobs: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    dropped: set[int] = set()
    lock = threading.Lock()

    def send(frame: Frame) -> None:
        with lock:
            target.write(frame.encode())
            target.flush()

    def listen() -> None:
        while (frame := read_frame(source)) is not None:
            if "cancel" in frame.values:
                dropped.add(frame.values["cancel"])
            else:
                jobs.put(frame)
        os._exit(0)  # the server is gone: whatever is being done, nobody waits for it

    threading.Thread(target=listen, daemon=True).start()
    send(Frame(values={"ready": os.getpid()}))
    while True:
        frame = jobs.get()
        number = frame.values["job"]

        def tell(told: Frame, number: int = number) -> None:
            send(Frame(values={"job": number, "told": told.values}, body=told.body))

        def cancelled(number: int = number) -> bool:
            return number in dropped

        talk = Talk(catalogue=catalogue, tell=tell, cancelled=cancelled, body=frame.body)
        send(_reply(tasks, frame, talk))
        dropped.discard(number)


def _reply(
    tasks: Mapping[str, Callable[[dict[str, Any], Talk], Frame]], frame: Frame, talk: Talk
) -> Frame:
    number = frame.values["job"]
    try:
        made = tasks[frame.values["task"]](frame.values, talk)
    except PoetModelError as error:
        return Frame(values={"job": number, "refused": _sentence(error)})
    except MemoryError:
        return Frame(values={"job": number, "failed": "there is not enough memory for it"})
    except Exception as error:  # noqa: BLE001 - the server says it, and goes on
        import traceback

        traceback.print_exc()
        name = type(error).__name__
        return Frame(values={"job": number, "failed": f"an error of poetmodel: {name}: {error}"})
    return Frame(values={"job": number, "reply": made.values}, body=made.body)


def _sentence(error: PoetModelError) -> str:
    return "; ".join(str(error).splitlines())


def _tasks() -> dict[str, Callable[[dict[str, Any], Talk], Frame]]:
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
    """Serve the server that started this process."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    target = os.fdopen(os.dup(OUTPUT), "wb")
    os.dup2(2, OUTPUT)  # what solvers print is no frame
    os.nice(int(sys.argv[1]))
    serve(sys.stdin.buffer, target, Catalogue.from_json(sys.argv[2]))


if __name__ == "__main__":
    main()
