"""Ends this process soon after another one of its run has died, whatever it waits for.

Comes in: this process's number, how many there are, where number 0 is, and a collective. Goes out:
who was the first to fail. It must not know what the processes do, nor torch.

A process that waits in a collective for one that is gone may wait for as long as a slow collective
may take: an hour. Launchers see their own machine only, and give each process 30 seconds in turn.
So every process holds a connection to number 0, which the kernel closes however the process ends.
Who leaves says so first, with its exit code; silence is a death, and number 0 passes it on.
"""

import atexit
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("dschat")

PATIENCE_S = 5.0  # for the main thread to end by itself: its collective may have failed too
HUSH_S = 0.3  # before the line about a death: whoever is being killed as well keeps silent
CONNECT_S = 20.0
# A machine without power closes nothing: seconds until the first question, between questions, and
# how many stay without an answer.
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class RankFailure:
    """The end of process ``rank`` with an exit code that is not 0; None: it said nothing."""

    rank: int
    code: int | None


class FailureDetector:
    """This process's end of the connections. Without a network between the processes, none."""

    def __init__(
        self, rank: int, size: int, address: str, gather: Callable[[Any], list[Any]]
    ) -> None:
        """Collective. ``address``: of process 0's machine. ``gather``: every process's value."""
        self._rank = rank
        self._left = False
        self._death: RankFailure | None = None
        self._known = threading.Event()
        self._reported = threading.Lock()  # held for ever by the thread that did
        self._connections: dict[socket.socket, _Peer] = {}  # to the others; but for 0, to 0
        server = _listen(address) if rank == 0 else None
        mine = (server and (server.getsockname()[1], secrets.token_hex(16)), _name())
        (meeting, _), *_ = everybody = gather(mine)
        self._names = [name for _, name in everybody]
        if meeting is None:
            return
        port, self._token = meeting
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)
        work, args = (self._serve, (server,)) if server else (self._follow, (address, port))
        threading.Thread(target=work, args=args, name="lifeline", daemon=True).start()

    def announce_exit(self, code: int) -> None:
        """Say that this process ends by itself, with this exit code; the first time counts."""
        if self._left:
            return
        self._left = True
        if self._death is not None:
            self._report()
        what = f"died {self._rank} {code}" if code else "left"
        for connection in list(self._connections):
            _say(connection, what)

    def first_failure(self, wait_s: float = 0.0) -> RankFailure | None:
        """The first failure of another process that is known within ``wait_s``."""
        self._known.wait(wait_s)
        return self._death

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # nor does anybody see an exception out
            self.announce_exit(0)

    def _forget(self) -> None:
        """In a fork: it is no process of the run, and must not keep the connections open."""
        self._left = True
        for connection in self._connections:
            connection.close()

    # -- threads

    def _serve(self, server: socket.socket) -> None:
        """Process 0: listen to all, and tell all of the first death."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._death is None:
                for key, _ in selector.select():
                    if key.fileobj is server:
                        connection, _ = server.accept()
                        _keep_alive(connection)
                        self._connections[connection] = _Peer()
                        selector.register(connection, selectors.EVENT_READ)
                    elif not self._hear(key.fileobj):
                        selector.unregister(key.fileobj)
                        del self._connections[key.fileobj]
        for connection in self._connections:
            _say(connection, f"died {self._death.rank} {self._death.code}")
        self._end()

    def _hear(self, connection: socket.socket) -> bool:
        """What a process says, or that it is gone; whether there is more to come from it."""
        peer = self._connections[connection]
        data = _receive(connection)
        for words in peer.words(data):
            if words[:2] == ["hello", self._token] and len(words) == 3:
                peer.rank = int(words[2])
            elif words == ["left"]:
                return False
            elif words[:1] == ["died"] and peer.rank is not None:
                self._death = RankFailure(peer.rank, _code(words[2]))
        if not data and peer.rank is not None and self._death is None:
            self._death = RankFailure(peer.rank, None)
        return bool(data)

    def _follow(self, address: str, port: int) -> None:
        """Another process: listen to process 0."""
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            logger.debug("no lifeline to %s:%d: %s", address, port, error)
            return
        connection.settimeout(None)
        _keep_alive(connection)
        peer = _Peer(rank=0)
        self._connections[connection] = peer
        _say(connection, f"hello {self._token} {self._rank}")
        while data := _receive(connection):
            for words in peer.words(data):
                if words == ["left"]:
                    return
                self._death = RankFailure(int(words[1]), _code(words[2]))
                return self._end()
        self._death = RankFailure(0, None)
        self._end()

    def _end(self) -> None:
        """Another process has died. The main thread has a while to notice, then all ends."""
        if self._left:
            return
        death = self._death
        assert death is not None
        self._known.set()
        time.sleep(HUSH_S)
        self._report()
        time.sleep(PATIENCE_S)
        os._exit(death.code or 1)

    def _report(self) -> None:
        """Say who died, for one that could not; the first of those that are left does, once."""
        death = self._death
        assert death is not None
        if death.code is not None or self._rank != (1 if death.rank == 0 else 0):
            return
        if not self._reported.acquire(blocking=False):
            return
        sys.stderr.write(
            f"error: process {death.rank} of {len(self._names)} ({self._names[death.rank]}) is "
            "gone without a word: killed, perhaps for lack of memory; the others end too\n"
        )


@dataclass
class _Peer:
    """The other end of a connection, and the beginning of its next line."""

    rank: int | None = None  # until it has said so
    rest: bytes = b""

    def words(self, data: bytes) -> Iterator[list[str]]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").split()


def _listen(address: str) -> socket.socket | None:
    """A socket that the other processes reach, on a free port; None where there is no network."""
    here_only = address in ("127.0.0.1", "localhost")
    try:
        if ":" in address:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024)
        return socket.create_server(("127.0.0.1" if here_only else "", 0), backlog=1024)
    except OSError as error:
        logger.debug("no lifelines: %s", error)
        return None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has each
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(256)
    except OSError:  # reset, or no answer any more
        return b""


def _say(connection: socket.socket, line: str) -> None:
    with suppress(OSError):  # who is gone need not be told
        connection.sendall(f"{line}\n".encode())


def _code(word: str) -> int | None:
    return None if word == "None" else int(word)


def _name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
