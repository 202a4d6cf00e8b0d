"""Compares how fast dschat and TRL's GRPOTrainer learn a task with a verifiable reward.

    pip install trl                                     # dschat does not depend on it
    python benchmarks/learning.py                       # the recipe arithmetic, three seeds
    python benchmarks/learning.py --trl_python other/venv/bin/python   # TRL installed elsewhere
    python benchmarks/learning.py --max_steps 20 --seeds 1 --old_logprobs rollout
    python benchmarks/learning.py --replay              # compare the updates of both

Both sides start from the same SFT model (step 1 of the recipe, trained once into --output_dir) and
get the same prompts in the same order, the same reward function and the recipe's settings of step 3
(flags of step 3 given here override them): samples, learning rate, Adam, batches, clip range, KL,
loss aggregation, sampling. Settings that affect only TRL's speed are chosen for speed: no gradient
checkpointing, fp32; the side trl_continuous also generates with transformers' continuous batching.
Both run on the CPU, each in its own process, in turn, once per seed.

The clock starts when everything is loaded. Weights are saved every --snapshot_every rollouts with
the clock stopped; afterwards one engine answers the held-out prompts with the weights of both
sides, at the temperature of training. One JSON line per side goes to stdout:

- curve: samples drawn, seconds, held-out accuracy; medians over the seeds.
- samples_to_target, seconds_to_target: until the accuracy is --target, interpolated between two
  snapshots; null if a seed does not reach it.
- step_s: seconds of a rollout and its updates, and of its parts: generate_s (decoding to text
  included), score_s (old log-probs, reward, advantages), train_s.
- ratio: this side / dschat with the same seed: seconds, and samples and seconds to the target.

With --replay, TRL trains on the answers that dschat drew instead of its own, with one optimizer
step per rollout; relative_difference is |dschat's weights - TRL's| / |dschat's - SFT's| at the end.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from learning_curves import Run, ratio, summary
from learning_settings import TRL_SIDES, check_comparable, dschat_settings, trl_settings
from learning_task import RESULT, Task, exact_match, snapshot_path
from report import ROOT, environment, flags, note, positive, rounded
from safetensors.torch import load_file

from dschat.config import RLHFConfig, UserError, parser
from dschat.data.batches import PromptBatches, prompts_of
from dschat.data.tokenize import prompt_dataset
from dschat.distributed import entrypoint
from dschat.inference import InferenceEngine, SamplingParams
from dschat.launch.recipe import load_recipe
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.gold_eval import EVAL_SEED

DSCHAT = "dschat"
SIDES = (DSCHAT, *TRL_SIDES)


def main() -> None:
    args, config = parse()
    out = Path(args.output_dir)
    sft = args.sft_model or train_sft(args.recipe, out)
    config = replace(config, actor_model_name_or_path=sft)
    tokenizer = load_tokenizer(sft, "--sft_model")
    train, held_out = prompt_dataset(config, tokenizer, "both")
    common = environment(torch.device("cpu"))
    common |= {"recipe": args.recipe, "command": shlex.join(sys.argv)}
    if args.replay:
        result = replay(config, tokenizer, train, out, args)
        print(json.dumps({"benchmark": "learning", "side": "replay"} | common | result), flush=True)
        return

    judge = Judge(sft, config, tokenizer, held_out, args.eval_samples)
    start = judge.accuracy()
    note(f"the SFT model: accuracy {start:.3f}")
    runs: dict[str, list[Run]] = {side: [] for side in args.sides}
    for seed in args.seeds:
        for side in args.sides:
            folder = out / f"{side}_seed{seed}"
            task = make_task(replace(config, seed=seed), side, tokenizer, train, args)
            run = judged(run_side(task, side, folder, args), task, folder, judge, start)
            runs[side].append(run)
            samples, seconds, accuracy = run.points[-1]
            note(
                f"{side}, seed {seed}: accuracy {accuracy:.3f}, {samples} samples, {seconds:.1f} s"
            )
    for side, side_runs in runs.items():
        line = {"benchmark": "learning", "side": side} | common | side_runs[0].about
        line |= {"seeds": args.seeds, "target": args.target} | summary(side_runs, args.target)
        if side != DSCHAT and DSCHAT in runs:
            line["ratio"] = ratio(side_runs, runs[DSCHAT], args.target)
        print(json.dumps(line), flush=True)


def parse() -> tuple[argparse.Namespace, RLHFConfig]:
    """The benchmark's flags, and the settings of step 3: the recipe's, overridden by flags.

    Raises:
        UserError: invalid flags, or settings that TRL does not have.
    """
    parser = flags(__doc__)
    parser.allow_abbrev = False  # --seed is a flag of step 3, not short for --seeds
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--output_dir", default="output/learning")
    parser.add_argument("--sft_model", help="folder to start from; default: the recipe's step 1")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[DSCHAT, "trl"])
    parser.add_argument("--trl_python", default=sys.executable, help="Python interpreter with TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--snapshot_every", type=positive, default=5, help="rollouts per snapshot")
    parser.add_argument(
        "--eval_samples", type=positive, default=4, help="answers per held-out prompt"
    )
    parser.add_argument("--target", type=float, default=0.8, help="accuracy to reach")
    parser.add_argument("--threads", type=int, help="CPU threads of each side; default: torch's")
    parser.add_argument("--replay", action="store_true", help="compare updates, not speed")
    args, others = parser.parse_known_args()
    config = settings(args.recipe, others, one_step=args.replay)
    return args, config


def settings(recipe: str, words: list[str], one_step: bool) -> RLHFConfig:
    """The settings of both sides; ``one_step``: one optimizer step per rollout."""
    given = load_recipe(recipe, ROOT / "training" / "recipes").values[3]
    given |= parser.given(RLHFConfig, words)
    # Both sides use the reward function of the task.
    given |= {"reward_fn": ["exact_match"], "reward_args": None}
    given |= {"actor_model_name_or_path": "the SFT model", "reward_model_name_or_path": ""}
    config = RLHFConfig(**given)
    if one_step:
        size = config.rollout_samples(1) // config.gradient_accumulation_steps
        config = replace(config, per_device_training_batch_size=size, ppo_epochs=1)
    config.validate()
    check_comparable(config)
    if not config.max_steps:
        raise UserError("--max_steps is missing: the number of rollouts of each side")
    return config


# -- judging -------------------------------------------------------------------------------------


class Judge:
    """Answers every held-out prompt ``num_samples`` times, sampled as in training.

    ``model``: the folder that all sides start from; ``held_out``: a table of `prompt_dataset` with
    a column ``reference``.
    """

    def __init__(
        self, model: str, config: RLHFConfig, tokenizer: Any, held_out: Any, num_samples: int
    ) -> None:
        prompts = prompts_of([held_out[i] for i in range(len(held_out))])
        self._ids, self._tokenizer = list(prompts), tokenizer
        self._references = [
            str(r) for r in prompts.columns["reference"] for _ in range(num_samples)
        ]
        self._engine = InferenceEngine.from_pretrained(
            model,
            max_num_seqs=256,
            max_seq_len=config.max_prompt_seq_len + config.max_answer_seq_len,
        )
        self._sampling = SamplingParams(
            max_new_tokens=config.max_answer_seq_len,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=EVAL_SEED,
            n=num_samples,
        )

    def accuracy(self, snapshot: Path | None = None) -> float:
        """Share of right answers with the weights in ``snapshot``; None: with those loaded now."""
        if snapshot is not None:
            self._engine.weights.load(load_file(snapshot).items())
        rollout = self._engine.generate(self._ids, self._sampling)
        answers = self._tokenizer.batch_decode(rollout.token_ids, skip_special_tokens=True)
        return statistics.mean(exact_match(answers, self._references))


def judged(record: dict, task: Task, folder: Path, judge: Judge, start: float) -> Run:
    """A run with the accuracy of each of its snapshots; deletes the snapshots."""
    points, seconds = [(0, 0.0, start)], 0.0
    for number, row in enumerate(record["rows"], 1):
        seconds += row["step"]
        path = snapshot_path(folder, number)
        if path.exists():
            samples = number * task.prompts_per_rollout * task.samples_per_prompt
            points.append((samples, seconds, judge.accuracy(path)))
            path.unlink()
    return Run(points, record["rows"], record["about"])


# -- running ---------------------------------------------------------------------------------------


def train_sft(recipe: str, out: Path) -> str:
    """The folder of the recipe's step 1, trained now unless ``out`` has it complete."""
    folder = out / "step1_sft"
    if not (folder / "COMPLETE").exists():
        command = [sys.executable, str(ROOT / "train.py"), "--recipe", recipe, "--step", "1"]
        subprocess.run([*command, "--output_dir", str(out)], check=True, stdout=sys.stderr)
    return str(folder)


def make_task(
    config: RLHFConfig, side: str, tokenizer: Any, train: Any, args: argparse.Namespace
) -> Task:
    """The task of ``side`` with the seed of ``config``. The prompts are the same for all sides."""
    size = config.rollout_prompts(1)
    batches = PromptBatches(train, size, 0, 1, config.seed)
    rows: list[tuple[list[int], Any]] = []
    while len(rows) < config.max_steps * size:  # epoch after epoch
        for prompts in batches:
            rows += zip(map(list, prompts), prompts.columns["reference"], strict=True)
    ids, references = zip(*rows[: config.max_steps * size], strict=True)
    texts = [tokenizer.decode(prompt) for prompt in ids]
    if tokenizer(texts)["input_ids"] != list(ids):
        raise UserError(
            f"{config.actor_model_name_or_path}: its prompts change when decoded and re-encoded"
        )
    return Task(
        model=config.actor_model_name_or_path,
        prompts_per_rollout=size,
        samples_per_prompt=config.num_samples_per_prompt,
        steps_per_rollout=config.num_mini_batches * config.ppo_epochs,
        snapshot_every=args.snapshot_every,
        settings=dschat_settings(config) if side == DSCHAT else trl_settings(config, side),
        prompts=texts,
        prompt_ids=list(ids),
        references=[str(reference) for reference in references],
    )


def run_side(task: Task, side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in its own process; returns its record."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [folder / RESULT, *folder.glob("*.safetensors")]:
        old.unlink(missing_ok=True)
    task.write(folder / "task.json")
    here, is_dschat = Path(__file__).resolve().parent, side == DSCHAT
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    if args.threads:
        variables["OMP_NUM_THREADS"] = str(args.threads)
    if is_dschat:  # TRL's interpreter does not need it
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable if is_dschat else args.trl_python]
    command += [str(here / ("learning_dschat.py" if is_dschat else "learning_trl.py"))]
    command += [str(folder / "task.json"), str(folder)]
    if subprocess.run(command, env=variables, stdout=sys.stderr).returncode:
        sys.exit(f"{side} failed; see its output above")
    return json.loads((folder / RESULT).read_text())


def replay(
    config: RLHFConfig, tokenizer: Any, train: Any, out: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """The distance between the final weights of both sides, trained on the same answers."""
    last = {}
    answers = str(out / "replay_answers.json")
    config = replace(config, seed=args.seeds[0])
    args.snapshot_every = config.max_steps
    for side in (DSCHAT, "trl"):
        task = make_task(config, side, tokenizer, train, args)
        task.answers = answers
        folder = out / f"replay_{side}"
        about = run_side(task, side, folder, args)["about"]
        last[side] = load_file(snapshot_path(folder, config.max_steps))
    start = dict(CheckpointFiles(config.actor_model_name_or_path, "actor").tensors())
    apart, moved = distance(last[DSCHAT], last["trl"]), distance(last[DSCHAT], start)
    note(f"apart {apart:.3g}, moved {moved:.3g}")
    return about | {"relative_difference": rounded(apart / moved)}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """2-norm of the difference over all weights of ``a``."""
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5


if __name__ == "__main__":
    entrypoint.run(main)
