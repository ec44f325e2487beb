# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Automatic hybrid-parallel training of Hugging Face models.

A public name loads its module at its first use, so that plans, the planner and the command line need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from galvatron_hf.parallel.parallelize import parallelize
    from galvatron_hf.plan import LayerStrategy, ParallelPlan
    from galvatron_hf.planner.estimate import estimate_plan
    from galvatron_hf.planner.search import search_plan
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

_NAMES = {
    "parallel.parallelize": ("parallelize",),
    "plan": ("LayerStrategy", "ParallelPlan"),
    "planner.estimate": ("estimate_plan",),
    "planner.search": ("search_plan",),
    "profiler.cache": ("load_or_profile_hardware", "load_or_profile_model"),
    "profiler.measure.hardware": ("profile_hardware",),
    "profiler.measure.model": ("profile_model",),
    "profiler.profiles.hardware": ("HardwareProfile",),
    "profiler.profiles.model": ("ModelProfile",),
    "trainer.arguments": ("GalvatronSeq2SeqTrainingArguments", "GalvatronTrainingArguments"),
    "trainer.trainer": ("GalvatronMixin", "GalvatronSeq2SeqTrainer", "GalvatronTrainer"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
