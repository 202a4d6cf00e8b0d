"""Measures `dschat serve` under load, and against the engine alone.

    python benchmarks/serving.py [--streams 64] [--seconds 60] [--rounds 3]

A Llama of 35M parameters with random weights, in fp32, on a GPU in bf16. First, streams that begin
a new request as soon as one ends, for ``--seconds``: how many requests were answered whole, and the
times to the first token. Then, by turns, the same prompts to the server and to an idle
`InferenceEngine`; each answer has 256 tokens. Last, by turns, OpenAI's client asks the server, and
as an agent the engine of a rollout: each stream eight times, for 16 tokens. Prints one JSON line
each.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from openai import AsyncOpenAI
from report import environment, flags, ratios
from rollout_workloads import llama
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat.builtin.tiny_model import resolve_model
from dschat.config import RLHFConfig
from dschat.distributed import device
from dschat.environments.agent_episodes import AgentRunner
from dschat.environments.agent_server import AgentServer
from dschat.environments.agents import load_agent
from dschat.inference import InferenceEngine, SamplingParams

NEW_TOKENS, PROMPT_TOKENS = 256, 32
NUM_ASKED, SHORT = 8, 16  # an agent's requests, tokens of their answers
HEADERS = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin/tiny"))
    config = llama(384, 6, 6, 1024, 32_000)
    config.eos_token_id = tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Other prompts for each seed: those of an earlier call would be in the cache."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 500, (number, PROMPT_TOKENS), generator=generator).tolist()


class Client:
    """Sends requests for streams and counts what comes back, as cheaply as it can."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.first_token_s: list[float] = []
        self.whole = self.lost = self.tokens = 0

    async def ask(self, ids: list[int], seed: int) -> None:
        body = {"prompt": ids, "max_tokens": NEW_TOKENS, "seed": seed, "stream": True}
        data = json.dumps(body | {"ignore_eos": True, "stream_options": {"include_usage": True}})
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{HEADERS}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        is_first, tail = True, b""
        while part := await reader.read(1 << 16):
            if is_first and b"data: {" in part:
                self.first_token_s.append(time.perf_counter() - started)
                is_first = False
            tail = (tail + part)[-400:]
            if b"[DONE]" in tail:
                break
        writer.close()
        found = re.search(rb'"completion_tokens":(\d+)', tail)
        count = int(found[1]) if found else 0
        self.tokens += count
        self.whole += count == NEW_TOKENS
        self.lost += count != NEW_TOKENS

    async def keep_asking(self, number: int, ids: list[int], until: float) -> None:
        while time.perf_counter() < until:
            await self.ask(ids, number)


async def load(port: int, streams: int, seconds: float) -> dict:
    client, started = Client(port), time.perf_counter()
    until = started + seconds
    asked = (client.keep_asking(i, ids, until) for i, ids in enumerate(prompts(streams)))
    await asyncio.gather(*asked)
    took = time.perf_counter() - started
    times = sorted(client.first_token_s)
    return {
        "case": "load",
        "streams": streams,
        "seconds": round(took, 1),
        "whole": client.whole,
        "lost": client.lost,
        "tokens_per_s": round(client.tokens / took, 1),
        "first_token_s": {"median": times[len(times) // 2], "worst": times[-1]},
    }


async def once(port: int, streams: int, seed: int) -> float:
    """Tokens per second of one answer to each prompt."""
    client, started = Client(port), time.perf_counter()
    await asyncio.gather(*(client.ask(ids, i) for i, ids in enumerate(prompts(streams, seed))))
    assert client.lost == 0
    return client.tokens / (time.perf_counter() - started)


def alone(engine: InferenceEngine, streams: int, seed: int) -> float:
    """Tokens per second of the engine's answers to the same prompts."""
    started = time.perf_counter()
    engine.generate(prompts(streams, seed), SamplingParams(NEW_TOKENS, ignore_eos=True))
    return streams * NEW_TOKENS / (time.perf_counter() - started)


async def asks(client: AsyncOpenAI, prompt: str, **more: dict) -> None:
    """An agent, and a client of the server."""
    for number in range(NUM_ASKED):
        messages = [{"role": "user", "content": f"{prompt}, number {number}?"}]
        made = await client.chat.completions.create(
            model="", messages=messages, max_tokens=SHORT, **more
        )
        assert made.usage.completion_tokens == SHORT


async def clients(port: int, streams: int) -> float:
    """Requests per second of the server."""
    more, started = {"extra_body": {"ignore_eos": True}}, time.perf_counter()
    address = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=address, api_key="none", timeout=600) as client:
        await asyncio.gather(*(asks(client, f"Stream {i}", **more) for i in range(streams)))
    return streams * NUM_ASKED / (time.perf_counter() - started)


class Agents:
    """Asks the engine of a rollout."""

    def __init__(self, engine: InferenceEngine, folder: str) -> None:
        self._engine, self._agent = engine, load_agent(asks)
        self._server = AgentServer(AutoTokenizer.from_pretrained(folder))

    def __call__(self, streams: int) -> float:
        """Requests per second."""
        args = RLHFConfig(agent_workers=streams)
        sampling = SamplingParams(SHORT, ignore_eos=True)
        server, started = self._server, time.perf_counter()
        runner = AgentRunner(
            *(self._engine, server.encoder, self._agent, args),
            *(sampling, server.address, server.open),
        )
        prompts = [f"Stream {i}" for i in range(streams)]
        found = runner.run(prompts, [{}] * streams, range(streams), lambda *_: None)
        assert not any(episode.problem for episode in found), found[0].problem
        return streams * NUM_ASKED / (time.perf_counter() - started)


def main() -> None:
    parser = flags(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    about = environment(device())
    where = ("bfloat16" if device().type == "cuda" else "float32", device().type)
    sizes = {"max_num_seqs": 64, "max_seq_len": 2048, "page_size": 16}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        words = ["-m", "dschat", "serve", "--path", folder, "--max_seq_len", "2048", "--port", "0"]
        server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        try:
            engine = InferenceEngine.from_pretrained(folder, *where, **sizes)
            port = int(server.stdout.readline().split(":")[-1].split()[0])
            asyncio.run(once(port, args.streams, 1))  # warm
            print(json.dumps(asyncio.run(load(port, args.streams, args.seconds)) | about))
            alone(engine, args.streams, 1)
            served, engines = [], []
            for seed in range(2, 2 + args.rounds):
                served.append(asyncio.run(once(port, args.streams, seed)))
                engines.append(alone(engine, args.streams, seed))
            found = {"case": "against the engine", "served": served, "engine": engines}
            print(json.dumps(found | {"ratio": ratios(served, engines)} | about))
            served, asked, agents = [], [], Agents(engine, folder)
            for _ in range(1 + args.rounds):
                served.append(asyncio.run(clients(port, args.streams)))
                asked.append(agents(args.streams))
            served, asked = served[1:], asked[1:]
            found = {"case": "agents, requests/s", "served": served, "agents": asked}
            print(json.dumps(found | {"ratio": ratios(asked, served)} | about))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
