# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Automatic hybrid-parallel training of Hugging Face models."""

from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from galvatron_hf.planner.search import estimate_plan, search_plan
from galvatron_hf.profiler.cache import load_or_profile_hardware, load_or_profile_model
from galvatron_hf.profiler.measure.hardware import profile_hardware
from galvatron_hf.profiler.measure.model import profile_model
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.trainer.arguments import GalvatronSeq2SeqTrainingArguments, GalvatronTrainingArguments
from galvatron_hf.trainer.trainer import GalvatronMixin, GalvatronSeq2SeqTrainer, GalvatronTrainer


__all__ = [
    "GalvatronMixin",
    "GalvatronSeq2SeqTrainer",
    "GalvatronSeq2SeqTrainingArguments",
    "GalvatronTrainer",
    "GalvatronTrainingArguments",
    "HardwareProfile",
    "LayerStrategy",
    "ModelProfile",
    "ParallelPlan",
    "estimate_plan",
    "load_or_profile_hardware",
    "load_or_profile_model",
    "parallelize",
    "profile_hardware",
    "profile_model",
    "search_plan",
]
