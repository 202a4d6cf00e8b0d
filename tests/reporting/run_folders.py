"""Writes output folders as training does, with numbers that tests know."""

import json
from pathlib import Path

import yaml


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(answer: str = "4", **fields) -> dict:
    return {
        "prompt": "2+2=",
        "answer": answer,
        "score": 1.0,
        "answer_length": 2,
        "finished": True,
        "kl": 0.5,
        "tokens": [answer, "<|end|>"],
        "token_kl": [0.75, -0.25],
        "advantages": [1.0, None],
    } | fields


def write_run(out: Path, iterations: int = 3, answer: str = "4", **settings) -> Path:
    """A run of steps 1 and 3."""
    sft = [{"step": 0, "eval/loss": 5.0}]
    sft += [{"step": n, "loss": 4.0 / n, "learning_rate": 0.1} for n in range(1, 5)]
    write_rows(out / "step1_sft" / "metrics.jsonl", [*sft, {"step": 4, "eval/loss": 1.0}])
    rlhf = [
        {
            "step": n,
            "objective/scores": n / 10,
            "objective/kl": n / 100,
            "time/generate_s": 1.0 * n,
            "time/score_s": 2.0,
            "time/train_s": 3.0,
            "time/iteration_s": 5.0 + n,
            "throughput/train_tflops": 0.5,
            "memory/peak_gib": 2.0,
            "custom/metric_s": float("nan") if n == 1 else 1.0,
        }
        for n in range(1, iterations + 1)
    ]
    step3 = out / "step3_rlhf"
    write_rows(step3 / "metrics.jsonl", rlhf)
    samples = [
        {"step": n, "samples": [sample(answer)], "scores": [0.0, 1.0, 1.0, None]}
        | {"answer_lengths": [2, 2, 3, 5]}
        for n in (1, iterations)
    ]
    write_rows(step3 / "samples.jsonl", samples)
    (step3 / "training_config.yaml").write_text(yaml.safe_dump({"kl_coef": 0.1} | settings))
    start = {"event": "start", "step": 0, "time": 0.0, "processes": 2, "device": "cpu"}
    start |= {"host": "node1", "versions": {"torch": "9.9"}}
    resume = start | {"event": "resume", "step": 2, "time": 60.0}
    write_rows(step3 / "starts.jsonl", [start, resume])
    return out
