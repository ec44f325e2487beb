# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs a copy of a model whose layers and head are stand-ins, and keeps what they were called with. The stand-ins need
no weights: a model of any size, on the meta device too, runs in milliseconds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import base_model
from galvatron_hf.models.input_names import AUDIO, IMAGES
from galvatron_hf.models.losses import logits_of


ROWS, LENGTH = 4, 3  # of the batch that is tried; different, so that shapes tell rows from positions
SAMPLES = 2000  # of a recording that is tried: some positions of the usual convolutions
LARGEST_RETURN = 6  # entries of a tuple that a layer may return


def takes_images(model: PreTrainedModel) -> bool:
    """Tells whether a model's input is images [B, C, H, W]."""
    return model.main_input_name == IMAGES


def takes_audio(model: PreTrainedModel) -> bool:
    """Tells whether a model's input is the samples of recordings [B, samples], of any length."""
    return model.main_input_name == AUDIO and hasattr(model.config, "conv_stride")


def image_config(model: PreTrainedModel) -> str | None:
    """Returns the name of the configuration of images inside a model's; None if it has one alone, or no images."""
    inside = not hasattr(model.config, "image_size") and hasattr(model.config, "vision_config")
    return "vision_config" if takes_images(model) and inside else None


def image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Returns channels, height and width of the images that a model takes."""
    name = image_config(model)
    config = getattr(model.config, name) if name else model.config
    size = getattr(config, "image_size", None)
    if size is None:
        raise ValueError(
            f"{type(model).__name__} takes images of no fixed size, whose patches no plan splits yet; train it with "
            "transformers.Trainer."
        )
    height, width = (size, size) if isinstance(size, int) else size
    return config.num_channels, height, width


def has_language_head(model: PreTrainedModel) -> bool:
    """Tells whether a model makes the logits of tokens by one module."""
    return isinstance(getattr(model.get_output_embeddings(), "weight", None), nn.Parameter)


@dataclass
class Seen:
    """Holds what one run of a model has shown.

    Attributes:
        calls (`list[int]`): the layers called, in order.
        arguments (`dict[int, dict]`): those of each layer, by name.
        hidden (`dict[int, Any]`): the first argument of each layer.
        head_inputs (`list[torch.Tensor]`): what the head was called with.
        modules (`dict[str, set[str]]`): when each module with weights was called: "before", "between" or "after".
        phase (`str`): when the run is.
    """

    count: int
    calls: list[int] = field(default_factory=list)
    arguments: dict[int, dict[str, Any]] = field(default_factory=dict)
    hidden: dict[int, Any] = field(default_factory=dict)
    head_inputs: list[torch.Tensor] = field(default_factory=list)
    modules: dict[str, set[str]] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        if not self.calls:
            return "before"
        return "after" if self.calls[-1] == self.count - 1 else "between"


@dataclass(frozen=True, kw_only=True)
class Form:
    """Describes what stand-ins return: the hidden states, or a tuple of `returns` entries, of which those after the
    hidden states are numbers that can be recognised if `filled`, else None.
    """

    returns: int | None
    filled: bool = True


FORMS = (
    Form(returns=None),
    *(Form(returns=entries) for entries in range(1, LARGEST_RETURN + 1)),
    *(Form(returns=entries, filled=False) for entries in range(2, LARGEST_RETURN + 1)),
)


class LayerSpy(nn.Module):
    """Stands for a layer: keeps what it is called with, and returns given hidden states."""

    def __init__(self, index: int, layer: nn.Module, form: Form):
        super().__init__()
        self.index, self.form, self.seen = index, form, None
        self._layer = (layer,)  # in a tuple, so that it is no submodule
        self.signature = inspect.signature(layer.forward)

    @property
    def layer(self) -> nn.Module:
        return self._layer[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def __deepcopy__(self, memo: dict) -> LayerSpy:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, rest = bound_arguments(self.signature, args, kwargs)
        self.seen.calls.append(self.index)
        self.seen.hidden[self.index], self.seen.arguments[self.index] = hidden, rest
        output = numbers(hidden.shape, self.index)
        if self.form.returns is None:
            return output
        more = range(1, self.form.returns)
        return output, *(numbers((1,), 100 + self.index + entry) if self.form.filled else None for entry in more)


def bound_arguments(signature: inspect.Signature, args: tuple, kwargs: dict) -> tuple[Any, dict[str, Any]]:
    """Returns the first argument of a call, and the others by name."""
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    first = next(iter(signature.parameters))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments.pop(first), arguments


class Twin:
    """Runs a copy of a model on the CPU whose layers and head are stand-ins; other weights take no memory."""

    def __init__(self, model: PreTrainedModel, layers: str, form: Form):
        whole = model.get_submodule(layers)
        self.spies = [LayerSpy(index, layer, form) for index, layer in enumerate(whole)]
        memo: dict[int, Any] = {id(layer): spy for layer, spy in zip(whole, self.spies, strict=True)}
        for number, parameter in enumerate(_outside(model.named_parameters(), layers)):
            memo[id(parameter)] = nn.Parameter(_view_of_few(parameter.shape, number), requires_grad=False)
        for number, buffer in enumerate(_outside(model.named_buffers(), layers)):
            is_empty = buffer.device.type == "meta"
            values = _view_of_few(buffer.shape, number).to(buffer.dtype) if is_empty else buffer.detach().cpu()
            memo[id(buffer)] = values
        self.model, self.layers, self.form = copy.deepcopy(model, memo), layers, form
        self.head = self.model.get_output_embeddings() if has_language_head(model) else None
        self.images = numbers((ROWS, *image_shape(model)), 3) if takes_images(model) else None
        self.audio = numbers((ROWS, SAMPLES), 3) if takes_audio(model) else None
        self.takes_tokens = self.images is None and self.audio is None
        self.length: int | None = LENGTH if self.takes_tokens else None  # positions of the hidden states
        self.vocabulary = LENGTH
        if self.takes_tokens:
            self.vocabulary = (self.model.get_input_embeddings() if self.head is None else self.head).weight.shape[0]
        self.model.train(self.head is not None)  # what follows the layers of other models may have dropout
        self.labels: dict[str, torch.Tensor] = {}

    @property
    def config(self) -> PreTrainedConfig:
        """Returns the configuration of the layers of a model of texts."""
        return base_model(self.model).config.get_text_config()

    def run(self, changes: Mapping[str, nn.Module] | None = None, slots: Sequence[nn.Module] | None = None):
        """Runs the model's forward with labels; `changes` replace modules, `slots` the layers. Returns what was seen
        and the model's output.
        """
        ids = torch.arange(1, 1 + ROWS * LENGTH).view(ROWS, LENGTH).clamp(max=self.vocabulary - 1)
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
        self.raw = numbers((ROWS, LENGTH, self.vocabulary), 7) * 10
        self.ids, self.mask = ids, mask if self.takes_tokens else None
        given = dict(input_ids=ids, attention_mask=mask) if self.takes_tokens else {}
        given |= {} if self.images is None else {IMAGES: self.images}
        given |= {} if self.audio is None else {AUDIO: self.audio}
        labels = {"labels": ids} if self.head is not None else self.labels
        seen, output = self._watch({**given, **labels}, changes, slots)
        if self.length is None and isinstance(seen.hidden.get(0), torch.Tensor):
            self.length = seen.hidden[0].shape[1]
        return seen, output

    def look(self, **given: Any) -> Seen:
        """Runs the model's forward on given tensors without labels, and returns what was seen."""
        return self._watch(given)[0]

    def _watch(
        self,
        given: Mapping[str, Any],
        changes: Mapping[str, nn.Module] | None = None,
        slots: Sequence[nn.Module] | None = None,
    ) -> tuple[Seen, Any]:
        seen, twin = Seen(count=len(self.spies)), self.model
        self.seen = seen
        for spy in self.spies:
            spy.seen = seen
        whole = twin.get_submodule(self.layers)
        old = {name: twin.get_submodule(name) for name in changes or {}}
        handles = [
            module.register_forward_pre_hook(
                lambda *unused, name=name: seen.modules.setdefault(name, set()).add(seen.phase)
            )
            for name, module in owners_of_weights(twin, self.layers)
        ]
        if self.head is not None:
            self.head.forward = lambda states: seen.head_inputs.append(states) or self.raw.clone()
        try:
            for name, module in (changes or {}).items():
                twin.set_submodule(name, module)
            if slots is not None:
                twin.set_submodule(self.layers, nn.ModuleList(slots))
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = twin(**given, **forward_options(type(twin)))
        finally:
            if self.head is not None:
                del self.head.forward
            twin.set_submodule(self.layers, whole)
            for name, module in old.items():
                twin.set_submodule(name, module)
            for handle in handles:
                handle.remove()
        if self.head is None:
            seen.head_inputs.append(logits_of(output))
        return seen, output


def forward_options(family: type[PreTrainedModel]) -> dict[str, Any]:
    """Returns the options with which a family's own forward is called: it returns neither a cache nor more outputs."""
    given = dict(use_cache=False, return_dict=True, output_router_logits=False)
    known = inspect.signature(family.forward).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    return {
        name: value for name, value in given.items() if name in known or (takes_all and name != "output_router_logits")
    }


def _outside(tensors: Iterator[tuple[str, torch.Tensor]], layers: str) -> Iterator[torch.Tensor]:
    return (tensor for name, tensor in tensors if not name.startswith(f"{layers}."))


def owners_of_weights(model: nn.Module, layers: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules outside the layers that have weights of their own, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if not name.startswith(f"{layers}.") and next(module.parameters(recurse=False), None) is not None
    ]


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Returns normally distributed numbers of a shape, other ones for each seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _view_of_few(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Returns different numbers of a shape that overlap in memory."""
    few = 0.3 * numbers((sum(shape) + 1,), seed)
    return few.as_strided(tuple(shape), (1,) * len(shape))
