"""Checks data and models of all steps before the first one trains.

Looks at local files only: first rows, configurations and names of weights; and asks the hub that
models are pushed to. Nothing is loaded, downloaded or written. ``python -m
dschat.launch.preflight`` reads a request as JSON on stdin, checks it, and prints the log lines of
the memory estimate; exit code 2 and one line on stderr if a step cannot run.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.data.sources.adapters import PURPOSES
from dschat.data.sources.resolve import looks_like_file
from dschat.data.sources.splits import load_source, named_held_out, parse_spec
from dschat.distributed import entrypoint
from dschat.estimate import PlanRequest
from dschat.estimate.report import log_lines
from dschat.models.checkpoint import Checkpoint
from dschat.rlhf.formulas import estimator, policy_loss
from dschat.rlhf.initial_checkpoints import check_lengths, find_checkpoints
from dschat.rlhf.teacher_prompts import teacher_prompt
from dschat.runtime.hub import check_hub

BASE = "--model_name_or_path"


def check(request: PlanRequest) -> None:
    """Raise ``UserError``, with the number of the step, for data or a model it cannot use."""
    for number in sorted(request.steps):
        config = request.config(number)
        try:
            _check_data(config, number)
            check_hub(config)
            if isinstance(config, RLHFConfig):
                _check_rlhf(config)
            else:
                assert isinstance(config, SupervisedConfig)
                _check_base(config, request)
        except UserError as error:
            raise UserError(f"step {number}: {error}") from error


def _check_data(config: CommonConfig, number: int) -> None:
    """Require local data files to exist and to have the columns of this step."""
    purpose = PURPOSES[number - 1]
    for spec in config.data_path:
        if looks_like_file(parse_spec(spec)[0]):
            load_source(spec, config, purpose)
    if all(looks_like_file(parse_spec(spec)[0]) for spec in config.eval_data_path or ()):
        named_held_out(config, purpose)


def _check_base(config: SupervisedConfig, request: PlanRequest) -> None:
    """Check the initial model of step 1 or 2, and its tokenizer."""
    name = str(Path(os.path.expanduser(config.model_name_or_path)))
    if name in request.made_from or not _has_config(name):
        return
    base = Checkpoint(name, BASE, config.trust_remote_code)
    is_policy = not isinstance(config, RewardConfig) or config.trains_policy
    # Attention kernels depend on the machines of the step.
    base.check("lm" if is_policy else "score", None, config.lora_dim, config.lora_modules)
    base.check_positions(config.max_seq_len, "--max_seq_len", "lower it")
    if config.tokenizer_name_or_path is None:
        base.tokenizer(**config.tokenizer_flags)


def _check_rlhf(config: RLHFConfig) -> None:
    """Check the user's formulas, and that step 3's models fit each other, if all exist here."""
    estimator(config.advantage_estimator)
    policy_loss(config.policy_loss)
    if config.teacher_prompt:
        teacher_prompt(config.teacher_prompt)
    names = (
        config.actor_model_name_or_path,
        config.critic_model_name_or_path,
        config.reward_model_name_or_path,
        config.teacher_model_name_or_path,
    )
    if not all(_has_config(name) for name in names if name):
        return
    here = replace(  # independent of the number of processes and of the machine
        config,
        inference_tp_size=1,
        attn_implementation=None,
    )
    check_lengths(find_checkpoints(names[0], names[1], here))


def _has_config(name: str) -> bool:
    return os.path.isfile(Path(os.path.expanduser(name)) / "config.json")


def main() -> None:
    request = PlanRequest.from_json(sys.stdin.read())
    check(request)
    for line in log_lines(request):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
