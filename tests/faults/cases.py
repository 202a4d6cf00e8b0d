"""The commands that are killed, of all three steps, and how often in `make faults`."""

from runs import Case

PPO = "--enable_ema --actor_zero_stage 3 --critic_zero_stage 2 --actor_lora_dim 4"
PTX = "--unsupervised_dataset_name {models}/text.txt"
LENGTH = "--advantage_estimator grpo --kl_coef 0.1"
LENGTH += " --reward_fn length --reward_args length.target=20"
GRPO = f"{LENGTH} --normalize_reward --dynamic_sampling --prompt_sampling adaptive"
PARTIAL = f"{LENGTH} --partial_rollout --rollout_is tis --kv_page_size 4"
EPISODES = "--environment {here}/talker.py:Talker --max_turns 3 --max_turn_tokens 6"
EPISODES += " --max_answer_seq_len 40"

# One at a time: else the batches that answers decode in are not the same again.
AGENT = "--agent {here}/talker.py:play --agent_workers 1 --kv_page_size 16"
AGENT += " --max_prompt_seq_len 96 --max_answer_seq_len 40"

STEP1 = Case(1, "--zero_stage 0")
SWEEP = {  # kills in `make faults`
    STEP1: 10,
    Case(3, f"{PPO} {PTX}"): 10,
    Case(1, "--zero_stage 3 --lora_dim 4 --data_path builtin/chat"): 8,
    Case(1, "--zero_stage 0", ranks=2): 6,
    Case(1, "--zero_stage 2", ranks=2): 6,
    Case(2, "--zero_stage 0"): 8,
    Case(2, "--zero_stage 2"): 6,
    Case(2, "--zero_stage 3", ranks=2): 8,
    Case(2, "--loss dpo --precompute_ref_logprobs"): 8,
    Case(3, f"{PTX} --enable_ema --keep_best --data_path builtin/chat"): 10,
    Case(3, f"{GRPO} --actor_zero_stage 2"): 10,
    Case(3, PARTIAL): 8,
    Case(3, f"{EPISODES} {GRPO}"): 8,
    Case(3, f"{LENGTH} {AGENT}"): 8,
    Case(3, "--enable_ema", ranks=2): 8,
    Case(3, f"{PPO} {PTX}", ranks=2): 8,
    Case(3, f"{GRPO} --actor_zero_stage 3", ranks=2): 8,
    Case(3, f"{PARTIAL} --actor_zero_stage 3", ranks=2): 8,
    Case(3, f"{EPISODES} {PPO}", ranks=2): 8,
}
