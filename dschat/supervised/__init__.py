"""Steps 1 and 2: supervised fine-tuning, reward modelling, DPO, IPO and KTO."""
