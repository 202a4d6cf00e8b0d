"""Step 3, RLHF: the actor answers prompts, a reward model or functions score, the actor learns.

    deepspeed step3_rlhf/main.py --actor_model_name_or_path output/step1_sft \\
        --critic_model_name_or_path output/step2_reward
    deepspeed step3_rlhf/main.py --actor_model_name_or_path output/step1_sft \\
        --advantage_estimator grpo --num_samples_per_prompt 8 --reward_fn my_rewards.py:score
    python step3_rlhf/main.py --help

The loop is in dschat/rlhf/run.py, and is the one that the README shows for notebooks.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import dschat.distributed as dist
from dschat.config import RLHFConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    args = parser.parse(RLHFConfig)

    from dschat.rlhf.run import train

    train(args)
    out = str(args.output_dir)
    entrypoint.say_next(["chat", "--path", f"{out}/actor"], ["report", out])
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
