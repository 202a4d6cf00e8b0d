"""``dschat serve``: an OpenAI-compatible server on the inference engine."""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import asyncio
import math
import os
import signal
import socket
import sys

from dschat.config import UserError, parser
from dschat.distributed import entrypoint
from dschat.serving.flags import KEYS_VARIABLE, ServeConfig, api_keys

_LAST_EVENTS_S = 5  # for the last events of answers, after --drain_s
# Seconds that a Python thread may keep the interpreter while others wait. With the default of 5 ms,
# an engine's thread that has left it for a moment waits as long as a decode step takes.
_SWITCH_S = 2e-4


def main() -> None:
    config = parser.parse(ServeConfig, takes_file=False)
    keys = api_keys(config, os.environ.get(KEYS_VARIABLE))
    listener = _listen(config.host, config.port)
    try:
        import uvicorn

        from dschat.openai_api.limits import BoundedConnection
        from dschat.serving.app import Server, create_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("dschat"):
            raise
        raise UserError(f"{error.name} is missing: pip install 'dschat[serve]'") from None

    from dschat.distributed import stop_signals
    from dschat.observability import console
    from dschat.serving.web_chat import ChatScorer, PreferenceFile
    from dschat.serving.worker import load_models

    console.setup()
    preferences, reward_model = PreferenceFile(config.preferences), None
    if config.reward_model is not None:
        trust = config.trust_remote_code
        reward_model = ChatScorer(config.reward_model, config.dtype, trust)
    server = Server(config, load_models(config))
    app = create_app(server, keys, preferences, reward_model)
    host, port = listener.getsockname()[:2]
    names = ", ".join(name for name, _ in config.models)
    place = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"serving {names} at http://{place}:{port} (Ctrl-C stops)\n")
    sys.stdout.flush()
    sys.setswitchinterval(_SWITCH_S)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http=BoundedConnection,
        ws="none",
        timeout_graceful_shutdown=math.ceil(config.drain_s) + _LAST_EVENTS_S,
        server_header=False,
    )

    class DrainingServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(config.drain_s, server.end_answers)
            await super().shutdown(sockets)

    draining = DrainingServer(settings)
    # NOTE: uvicorn raises SIGTERM again when all answers have ended: exit code 0.
    for signum in set(stop_signals.SIGNALS) - {signal.SIGINT}:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # else under nohup
            signal.signal(signum, draining.handle_exit)
    draining.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens; before models load, which takes longer."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise UserError(f"--port {port} of {host}: {reason}; choose another") from None
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
