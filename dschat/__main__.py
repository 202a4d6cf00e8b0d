"""The ``dschat`` command: runs train.py, chat.py and the step scripts from any folder.

A wheel has the scripts and ``training/`` in ``dschat/scripts``, where setup.py copies them; a
repository has them beside the package. Nothing else is imported until a command is chosen.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from dschat import __version__
from dschat.startup import exit_on_interrupt

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "scripts"
ROOT = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent

# Command: the script that has its main(), or MODULE:FUNCTION, and a line of help.
COMMANDS = {
    "train": ("train.py", "any of the three steps, on any number of devices; without flags a demo"),
    "sft": ("step1_sft/main.py", "step 1 alone: supervised fine-tuning"),
    "reward": ("step2_reward/main.py", "step 2 alone: reward model, or DPO, IPO, KTO"),
    "rlhf": ("step3_rlhf/main.py", "step 3 alone: PPO, GRPO and other estimators"),
    "chat": ("chat.py", "talk to a trained model"),
    "serve": ("dschat.serving.__main__:main", "OpenAI-compatible server and web chat"),
    "generate": (
        "dschat.offline:run_generate",
        "answer the prompts of a data set, into a file",
    ),
    "eval": ("dschat.offline:run_eval", "evaluate or compare models on local data"),
    "data": ("dschat.data.__main__:main", "show data files as the model will see them"),
    "replay": ("dschat.offline:run_replay", "train kept rollouts of step 3 again"),
    "report": ("dschat.reporting.__main__:main", "write a page of curves and samples of runs"),
    "env": ("dschat.reporting.machine:main", "versions, devices, what is off: for bug reports"),
}
USAGE = "usage: dschat COMMAND [FLAGS]"
HELP = f"""{USAGE}

{{commands}}

dschat COMMAND --help lists the flags that most runs need, dschat COMMAND --help all all of them;
dschat --version prints the version.
With a launcher: deepspeed --num_gpus 8 --module dschat rlhf ..., torchrun -m dschat rlhf ...
"""


def main() -> int:
    exit_on_interrupt()
    words = sys.argv[1:]
    if words and words[0].startswith("--local_rank="):  # DeepSpeed's launcher puts it first
        del words[0]
    command, *flags = words or ["--help"]
    if command in ("-h", "--help"):
        lines = "\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())
        sys.stdout.write(HELP.format(commands=lines))
        return 0
    if command == "--version":
        sys.stdout.write(f"dschat {__version__}\n")
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"error: unknown command {command}; choose from {', '.join(COMMANDS)}\n")
        return 2
    from dschat.distributed.entrypoint import run

    sys.argv = [f"dschat {command}", *flags]
    run(lambda: main_of(command)(), joins_group=command in ("sft", "reward", "rlhf", "replay"))


def main_of(command: str) -> Callable[[], int | None]:
    """The function of the command's script or module."""
    target, _ = COMMANDS[command]
    if target.endswith(".py"):
        return runpy.run_path(str(ROOT / target))["main"]
    return resolve_name(target)


if __name__ == "__main__":
    sys.exit(main())
