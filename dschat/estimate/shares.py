"""The fitted shares of the time model: how much of a peak each phase reaches.

``python benchmarks/plan_against_published.py --fit`` repeats the fit; docs/cost.md has the table of
fitted and held-out figures. No share was measured with dschat on a GPU.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shares:
    """What software reaches of a device's peaks.

    Attributes:
        products: of peak FLOPs, in passes with and without gradients.
        decode: of the memory bandwidth, in decode steps.
        overlap: of communication, that runs behind matrix products.
        step_launches: operations that a layer of a decode step waits for.
        cache_passes: how often a decode step reads or writes the cache; 1 unless it is copied.
        update: of the memory bandwidth, in optimizer steps.
    """

    products: float
    decode: float
    overlap: float = 0.5
    step_launches: float = 0.0
    cache_passes: float = 1.0
    update: float = 0.6


# Fitted on OpenRLHF's 7B rows, colocated and with vLLM. The share of the bandwidth is at its bound:
# copies of large tensors reach nine tenths.
ENGINE = Shares(products=0.4075, decode=0.9)
# Transformers' generate: a step reads and writes the whole cache to append to it, then reads it.
# The launches are fitted on the 7B rows of DeepSpeed-Chat and OpenRLHF that use it.
HF_LOOP = replace(ENGINE, step_launches=164.8, cache_passes=3)
# DeepSpeed-Chat in 2023, for comparison: 6.7B and 13B of its tables, and its 7B row at OpenRLHF.
DEEPSPEED_CHAT = replace(ENGINE, products=0.2658)
