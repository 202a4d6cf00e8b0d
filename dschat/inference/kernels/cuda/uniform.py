"""Triton: the random numbers of `dschat.inference.sampling.uniforms`, to the bit."""

import triton
import triton.language as tl

from dschat.inference import sampling

# NOTE: Triton reads a literal above 2^63 as uint64.
_GAMMA = tl.constexpr(sampling._GAMMA + (1 << 64))
_MIX_1 = tl.constexpr(sampling._MIX_1 + (1 << 64))
_MIX_2 = tl.constexpr(sampling._MIX_2 + (1 << 64))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, prompt, sample, position):
    """`dschat.inference.sampling.uniforms` of int64 counters: float64 in [0, 1)."""
    state = seed.to(tl.uint64, bitcast=True)
    for counter in tl.static_range(3):
        value = prompt if counter == 0 else sample if counter == 1 else position
        state = _mix(state + _GAMMA) + value.to(tl.uint64, bitcast=True) * _GAMMA
    return (_mix(state + _GAMMA) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
