"""What a worker process serves in these tests. No torch here."""

import os
import subprocess
import time
from pathlib import Path


class Served:
    """Calls its method ``how``."""

    def __call__(self, how, *args):
        return getattr(self, how)(*args)

    def works(self):
        return os.getpid()

    def dies(self):
        os._exit(7)

    def hangs(self):
        time.sleep(1000)

    def raises(self):
        raise ValueError("no\nluck")

    def keeps_the_interpreter(self):
        """Computes in C with the GIL held: no other thread runs, no signal is handled."""
        return 9 ** (9**9)

    def counts(self, names):
        """How many environment variables of these names there are."""
        return sum(name in os.environ for name in names)

    def starts_another(self, path, how):
        """Starts a long-running process, then hangs, dies or works."""
        process = subprocess.Popen(["sleep", "600"])
        with open(path, "w") as file:
            file.write(f"{process.pid}\n")
        self(how)


class StartsTogether(Served):
    """Its second process is not ready before a third one starts."""

    def __init__(self, folder):
        Path(folder, str(os.getpid())).touch()
        while len(os.listdir(folder)) == 2:
            time.sleep(0.01)


class Broken:
    def __init__(self, code):
        raise SystemExit(code)
