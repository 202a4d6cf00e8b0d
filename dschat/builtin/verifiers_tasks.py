"""Environments of verifiers, ``verifiers:NAME``: tasks as rows, and an agent that plays one.

The library runs an episode with its own programs and tools; these ask the model over HTTP.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dschat.config.errors import UserError, require
from dschat.user_code.calls import Fault, raised

VERIFIERS = "verifiers:"
_MOST = 1000  # tasks of a taskset without end


@cache
def _loaded(spec: str) -> tuple[Any, list[Any]]:
    """The settings of an environment, and its tasks. ``UserError`` where it cannot be loaded."""
    extra = "pip install 'dschat[verifiers]', on Python 3.11 or later"
    require(find_spec("verifiers") is not None, f"{spec} needs verifiers: {extra}")
    sys.path += [] if os.getcwd() in sys.path else [os.getcwd()]  # as `python -m` would
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # where uv is
    name = spec.removeprefix(VERIFIERS)
    try:
        import tomllib
        from verifiers.v1 import AgentConfig
        from verifiers.v1.utils import loaders

        data: dict[str, Any] = {"taskset": {"id": name}}
        if name.endswith(".toml"):
            data = tomllib.loads(Path(name).read_text())["env"]
        taskset = data["taskset"]["id"]
        # Not the library's own defaults: remote machines, and a shell on this one.
        harness = loaders.default_harness_id(taskset)
        local = [("harness", "id", "null" if harness == "bash" else harness)]
        local += [("runtime", "type", "subprocess")]
        settings = loaders.env_config_type(taskset, data.get("id", ""))
        for role, field in settings.model_fields.items():
            if isinstance(declared := field.default, AgentConfig):
                own = {n: {k: v} for n, k, v in local if n not in declared.model_fields_set}
                data[role] = own | data.get(role, {})
        config = loaders.resolve_env_config(data)
        found = loaders.load_environment(config).taskset
        return config, list(found if found.bounded else found.take(_MOST))
    except Exception as error:
        raise UserError(f"{spec} cannot be loaded: it {raised(error)}") from None


def task_rows(spec: str) -> Iterator[dict[str, Any]]:
    """A row for each task: the messages that it begins with, and its number."""
    for number, task in enumerate(_loaded(spec)[1]):
        first, said = task.data.system_prompt, task.data.prompt
        turns = [{"role": "system", "content": first}] if first else []
        if isinstance(said, list):
            turns += [turn.model_dump(mode="json", exclude_none=True) for turn in said]
        else:
            turns.append({"role": "user", "content": said or f"task {number}"})
        yield {"prompt": turns, "task": number}


def agent_of(spec: str) -> Callable[..., Any]:
    """An agent that plays the task of a row, with the library's servers of its own."""
    config, tasks = _loaded(spec)
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment

    async def run(client: Any, prompt: Any, task: int | None = None) -> dict[str, Any]:
        if task is None:
            raise Fault(f"needs the tasks of {spec}: pass it as --data_path, too")
        variable = f"DSCHAT_{secrets.token_hex(8)}"  # the library reads keys from variables
        os.environ[variable] = client.api_key
        try:
            model = EvalClientConfig(base_url=str(client.base_url), api_key_var=variable)
            environment = load_environment(config)
            async with environment.serving():
                context = ModelContext(model="actor", client=model)
                episode = await environment.run_episode(tasks[task], context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise Fault(f"failed: {errors[-1].message}" if errors else "did not end")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        logged = {name: value for trace in traces for name, value in trace.metrics.items()}
        logged |= {name: r.score for trace in traces for name, r in trace.rewards.items() if r}
        return {**logged, "reward": sum(trace.reward for trace in traces) / len(traces)}

    return run
