"""Step 2, learning from pairs: trains a reward model on which of two answers people prefer, or how
they rank several; or, with --loss dpo, ipo or kto, trains the policy on the pairs and leaves
out step 3.

    deepspeed step2_reward/main.py --model_name_or_path facebook/opt-350m
    deepspeed step2_reward/main.py --model_name_or_path output/step1_sft --loss dpo
    python step2_reward/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import dschat.distributed as dist
from dschat.config import RewardConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    config = parser.parse(RewardConfig)

    from dschat.supervised.run import train_on_preferences

    train_on_preferences(config)
    out = str(config.output_dir)
    chat = ["chat", "--path", f"{out}/actor"]
    ppo = ["rlhf", "--actor_model_name_or_path", "STEP1", "--critic_model_name_or_path", out]
    entrypoint.say_next(chat if config.trains_policy else ppo, ["report", out])
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
