# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Gives the rates of fused attention on an H100, which other devices have shares of. Imports no torch.

PyTorch's kernels for training are those of FlashAttention-2. The rates are the charts of FlashAttention-3's authors
(arXiv 2407.08608, figures 5 and 6: H100 SXM5 at 1,830 MHz, bf16, 16K tokens in the batch), in which a causal mask
halves the FLOPs. The backward with a causal mask is not in them: it is taken to lose what the forward loses.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass


SOURCE = (
    "attention at FlashAttention-2's rates on an H100 by head dimension and document length (arXiv 2407.08608, "
    "figures 5 and 6)"
)
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# By head dimension: forward without a mask, forward with a causal one, and backward without one, in TFLOP/s.
_RATES = {
    64: (
        (282, 306, 318, 321, 322, 324),
        (180, 229, 262, 284, 295, 299),
        (198, 238, 264, 279, 287, 291),
    ),
    128: (
        (309, 350, 362, 368, 370, 370),
        (191, 260, 298, 319, 333, 335),
        (214, 260, 291, 310, 318, 322),
    ),
}
# Larger heads: 298 of 370 in the forward without a mask at 16K tokens and head dimension 256.
_LARGE_HEADS = 298 / 370


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """Holds a device's rates of fused attention over those of an H100, for forward and backward."""

    forward: float
    backward: float

    def times(self, factor: float) -> AttentionRates:
        """Returns the rates of a kernel that is `factor` times as fast."""
        return AttentionRates(forward=factor * self.forward, backward=factor * self.backward)

    def flops_per_s(self, *, head_dim: int, length: int, causal: bool, backward: bool) -> float:
        """Returns the FLOP/s of a kernel over documents of `length` tokens."""
        forward_rates, causal_rates, backward_rates = _RATES[64 if head_dim <= 64 else 128]
        rate = _at(backward_rates if backward else forward_rates, length)
        if causal:
            rate *= _at(causal_rates, length) / _at(forward_rates, length)
        used = head_dim / (32 * math.ceil(head_dim / 32))  # kernels compute multiples of 32 columns
        rate *= used * (_LARGE_HEADS if head_dim > 128 else 1.0)
        return 1e12 * rate * (self.backward if backward else self.forward)


def _at(rates: tuple[int, ...], length: int) -> float:
    """Interpolates in the logarithm of the length; shorter documents lose in proportion to their length."""
    if length <= _LENGTHS[0]:
        return rates[0] * length / _LENGTHS[0]
    if length >= _LENGTHS[-1]:
        return rates[-1]
    place = bisect.bisect_left(_LENGTHS, length)
    share = math.log2(length / _LENGTHS[place - 1])
    return rates[place - 1] + share * (rates[place] - rates[place - 1])
