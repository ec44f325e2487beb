# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model families: one adapter each, as a table."""

from galvatron_hf.parallel.models.adapter import DecoderAdapter, Fused, FusedProjection, Heads, LogitTransform, Style
from galvatron_hf.parallel.models.families import adapter_for


__all__ = ["DecoderAdapter", "Fused", "FusedProjection", "Heads", "LogitTransform", "Style", "adapter_for"]
