"""Runs MCP servers, whose tools ``--tools mcp:COMMAND`` gives to the model.

A process of each server starts when its tools are listed, and stops at the end of this process.
"""

import asyncio
import atexit
import os
import shlex
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from importlib.util import find_spec
from tempfile import TemporaryFile
from typing import Any, cast

from dschat.config import UserError
from dschat.user_code.calls import Fault, background, fault_of, timed_out
from dschat.user_code.processes import START_S

MCP = "mcp:"
_STOP_S = 8.0  # the library asks the server, waits, and kills: 5 s at most
_TAIL = 4096  # bytes at the end of what a server wrote to stderr


class McpServer:
    """A running server and its ``tools``; ``UserError`` for one that does not start or has none."""

    def __init__(self, command: str) -> None:
        self._label = f"--tools {MCP}{command}"
        if find_spec("mcp") is None:
            raise UserError(f"{self._label}: mcp is missing: pip install 'dschat[mcp]'")
        self._stderr = TemporaryFile()  # noqa: SIM115  as long as the server
        listed: Future = Future()
        self._end = background(asyncio.run, self._live(command, listed))
        atexit.register(self._stop)
        wait([listed, self._end], START_S, FIRST_COMPLETED)
        if not listed.done():
            error = self._end.exception() if self._end.done() else timed_out(START_S)
            self._stop()
            raise UserError(f"{self._label} cannot be used: {self._why(error)}")
        self.tools: list[Any] = listed.result()
        if not self.tools:
            raise UserError(f"{self._label} has no tools")

    def function(self, name: str, limit_s: float) -> Callable[..., Any]:
        """The tool ``name`` as a coroutine. A call takes at most ``limit_s``."""

        async def call(**arguments: Any) -> str:
            job = self._called(name, arguments, limit_s)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job, self._loop))

        return call

    async def _called(self, name: str, arguments: dict[str, Any], limit_s: float) -> str:
        """The texts of a result. Raises ``UserError`` where the server has ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._session.call_tool(name, arguments, limit_s)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise Fault(f"failed: {error}") from None
            raise UserError(f"{self._label} has ended: {self._why(error)}") from None
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise Fault(f"failed: {text}")
        return text

    async def _live(self, command: str, listed: Future) -> None:
        """From the start to the stop of the process: the library wants both in one task."""
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import PaginatedRequestParams as Page

        self._loop, self._task = asyncio.get_running_loop(), cast(Any, asyncio.current_task())
        word, *words = shlex.split(command) or [""]
        server = StdioServerParameters(command=word, args=words, env=dict(os.environ))
        process: Any = stdio_client(server, self._stderr)
        async with process as streams, ClientSession(*streams) as self._session:
            await self._session.initialize()
            pages = [await self._session.list_tools()]
            while cursor := pages[-1].next_cursor:
                pages.append(await self._session.list_tools(params=Page(cursor=cursor)))
            listed.set_result([tool for page in pages for tool in page.tools])
            await asyncio.Event().wait()  # until it is cancelled

    def _stop(self) -> None:
        with suppress(RuntimeError):  # its loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        wait([self._end], _STOP_S)

    def _why(self, error: Any) -> str:
        """The last line that the server wrote to stderr, or else the error."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _TAIL))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        while hasattr(error, "exceptions"):  # of the library's task groups
            error = error.exceptions[0]
        return lines[-1] if lines else str(fault_of(error))
