# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the parallel plan: which ranks compute which layer, and how. Importing this package loads no torch."""

from galvatron_hf.plan.plan import ParallelPlan
from galvatron_hf.plan.strategies import LayerStrategy, Precision, SequenceGroups, Stage, VocabularyStrategy


__all__ = ["LayerStrategy", "ParallelPlan", "Precision", "SequenceGroups", "Stage", "VocabularyStrategy"]
