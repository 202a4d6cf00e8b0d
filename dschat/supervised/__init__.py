"""Steps 1 and 2: supervised fine-tuning, reward model, DPO, IPO and KTO."""
