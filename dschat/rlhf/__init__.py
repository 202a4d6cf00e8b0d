"""Step 3: the engine of four models, rollouts and experience, PPO and its relatives, evaluation."""
