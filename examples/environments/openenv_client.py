"""An environment of OpenEnv, which runs as a server, in turns.

    # rows.jsonl: {"prompt": "Say something long.", "url": "http://localhost:8000"}
    --data_path rows.jsonl --environment examples/environments/openenv_client.py:OpenEnv

Each episode is a session: the server needs as many as run at once (``max_concurrent_envs``, of its
`create_app`). ``ACTION`` is the field of its actions that gets the model's answer.
"""

import json

from openenv import GenericEnvClient

ACTION = "message"


class OpenEnv:
    def reset(self, url: str) -> str:
        self._client = GenericEnvClient(base_url=url).sync()
        self._client.connect()
        return f"\n{self._text(self._client.reset())}"

    def step(self, answer: str) -> tuple[str, float, bool]:
        result = self._client.step({ACTION: answer})
        return self._text(result), float(result.reward or 0.0), bool(result.done)

    def _text(self, result) -> str:
        """The observation's only text, or all of it as JSON."""
        texts = [value for value in result.observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(result.observation)

    def __del__(self) -> None:
        self._client.close()
