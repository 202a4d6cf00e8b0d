"""Talk to a trained model.

    python chat.py --path output/demo/step3_rlhf/actor
    python chat.py --path output/demo/step3_rlhf/actor --greedy < prompts.txt > answers.txt

On a terminal a conversation, streamed. Through a pipe every line is a prompt of its own, and every
answer a line (its line breaks as \\n).
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.interrupts import exit_on_interrupt

    exit_on_interrupt()

import signal
import sys
from codecs import lookup
from contextlib import closing, suppress

from dschat.chat.load import ChatConfig, load_chat
from dschat.chat.session import Chat
from dschat.config import UserError, parser
from dschat.distributed import entrypoint, host_checks

HELP = """\
/reset        forget what was said
/system TEXT  set the system message (without TEXT: remove it)
/help         this list
/quit         leave; so do Ctrl-C and Ctrl-D here, while Ctrl-C during an answer stops the answer"""


def main() -> None:
    # Parse. Only then does torch load: --help and typing errors answer at once.
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C, while Python ends
    else:
        answer_lines(chat)


def set_streams() -> None:
    """Any character comes in and goes out, in any locale: UTF-8, but for a terminal that has an
    encoding of its own.
    """
    if closed := {"stdin", "stdout"} & {*host_checks.closed}:
        raise UserError(f"{' and '.join(sorted(closed))} is closed; open it, or use < and >")
    for stream in (sys.stdin, sys.stdout):
        own = stream.isatty() and lookup(stream.encoding).name != "ascii"
        stream.reconfigure(encoding=stream.encoding if own else "utf-8", errors="replace")


def converse(chat: Chat) -> None:
    """Prompts from the terminal, answers to it as they come, until /quit."""
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


def command(chat: Chat, text: str) -> None:
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


def stream(chat: Chat, text: str) -> None:
    """Print one answer as it is decoded; Ctrl-C stops it and no more."""
    try:
        with closing(chat.reply(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)")
    except UserError as error:
        print(f"({error})")


def answer_lines(chat: Chat) -> None:
    """Each line of standard input answered by itself, on one line; an empty one by an empty one."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may leave, as `head` does
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
    entrypoint.run(main)
