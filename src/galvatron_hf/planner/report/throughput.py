# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes what a predicted step means to people: tokens/s, MFU, days, device-hours and a price."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_hf.models.shape import product_elements
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.devices import known_device
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.layers import LayerProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Holds the pace of a predicted step.

    Attributes:
        tokens_per_second (`float`): Tokens of all devices.
        devices (`int`): Number of devices.
        mfu (`float` or None): Model FLOP/s over the peak of the data sheet; None for an unknown device or for images.
    """

    tokens_per_second: float
    devices: int
    mfu: float | None

    @property
    def tokens_per_second_and_device(self) -> float:
        return self.tokens_per_second / self.devices

    def days(self, tokens: float) -> float:
        """Returns the days that so many tokens take."""
        return tokens / self.tokens_per_second / 86_400

    def device_hours(self, tokens: float) -> float:
        """Returns the hours that so many tokens take, summed over the devices."""
        return tokens / self.tokens_per_second / 3_600 * self.devices

    def lines(self, tokens: float | None = None, price_per_hour: float | None = None) -> tuple[str, ...]:
        """Returns the pace as text, and what a run of `tokens` takes; `price_per_hour` is that of one device."""
        pace = f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second_and_device:,.0f} a device"
        pace += " (predicted)" if self.mfu is None else f", {self.mfu:.0%} MFU (predicted)"
        if tokens is None:
            return (pace,)
        hours = self.device_hours(tokens)
        cost = "" if price_per_hour is None else f", {amount(hours * price_per_hour)} at {price_per_hour:g} an hour"
        run = f"{tokens:.3g} tokens: {amount(self.days(tokens), 1)} days, {amount(hours)} device-hours{cost}"
        return pace, f"{run} (predicted, without interruptions)"

    def values(self, tokens: float | None = None, price_per_hour: float | None = None) -> dict[str, float | None]:
        """Returns the same as JSON values."""
        pace = {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        pace["tokens_per_second_and_device"] = self.tokens_per_second_and_device
        if tokens is None:
            return pace
        hours = self.device_hours(tokens)
        cost = {} if price_per_hour is None else {"price": hours * price_per_hour}
        return pace | {"days": self.days(tokens), "device_hours": hours} | cost


def throughput_of(hardware: HardwareProfile, model: ModelProfile, workload: Workload, step_ms: float) -> Throughput:
    """Returns the pace of a step of `step_ms`."""
    seconds, device = step_ms / 1e3, known_device(hardware)
    mfu = None
    if device is not None and model.dtype in device.peak_flops and not model.images:
        mfu = model_flops(model, workload) / (seconds * hardware.world_size * device.peak_flops[model.dtype])
    return Throughput(
        tokens_per_second=workload.rows * workload.computed_length / seconds, devices=hardware.world_size, mfu=mfu
    )


def model_flops(model: ModelProfile, workload: Workload) -> float:
    """Returns the FLOPs of a step as PaLM counts them (arXiv 2204.02311, appendix B): 6 for each token and weight of a
    matrix product, and 12 for each pair of tokens and dimension of the heads, without recompute and without regard to
    the causal mask. Of experts those count that a token chooses.
    """
    tokens = workload.rows * workload.computed_length
    pairs = workload.rows * workload.computed_square
    width = model.heads * model.head_dim
    layers = sum(
        6
        * product_elements(model.kinds[kind].weights, _chosen(model.kinds[kind]))
        * tokens
        * model.kinds[kind].length_ratio
        + 12 * width * pairs * model.kinds[kind].length_ratio ** 2
        for kind in model.layers
    )
    return layers + 6 * product_elements(model.head.weights) * tokens * model.head.length_ratio


def _chosen(layer: LayerProfile) -> float:
    """Returns the share of its experts that a token chooses."""
    return 1.0 if layer.experts is None else layer.experts.top_k / layer.experts.count


def amount(value: float, digits: int = 0) -> str:
    """Returns a number for people, with two digits if it is small: that of a short run is not shown as 0."""
    return f"{value:,.{digits}f}" if value >= 10 else f"{value:.2g}"
