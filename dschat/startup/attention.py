"""Turns off cuDNN's attention, which torch 2.11 and later prefer on Hopper.

cuDNN makes a plan for each new shape, which takes tenths of a second; packed rows and batches of
prompts rarely have the same shape twice. Its gradient of masked attention is NaN for some lengths
(pytorch#196678).
"""


def avoid_cudnn_attention() -> None:
    """Attention of this process runs by torch's other kernels: flash, memory-efficient or math."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
