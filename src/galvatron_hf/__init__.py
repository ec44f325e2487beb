# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Automatic hybrid-parallel training of Hugging Face models."""

from galvatron_hf.parallel.apply import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan

__all__ = ["LayerStrategy", "ParallelPlan", "parallelize"]
