"""What a process does before its other imports: exits on Ctrl-C with one line and exit code 130,
where a module that loads would leave a traceback. `performance` sets how OpenMP waits.

An exception raised inside an import may be lost: importlib ignores it in its callbacks, and C
extensions replace it by an ImportError. So nothing is raised there.

NOTE: imports the standard library only. Scripts call `exit_on_interrupt` before their other
imports, which take a second.
"""

import os
import signal
from types import FrameType

_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


def exit_on_interrupt() -> None:
    """Exit on Ctrl-C, until `dschat.distributed.entrypoint.run` sets its own handler.

    Leaves another handler, and a signal that is ignored (``nohup``), as they are.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in ``frame`` or in one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def _exit(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + signum)
