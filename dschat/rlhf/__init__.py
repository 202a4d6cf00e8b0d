"""Step 3: four models in one engine, experience, PPO, the moving average, evaluation."""
