"""Measures what it saves to score complete prompts while others are still generated.

    python benchmarks/early_rewards.py
    python benchmarks/early_rewards.py --sample_s 0.01

Times whole GRPO iterations with an endpoint that takes ``--sample_s`` for each sample of a request,
on answers of geometric lengths: 64 tokens on average and 320 at most. Side ``after`` asks it when
all answers are there, side ``early`` as prompts complete. The sides take turns on the same prompts
and seeds, with the same answers. Weights are random: only time is measured. Prints medians and
their spread as one JSON line: of iterations, of their experience (until all scores are there), and
of its generation alone. ratio_*: after / early, of the rounds.
"""

import argparse
import json
import logging
import os
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from report import environment, note, ratios, spread
from transformers import LlamaConfig, LlamaForCausalLM

import dschat.distributed as dist
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.tiny_model import TINY_CONFIG, resolve_model
from dschat.config import RLHFConfig
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import load_tokenizer
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.trainer import DeepSpeedPPOTrainer

MEAN, LONGEST = 64, 320


def endpoint(sample_s: float) -> ThreadingHTTPServer:
    """Scores an answer by its length, after ``sample_s`` for each sample of a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
            time.sleep(sample_s * len(answers))
            body = json.dumps({"rewards": [float(len(answer) % 10) for answer in answers]})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample_s", type=float, default=0.05, help="seconds of a sample")
    parser.add_argument("--prompts", type=int, default=16, help="with four answers each")
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["no_proxy"] = "127.0.0.1"
    dist.init()
    tokenizer = load_tokenizer(resolve_model("builtin/tiny"), "builtin/tiny")
    server = endpoint(args.sample_s)
    config = RLHFConfig(
        advantage_estimator="grpo",
        num_samples_per_prompt=4,
        per_device_generation_batch_size=args.prompts,
        per_device_training_batch_size=args.prompts,
        max_prompt_seq_len=64,
        max_answer_seq_len=LONGEST,
        kl_coef=0.0,
        actor_learning_rate=0.0,
        reward_fn=["http"],
        reward_args=[f"http.url=http://127.0.0.1:{server.server_port}/"],
        reward_pool="thread",
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
        sizes = TINY_CONFIG | shape | {"num_hidden_layers": args.layers}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = DeepSpeedRLHFEngine(folder, None, tokenizer, args=config)
    with engine.rollout_mode() as generator:  # one of these is drawn every `MEAN` tokens
        generator.stop_ids = tuple(range(5, 5 + len(tokenizer) // MEAN))
    questions = [row["prompt"] for row in builtin_rows()["train"]][: args.prompts]
    batch = [
        prompt_text_ids(tokenizer, [{"role": "user", "content": text}])
        for text in dict.fromkeys(questions)
    ]
    trainers = {side: DeepSpeedPPOTrainer(engine, config) for side in ("after", "early")}
    functions = trainers["after"].reward_functions
    begin = functions.scoring
    functions.scoring = lambda prompts, num_certain: begin(prompts)  # no prompt is certain early
    times: dict[str, list[float]] = {side: [] for side in trainers}
    scored: dict[str, list[float]] = {side: [] for side in trainers}
    generated: dict[str, list[float]] = {side: [] for side in trainers}
    for number in range(args.rounds + 1):
        lengths = []
        for side, trainer in trainers.items():
            started = time.perf_counter()
            experience = trainer.generate_experience(batch)
            scored_s = time.perf_counter() - started
            trainer.train_rlhf(experience)
            seconds = time.perf_counter() - started
            lengths.append(experience.lengths.tolist())
            if number:  # the first warms up
                times[side].append(seconds)
                scored[side].append(scored_s)
                generated[side].append(trainer.metrics["time/generate_s"])
            note(f"round {number} of {args.rounds}, {side}: {seconds:.3g} s")
        assert lengths[0] == lengths[1], "answers differ"
    line = environment(dist.device()) | {
        "benchmark": "early_rewards",
        "sample_s": args.sample_s,
        "samples": len(batch) * config.num_samples_per_prompt,
    }
    measured = {"iteration": times, "experience": scored, "generate": generated}
    for name, sides in measured.items():
        line[f"{name}_s"] = {side: spread(values) for side, values in sides.items()}
        line[f"ratio_{name}"] = ratios(sides["after"], sides["early"])
    print(json.dumps(line))
    for trainer in trainers.values():
        trainer.reward_functions.close()
    server.shutdown()
    dist.shutdown()


if __name__ == "__main__":
    main()
