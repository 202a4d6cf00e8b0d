"""What all step scripts share: DeepSpeed engine, optimizer step, checkpointing, output folder."""
