"""The fitted shares of the time model: how much of a peak each phase reaches."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shares:
    """What software reaches of a device's peaks.

    Attributes:
        products: of peak FLOPs, in passes with and without gradients.
        decode: of the memory bandwidth, in decode steps.
        overlap: of communication, that runs behind matrix products.
        step_launches: operations that a layer of a decode step waits for.
        pass_launches: operations that a layer of a pass waits for.
        cache_passes: how often a decode step reads or writes the cache; 1 unless it is copied.
        update: of the memory bandwidth, in optimizer steps.
    """

    products: float
    decode: float
    overlap: float = 0.5
    step_launches: float = 0.0
    pass_launches: float = 0.0
    cache_passes: float = 1.0
    update: float = 0.6


ENGINE = Shares(products=0.4075, decode=0.9)
HF_LOOP = replace(ENGINE, step_launches=164.8, cache_passes=3)
CPU = Shares(products=0.6, decode=0.5, step_launches=10, pass_launches=60)
DEEPSPEED_CHAT = replace(ENGINE, products=0.2658)
