# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out how a model runs its layers, by running its own forward on a few tokens with stand-ins for layers and
head. The stand-ins need no weights: a model of any size, on the meta device too, is looked at in milliseconds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from galvatron_hf.models.losses import IGNORED, NEXT_TOKEN, SAME_POSITION, SPAN, LossKind, logits_of, row_loss
from galvatron_hf.models.slots import AbsentModule, LayerSlot, StageInput
from galvatron_hf.utils.compat import tree_leaves


ROWS, LENGTH = 2, 3  # of the batch that is tried; different, so that shapes tell rows from positions
LARGEST_RETURN = 6  # entries of a tuple that a layer may return


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Describes how a language model runs its layers. Names are those inside the model.

    Attributes:
        layers (`str`): the module list whose modules are called once each, in order.
        first (`str`): the name of a layer's first argument, the hidden states.
        features (`int`): features of the hidden states.
        returns (`int`, *optional*): the number of entries of a tuple that a layer may return, the hidden states first;
            None if it returns the hidden states.
        before, after (`tuple[str, ...]`): modules with weights of their own that are called before the first layer, or
            after the last one; without the head.
        unused (`tuple[str, ...]`): modules with weights of their own that a forward of token ids does not call.
        head (`str`): the module that makes the logits, or what the family makes them of.
        inputs (`frozenset[str]`): the names of the arguments of the family's forward.
        loss ([`LossKind`]): the loss that the family computes.
        logits (`torch.Tensor`, *optional*): what the family makes of `raw`, which is [1, tokens], as the head of a
            language model would return it; None for other models.
        pipeline_obstacle (`str`, *optional*): why no stage can begin inside the list of layers.
    """

    layers: str
    first: str
    features: int
    returns: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    unused: tuple[str, ...]
    head: str
    inputs: frozenset[str]
    loss: LossKind
    raw: torch.Tensor | None = field(compare=False, repr=False)
    logits: torch.Tensor | None = field(compare=False, repr=False)
    pipeline_obstacle: str | None


@dataclass
class _Seen:
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
class _Form:
    """Describes what stand-ins return: the hidden states, or a tuple of `returns` entries, of which those after the
    hidden states are numbers that can be recognised if `filled`, else None.
    """

    returns: int | None
    filled: bool = True


_FORMS = (
    _Form(returns=None),
    *(_Form(returns=entries) for entries in range(1, LARGEST_RETURN + 1)),
    *(_Form(returns=entries, filled=False) for entries in range(2, LARGEST_RETURN + 1)),
)


class _LayerSpy(nn.Module):
    """Stands for a layer: keeps what it is called with, and returns given hidden states."""

    def __init__(self, index: int, layer: nn.Module, form: _Form):
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

    def __deepcopy__(self, memo: dict) -> _LayerSpy:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, rest = bound_arguments(self.signature, args, kwargs)
        self.seen.calls.append(self.index)
        self.seen.hidden[self.index], self.seen.arguments[self.index] = hidden, rest
        output = _numbers(hidden.shape, self.index)
        if self.form.returns is None:
            return output
        more = range(1, self.form.returns)
        return output, *(_numbers((1,), 100 + self.index + entry) if self.form.filled else None for entry in more)


def bound_arguments(signature: inspect.Signature, args: tuple, kwargs: dict) -> tuple[Any, dict[str, Any]]:
    """Returns the first argument of a call, and the others by name."""
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    first = next(iter(signature.parameters))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments.pop(first), arguments


def find_structure(model: PreTrainedModel) -> Structure:
    """Runs a model's own forward with stand-ins, and returns how it runs its layers.

    Raises:
        ValueError: if the model has no list of layers that are called once each, computes an unknown loss, or does not
            run.
    """
    name, reasons = type(model).__name__, []
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        raise ValueError(
            f"{name} has no module that looks up its tokens, so its embedding cannot be placed; train it with "
            "transformers.Trainer."
        ) from None
    known = inspect.signature(type(model).forward).parameters
    if not has_language_head(model) and not {"labels", *SPAN.names} & set(known):
        raise ValueError(
            f"{name} has no head with a loss of labels; use a class with one, such as AutoModelForCausalLM or "
            "AutoModelForSequenceClassification."
        )
    _check_random_layers(model)
    for layers in _module_lists(model):
        for form in _FORMS:
            twin = _Twin(model, layers, form)
            try:
                seen, output = twin.run()
            except Exception as error:  # of a family's forward: any
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            else:
                reason = _chain_obstacle(seen, twin.head is not None)
                if reason is None:
                    return _structure(model, twin, seen, output)
            reasons.append((len(twin.seen.calls), reason))
    reason = f" ({max(reasons, key=lambda one: one[0])[1]})" if reasons else ""
    raise ValueError(
        f"{name} has no list of layers that its forward calls once each, one after the other{reason}; train it with "
        "transformers.Trainer."
    )


def has_language_head(model: PreTrainedModel) -> bool:
    """Tells whether a model makes the logits of tokens by one module."""
    return isinstance(getattr(model.get_output_embeddings(), "weight", None), nn.Parameter)


def _check_random_layers(model: PreTrainedModel) -> None:
    """Refuses layers that are left out at random: ranks would wait for each other's weights."""
    for name, module in model.named_modules():
        rate = vars(module).get("layerdrop", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            raise ValueError(
                f"{type(model).__name__} leaves out layers at random, by the layerdrop of {rate} of its {name}; set "
                "it to 0.0 in the configuration."
            )


def _module_lists(model: PreTrainedModel) -> list[str]:
    """Returns the names of lists of modules with weights that are in no other list, the likeliest first."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            sizes = [sum(p.numel() for p in one.parameters()) for one in module]
            if all(sizes):
                found[name] = sum(sizes)
    return sorted(found, key=lambda name: -found[name])[:4]


class _Twin:
    """Runs a copy of a model on the CPU whose layers and head are stand-ins; other weights take no memory."""

    def __init__(self, model: PreTrainedModel, layers: str, form: _Form):
        whole = model.get_submodule(layers)
        self.spies = [_LayerSpy(index, layer, form) for index, layer in enumerate(whole)]
        memo: dict[int, Any] = {id(layer): spy for layer, spy in zip(whole, self.spies, strict=True)}
        for number, parameter in enumerate(_outside(model.named_parameters(), layers)):
            memo[id(parameter)] = nn.Parameter(_view_of_few(parameter.shape, number), requires_grad=False)
        for number, buffer in enumerate(_outside(model.named_buffers(), layers)):
            is_empty = buffer.device.type == "meta"
            numbers = _view_of_few(buffer.shape, number).to(buffer.dtype) if is_empty else buffer.detach().cpu()
            memo[id(buffer)] = numbers
        self.model, self.layers, self.form = copy.deepcopy(model, memo), layers, form
        self.head = self.model.get_output_embeddings() if has_language_head(model) else None
        self.vocabulary = (self.model.get_input_embeddings() if self.head is None else self.head).weight.shape[0]
        self.model.train(self.head is not None)  # what follows the layers of other models may have dropout
        self.labels: dict[str, torch.Tensor] = {}

    def run(self, changes: Mapping[str, nn.Module] | None = None, slots: Sequence[nn.Module] | None = None):
        """Runs the model's forward with labels; `changes` replace modules, `slots` the layers. Returns what was seen
        and the model's output.
        """
        seen, twin = _Seen(count=len(self.spies)), self.model
        self.seen = seen
        for spy in self.spies:
            spy.seen = seen
        whole = twin.get_submodule(self.layers)
        old = {name: twin.get_submodule(name) for name in changes or {}}
        handles = [
            module.register_forward_pre_hook(
                lambda *unused, name=name: seen.modules.setdefault(name, set()).add(seen.phase)
            )
            for name, module in _owners_of_weights(twin, self.layers)
        ]
        ids = torch.arange(1, 1 + ROWS * LENGTH).view(ROWS, LENGTH).clamp(max=self.vocabulary - 1)
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
        raw = _numbers((ROWS, LENGTH, self.vocabulary), 7) * 10
        labels = {"labels": ids} if self.head is not None else self.labels
        if self.head is not None:
            self.head.forward = lambda states: seen.head_inputs.append(states) or raw.clone()
        try:
            for name, module in (changes or {}).items():
                twin.set_submodule(name, module)
            if slots is not None:
                twin.set_submodule(self.layers, nn.ModuleList(slots))
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = twin(input_ids=ids, attention_mask=mask, **labels, **forward_options(type(twin)))
        finally:
            if self.head is not None:
                del self.head.forward
            twin.set_submodule(self.layers, whole)
            for name, module in old.items():
                twin.set_submodule(name, module)
            for handle in handles:
                handle.remove()
        self.ids, self.raw = ids, raw
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


def _owners_of_weights(model: nn.Module, layers: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules outside the layers that have weights of their own, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if not name.startswith(f"{layers}.") and next(module.parameters(recurse=False), None) is not None
    ]


def _numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _view_of_few(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Returns different numbers of a shape that overlap in memory."""
    few = 0.3 * _numbers((sum(shape) + 1,), seed)
    return few.as_strided(tuple(shape), (1,) * len(shape))


def _chain_obstacle(seen: _Seen, has_language_head: bool) -> str | None:
    """Says why a run does not show layers that are called one after the other; None if it does."""
    if seen.calls != list(range(seen.count)):
        return f"it calls the layers {seen.calls[:8]} of {seen.count}"
    shapes = {tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else None for hidden in seen.hidden.values()}
    if len(shapes) > 1 or None in shapes or len(next(iter(shapes))) < 3:
        return "its layers are not called with hidden states of one shape"
    if has_language_head and (len(seen.head_inputs) != 1 or seen.head_inputs[0].shape[:2] != (ROWS, LENGTH)):
        return "its head is not called once with the hidden states of every position"
    logits = seen.head_inputs[0] if seen.head_inputs else None
    if not has_language_head and tuple(getattr(logits, "shape", ()))[:-1] not in ((ROWS,), (ROWS, LENGTH)):
        return "it returns neither logits of rows nor of positions"
    return None


def _structure(model: PreTrainedModel, twin: _Twin, seen: _Seen, output: Any) -> Structure:
    owners = [name for name, _ in _owners_of_weights(twin.model, twin.layers)]
    head = _head_name(model, twin, [name for name in owners if seen.modules.get(name) == {"after"}])
    owners.remove(head)
    times = {name: seen.modules.get(name, set()) for name in owners}
    structure = Structure(
        layers=twin.layers,
        first=next(iter(twin.spies[0].signature.parameters)),
        features=seen.hidden[0].shape[-1],
        returns=twin.form.returns,
        before=tuple(name for name in owners if times[name] == {"before"}),
        after=tuple(name for name in owners if times[name] == {"after"}),
        unused=tuple(name for name in owners if not times[name]),
        head=head,
        inputs=frozenset(inspect.signature(type(model).forward).parameters),
        loss=_loss(model, twin, output) if twin.head is not None else _loss_of_task(model, twin, output),
        raw=None if twin.head is None else twin.raw[:1].clone(),
        logits=None if twin.head is None else output.logits[:1].clone(),
        pipeline_obstacle=None,
    )
    mixed = [name for name in owners if len(times[name]) > 1 or "between" in times[name]]
    mixed += [name for name in structure.before if f"{twin.layers}.".startswith(f"{name}.")]
    return replace(structure, pipeline_obstacle=_pipeline_obstacle(twin, structure, seen, mixed))


def _head_name(model: PreTrainedModel, twin: _Twin, after: Sequence[str]) -> str:
    """Returns the name of the head: without one of a language model, of the last module with a weight that is called
    after the layers.
    """
    if twin.head is not None:
        return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    last = next((name for name in reversed(after) if hasattr(model.get_submodule(name), "weight")), None)
    if last is None:
        raise ValueError(f"{type(model).__name__} has no head after its layers; use a class with one.")
    return last


def _loss_of_task(model: PreTrainedModel, twin: _Twin, output: Any) -> LossKind:
    """Returns the kind of loss that a classifier of rows or of positions computes of its logits."""
    name, logits, kind = type(model).__name__, logits_of(output), None
    classes = 0 if logits is None else logits.shape[-1]
    if logits is not None and logits.shape == (ROWS, classes):
        kind = row_loss(classes, getattr(model.config, "problem_type", None))
        labels = torch.arange(ROWS) % classes if classes > 1 else torch.arange(ROWS).float()
        if kind.problem == "multi_label_classification":
            labels = torch.arange(ROWS * classes).view(ROWS, classes).remainder(2).float()
        elif kind.problem == "regression" and classes > 1:
            labels = torch.arange(ROWS * classes).view(ROWS, classes).float()
        twin.labels = {kind.labels: labels}
    elif getattr(output, "start_logits", None) is not None and logits.shape == (ROWS, LENGTH, classes):
        kind = SPAN
        twin.labels = {kind.labels: torch.tensor([0, LENGTH]), kind.last: torch.tensor([LENGTH - 1, LENGTH + 2])}
    elif logits is not None and logits.shape == (ROWS, LENGTH, classes):
        kind = replace(SAME_POSITION, output=TokenClassifierOutput)
        labels = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % classes
        labels[0, 1] = IGNORED
        twin.labels = {kind.labels: labels}
    if kind is None:
        raise ValueError(
            f"{name} returns neither logits of rows nor of positions; train it with transformers.Trainer."
        )
    _, labelled = twin.run()
    targets = kind.targets_of({"input_ids": twin.ids, **twin.labels})
    wanted = kind.sum_of_logits(logits_of(labelled), targets) / kind.count(targets)
    twin.labels = {}
    if not torch.allclose(labelled.loss, wanted, rtol=1e-4):
        raise ValueError(f"{name} computes a loss that no adapter covers; train it with transformers.Trainer.")
    return kind


def _loss(model: PreTrainedModel, twin: _Twin, output: Any) -> LossKind:
    """Returns the kind of loss that a family computes of its logits."""
    name = type(model).__name__
    if getattr(output, "logits", None) is None or output.logits.shape != twin.raw.shape:
        raise ValueError(
            f"{name} returns no logits [rows, positions, vocabulary]; train it with transformers.Trainer."
        )
    for kind in (NEXT_TOKEN, SAME_POSITION):
        targets = kind.make_targets(twin.ids)
        wanted = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        if torch.allclose(output.loss, wanted, rtol=1e-4):
            return kind
    raise ValueError(
        f"{name} computes another loss than the cross-entropy of its labels, shifted or not; train it with "
        "transformers.Trainer."
    )


def _pipeline_obstacle(twin: _Twin, structure: Structure, seen: _Seen, mixed: list[str]) -> str | None:
    """Says why no stage can begin inside the list of layers; None if it can. Runs the model as a later stage would,
    and compares what its layers and its head get.
    """
    if seen.hidden[0].ndim != 3 or seen.hidden[0].shape[:2] != (ROWS, LENGTH):
        return "its hidden states have other dimensions than rows, positions and features"
    if not twin.form.filled:
        return "its layers return more than hidden states, and it is not clear which layer gets it"
    if mixed:
        return f"its {mixed[0]} has weights that are used beside several layers"
    if len({next(iter(spy.signature.parameters)) for spy in twin.spies}) > 1:
        return "its layers name their hidden states differently"
    count, layers = len(twin.spies), [spy.layer for spy in twin.spies]
    absent = {name: AbsentModule(twin.model.get_submodule(name)) for name in structure.before}
    form = structure.first, structure.returns
    for start in sorted({1, count // 2, count - 1} - {0}):
        received = _numbers(seen.hidden[0].shape, start - 1)
        slots = [LayerSlot(layer, *form) for layer in layers[: start - 1]]
        slots.append(StageInput(layers[start - 1], *form, enter=lambda received=received: received))
        try:
            late, _ = twin.run(absent, [*slots, *twin.spies[start:]])
        except Exception as error:  # of a family's forward: any
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            return f"its forward does not run without its first layers ({problem})"
        for index in range(start, count):
            names = {None: seen.hidden[index], **seen.arguments[index]}
            others = {None: late.hidden[index], **late.arguments[index]}
            wrong = [name for name, value in names.items() if not _equal(value, others.get(name))]
            changeable = [name for name, value in names.items() if isinstance(value, (dict, list))]
            if changeable:
                return f"its layers get {changeable[0]!r}, which they may change"
            if wrong:
                return f"its layer {index} gets {wrong[0] or 'hidden states'!r} that follow from earlier layers"
        if not _equal(seen.head_inputs, late.head_inputs):
            return "it uses more than the last layer's hidden states after its layers"
    return None


def _equal(first: Any, second: Any) -> bool:
    """Tells whether two arguments, tensors or nests of them, are the same."""
    pairs = tree_leaves(first), tree_leaves(second)
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(_same_leaf(one, other) for one, other in zip(*pairs, strict=True))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return one == other if isinstance(one, (bool, int, float, str)) else True
