"""Talk to a trained model.

    python chat.py --path output/demo/step3_rlhf/actor
    python chat.py --path output/demo/step3_rlhf/actor --greedy < prompts.txt > answers.txt

On a terminal this is a streamed conversation. Through a pipe, every line is an independent prompt
and every answer one line, with its line breaks as \\n.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import signal
import sys
from codecs import lookup
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from dschat.chat import load_chat
from dschat.chat.load import ChatConfig
from dschat.config import UserError, parser
from dschat.distributed import entrypoint, host_checks

if TYPE_CHECKING:
    from dschat.chat.model import Chat

HELP = """\
/reset        start a new conversation
/system TEXT  set the system message (without TEXT: remove it)
/help         show this list
/quit         quit, as do Ctrl-C and Ctrl-D here; during an answer Ctrl-C stops the answer"""


def main() -> None:
    # Parse. torch is imported later: --help and errors in the flags take no time.
    config = parser.parse(ChatConfig, takes_file=False)
    set_streams()

    from dschat.observability import console

    # Load.
    console.setup(hold=True)
    chat = load_chat(config)
    console.release()

    # Talk.
    if sys.stdin.isatty():
        converse(chat)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C while Python exits
    else:
        answer_lines(chat)


def set_streams() -> None:
    """Use UTF-8 in any locale, except on a terminal with another non-ASCII encoding."""
    if closed := {"stdin", "stdout"} & {*host_checks.closed}:
        raise UserError(f"{' and '.join(sorted(closed))} is closed; open it, or use < and >")
    for stream in (sys.stdin, sys.stdout):
        keep = stream.isatty() and lookup(stream.encoding).name != "ascii"
        stream.reconfigure(encoding=stream.encoding if keep else "utf-8", errors="replace")


def converse(chat: "Chat") -> None:
    """Answer prompts from the terminal until /quit."""
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in input()
    # NOTE: `entrypoint`'s handler exits inside an import, also one that an answer needs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("Say something, or /help.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text.startswith("/"):
            command(chat, text)
        elif text:
            stream(chat, text)


def command(chat: "Chat", text: str) -> None:
    name, _, rest = text.partition(" ")
    if name == "/reset":
        chat.reset()
        print("(a new conversation)")
    elif name == "/system":
        try:
            chat.set_system(rest.strip() or None)
        except UserError as error:
            print(f"({error})")
        else:
            print(f"(system message {'set' if rest.strip() else 'removed'})")
    elif name == "/help":
        print(HELP)
    else:
        print(f"(no command {name}; /help lists them)")


def stream(chat: "Chat", text: str) -> None:
    """Print one answer as it is decoded; Ctrl-C stops only the answer."""
    try:
        with closing(chat.reply(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)")
    except UserError as error:
        print(f"({error})")


def answer_lines(chat: "Chat") -> None:
    """Answer each line of standard input independently, on one line; an empty line gets an empty
    one.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently when the reader closes the pipe
    for number, line in enumerate(sys.stdin, 1):
        chat.reset()
        answer = ""
        try:
            if line.strip():
                answer = "".join(chat.reply(line.strip())).strip()
        except UserError as error:
            sys.stderr.write(f"line {number}: {error}\n")
        print(answer.replace("\n", "\\n"), flush=True)


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
