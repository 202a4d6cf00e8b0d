"""Step 1, supervised fine-tuning: trains a pretrained causal LM on demonstrations.

deepspeed step1_sft/main.py --model_name_or_path facebook/opt-1.3b --zero_stage 3
python step1_sft/main.py --help
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import dschat.distributed as dist
from dschat.config import SFTConfig, parser
from dschat.distributed import entrypoint


def main() -> None:
    # Parse. torch loads after that: --help and typing errors answer at once.
    config = parser.parse(SFTConfig)

    from dschat.supervised.run import train_sft

    train_sft(config)
    out = str(config.output_dir)
    entrypoint.say_next(
        ["chat", "--path", out],
        ["reward", "--model_name_or_path", out],
        ["rlhf", "--actor_model_name_or_path", out, "--reward_fn", "FILE.py:NAME"],
    )
    dist.shutdown()


if __name__ == "__main__":
    entrypoint.run(main)
