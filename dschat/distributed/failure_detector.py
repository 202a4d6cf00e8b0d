"""Failure detector: exits this rank when another rank dies, also while it is in a collective.

A collective waits for a dead rank until its timeout, which is an hour. Launchers see their own
machine only, and give each process 30 seconds in turn. So every rank holds a TCP connection to
rank 0, which the kernel closes however the process ends. A rank that exits announces its exit code
first; a connection that closes without one is a failure, and rank 0 reports it to all others.

Loads no torch.
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
from typing import Any, NoReturn

from dschat.distributed.env import world_size

logger = logging.getLogger("dschat")

EXIT_GRACE_S = 5.0  # for the main thread to exit by itself: its collective may have failed too
REPORT_DELAY_S = 0.3  # before the error line: a process that is being killed too prints none
CONNECT_S = 20.0
LATE_CONNECT_S = 2.0  # a failing rank 0 waits for ranks that have just started to connect
# A machine without power closes no connection: seconds before the first probe, seconds between
# probes, and the number of probes without an answer.
_MAX_STRANGERS = 64  # connections that have not said hello; the oldest are closed
_LONGEST_HELLO = 256
_KEEPALIVE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class RankFailure:
    """``rank`` ended with an exit code other than 0; None: without announcing one."""

    rank: int
    code: int | None


class FailureDetector:
    """This rank's connections. Without a network between the ranks it detects nothing."""

    def __init__(
        self, rank: int, size: int, address: str, gather: Callable[[Any], list[Any]]
    ) -> None:
        """Collective. ``address``: of rank 0's machine. ``gather``: `gather_objects`."""
        self._rank = rank
        self._announced = False  # this rank's exit
        self._failure: RankFailure | None = None
        self._detected = threading.Event()
        self._report_lock = threading.Lock()  # never released by the thread that reports
        # On rank 0 to all others, else to rank 0.
        self._connections: dict[socket.socket, _Peer] = {}
        self.all_connected = threading.Event()  # to rank 0, as far as this one knows
        self._silent = set(range(1, size))  # ranks that have not said hello to it
        server = _listen(address) if rank == 0 else None
        if server is None or size == 1:
            self.all_connected.set()
        port_and_token = server and (server.getsockname()[1], secrets.token_hex(16))
        ranks = gather((port_and_token, f"pid {os.getpid()} on {socket.gethostname()}"))
        self._names = [name for _, name in ranks]
        if ranks[0][0] is None:
            return
        port, self._token = ranks[0][0]
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)
        work, args = (self._serve, (server, size)) if server else (self._follow, (address, port))
        threading.Thread(target=work, args=args, name="failure-detector", daemon=True).start()

    def announce_exit(self, code: int) -> None:
        """Tell the other ranks that this one exits with ``code``; only the first call counts."""
        if self._announced:
            return
        self._announced = True
        if self._failure is not None:
            self._report()
        if code:
            self.all_connected.wait(LATE_CONNECT_S)
        message = f"failed {self._rank} {code}" if code else "done"
        for connection in list(self._connections):
            _send(connection, message)

    def first_failure(self, wait_s: float = 0.0) -> RankFailure | None:
        """The first failure of another rank that is known within ``wait_s``."""
        self._detected.wait(wait_s)
        return self._failure

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # an uncaught exception is a failure
            self.announce_exit(0)

    def _forget(self) -> None:
        """In a fork, which is not a rank: close its copies of the connections."""
        self._announced = True
        for connection in self._connections:
            connection.close()

    # -- threads

    def _serve(self, server: socket.socket, size: int) -> None:
        """Rank 0: listen to all ranks, and report the first failure to all."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._failure is None:
                for key, _ in selector.select():
                    left = []
                    if key.fileobj is server:
                        try:
                            connection, _ = server.accept()
                        except OSError:  # no file left, or the other end has gone
                            time.sleep(0.1)
                            continue
                        _keep_alive(connection)
                        self._connections[connection] = _Peer()
                        selector.register(connection, selectors.EVENT_READ)
                        strangers = [c for c, p in self._connections.items() if p.rank is None]
                        left = strangers[: -size - _MAX_STRANGERS]
                    elif key.fileobj in self._connections and not self._read(key.fileobj):
                        left = [key.fileobj]
                    for connection in left:
                        selector.unregister(connection)
                        del self._connections[connection]
                        connection.close()
        for connection in self._connections:
            _send(connection, f"failed {self._failure.rank} {self._failure.code}")
        self._exit()

    def _read(self, connection: socket.socket) -> bool:
        """Read one rank's message, or its end; returns whether to keep listening."""
        peer = self._connections[connection]
        data = _receive(connection)
        for words in peer.words(data):
            if words[:2] == ["hello", self._token] and len(words) == 3:
                peer.rank = int(words[2])
                self._silent.discard(peer.rank)
                if not self._silent:
                    self.all_connected.set()
            elif words == ["done"]:
                return False
            elif words[:1] == ["failed"] and peer.rank is not None:
                self._failure = RankFailure(peer.rank, _code(words[2]))
        if not data and peer.rank is not None and self._failure is None:
            self._failure = RankFailure(peer.rank, None)
        return bool(data) and (peer.rank is not None or len(peer.rest) <= _LONGEST_HELLO)

    def _follow(self, address: str, port: int) -> None:
        """Other ranks: listen to rank 0."""
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            logger.debug("no failure detection: %s:%d: %s", address, port, error)
            return
        connection.settimeout(None)
        _keep_alive(connection)
        peer = _Peer(rank=0)
        self._connections[connection] = peer
        _send(connection, f"hello {self._token} {self._rank}")
        while data := _receive(connection):
            for words in peer.words(data):
                if words == ["done"]:
                    return
                self._failure = RankFailure(int(words[1]), _code(words[2]))
                return self._exit()
        self._failure = RankFailure(0, None)
        self._exit()

    def _exit(self) -> None:
        """Another rank failed: exit, after the main thread had time to exit by itself."""
        if self._announced:
            return
        failure = self._failure
        assert failure is not None
        self._detected.set()
        time.sleep(REPORT_DELAY_S)
        self._report()
        time.sleep(EXIT_GRACE_S)
        os._exit(failure.code or 1)

    def _report(self) -> None:
        """Print the failure of a rank that could not; the lowest other rank does, once."""
        failure = self._failure
        assert failure is not None
        if failure.code is not None or self._rank != (1 if failure.rank == 0 else 0):
            return
        if not self._report_lock.acquire(blocking=False):
            return
        sys.stderr.write(
            f"error: process {failure.rank} of {len(self._names)} ({self._names[failure.rank]}) "
            "ended without an exit code: killed, perhaps for lack of memory; the others exit too\n"
        )


_detectors: list[FailureDetector] = []  # one, where the world size is above 1


def watch(detector: FailureDetector) -> None:
    """Use ``detector`` from now on."""
    _detectors[:] = [detector]


def exit_process(code: int) -> NoReturn:
    """Exit; one of several ranks, or with vLLM, without tearing down the interpreter.

    NOTE: a gloo thread that drops a tensor of the last collective takes the interpreter's lock. If
    the interpreter is being torn down by then, the thread aborts the process (SIGABRT), even after
    `shutdown` where something still refers to the group. So the exit handlers run and the output
    is flushed, but the teardown is skipped. In that, libraries of vLLM print what they leak.
    """
    alone = world_size() == 1 and "vllm" not in sys.modules
    if alone or "torch.distributed" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()
    os._exit(code)


def announce_exit(code: int) -> None:
    """Tell the other ranks that this one exits, and with which code.

    They exit too where it is not 0, or where a rank ends without this call (SIGKILL).
    """
    for detector in _detectors:
        detector.announce_exit(code)


def is_watched() -> bool:
    return bool(_detectors)


def first_failure(wait_s: float = 0.0) -> RankFailure | None:
    """The first failure of another rank that is known within ``wait_s``."""
    return _detectors[0].first_failure(wait_s) if _detectors else None


@dataclass
class _Peer:
    """The rank at the other end of a connection, and its incomplete last line."""

    rank: int | None = None  # until its hello
    rest: bytes = b""

    def words(self, data: bytes) -> Iterator[list[str]]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").split()


def _listen(address: str) -> socket.socket | None:
    """A socket on a free port that the other ranks reach; None without a network."""
    is_local = address in ("127.0.0.1", "localhost")
    try:
        if ":" in address:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024)
        return socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=1024)
    except OSError as error:
        logger.debug("no failure detection: %s", error)
        return None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(256)
    except OSError:  # reset, or the probes timed out
        return b""


def _send(connection: socket.socket, line: str) -> None:
    with suppress(OSError):  # that rank has ended
        connection.sendall(f"{line}\n".encode())


def _code(word: str) -> int | None:
    return None if word == "None" else int(word)
