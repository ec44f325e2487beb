# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out how a model runs its layers, by running its own forward on a few tokens with stand-ins for layers and
head. The stand-ins need no weights: a model of any size, on the meta device too, is looked at in milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from galvatron_hf.models.layer_arguments import Arguments, find_arguments
from galvatron_hf.models.losses import IGNORED, NEXT_TOKEN, SAME_POSITION, SPAN, LossKind, logits_of, row_loss
from galvatron_hf.models.packed_trial import find_packing
from galvatron_hf.models.packing import Packing
from galvatron_hf.models.slots import LayerSlot, StageInput, absent
from galvatron_hf.models.trial_run import (
    FORMS,
    LENGTH,
    ROWS,
    Seen,
    Twin,
    has_language_head,
    numbers,
    owners_of_weights,
    takes_audio,
    takes_images,
)
from galvatron_hf.utils.compat import tree_leaves


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        arguments ([`Arguments`]): what the layers are called with.
        packing ([`Packing`]): how rows become documents of one row.
        images (`tuple[int, int, int]`, *optional*): channels, height and width of the images that the model takes
            instead of tokens, and `positions` of the hidden states that it makes of one.
        audio (`bool`): whether it takes the samples of recordings instead of tokens, which may have any length.
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
    arguments: Arguments
    packing: Packing
    images: tuple[int, int, int] | None = None
    positions: int | None = None
    audio: bool = False

    @property
    def takes_tokens(self) -> bool:
        return self.images is None and not self.audio


def find_structure(model: PreTrainedModel) -> Structure:
    """Runs a model's own forward with stand-ins, and returns how it runs its layers.

    Raises:
        ValueError: if the model has no list of layers that are called once each, computes an unknown loss, or does not
            run.
    """
    name, reasons = type(model).__name__, []
    try:
        looks_up = takes_images(model) or takes_audio(model) or hasattr(model.get_input_embeddings(), "weight")
    except NotImplementedError:
        looks_up = False
    if not looks_up:
        raise ValueError(
            f"{name} has no module that looks up its tokens, so its embedding cannot be placed; train it with "
            "transformers.Trainer."
        )
    known = inspect.signature(type(model).forward).parameters
    if not has_language_head(model) and not {"labels", *SPAN.names} & set(known):
        raise ValueError(
            f"{name} has no head with a loss of labels; use a class with one, such as AutoModelForCausalLM or "
            "AutoModelForSequenceClassification."
        )
    _check_random_layers(model)
    _check_batch_statistics(model)
    for layers in _module_lists(model):
        for form in FORMS:
            twin = Twin(model, layers, form)
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


def _check_random_layers(model: PreTrainedModel) -> None:
    """Refuses layers that are left out at random: ranks would wait for each other's weights."""
    for name, module in model.named_modules():
        of_config = getattr(getattr(module, "config", None), "layerdrop", 0.0)
        rate = vars(module).get("layerdrop", of_config)
        if isinstance(rate, float) and rate > 0.0:
            raise ValueError(
                f"{type(model).__name__} leaves out layers at random, by the layerdrop of {rate} of its "
                f"{name or 'configuration'}; set it to 0.0 in the configuration."
            )


def _check_batch_statistics(model: PreTrainedModel) -> None:
    """Refuses norms by the mean and variance of a batch, of which each rank has a part."""
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS):
            raise ValueError(
                f"{type(model).__name__} norms by the statistics of a whole batch in its {name}, and a rank has some "
                "rows of it; train it with transformers.Trainer."
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


def _chain_obstacle(seen: Seen, has_language_head: bool) -> str | None:
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


def _structure(model: PreTrainedModel, twin: Twin, seen: Seen, output: Any) -> Structure:
    owners = [name for name, _ in owners_of_weights(twin.model, twin.layers)]
    head = _head_name(model, twin, [name for name in owners if seen.modules.get(name) == {"after"}])
    owners.remove(head)
    times = {name: _times(name, owners, seen) for name in owners}
    inputs = frozenset(inspect.signature(type(model).forward).parameters)
    loss = _loss(model, twin, output) if twin.head is not None else _loss_of_task(model, twin, output)
    arguments = find_arguments(twin, seen)
    structure = Structure(
        layers=twin.layers,
        first=next(iter(twin.spies[0].signature.parameters)),
        features=seen.hidden[0].shape[-1],
        returns=twin.form.returns,
        before=tuple(name for name in owners if times[name] == {"before"}),
        after=tuple(name for name in owners if times[name] == {"after"}),
        unused=tuple(name for name in owners if not times[name]),
        head=head,
        inputs=inputs,
        loss=loss,
        raw=None if twin.head is None else twin.raw[:1].clone(),
        logits=None if twin.head is None else output.logits[:1].clone(),
        pipeline_obstacle=None,
        arguments=arguments,
        packing=find_packing(twin, loss, inputs, arguments.causal),
        images=None if twin.images is None else tuple(twin.images.shape[1:]),
        positions=None if twin.images is None else twin.length,
        audio=twin.audio is not None,
    )
    mixed = [name for name in owners if len(times[name]) > 1 or "between" in times[name]]
    mixed += [name for name in structure.before if f"{twin.layers}.".startswith(f"{name}.")]
    return replace(structure, pipeline_obstacle=_pipeline_obstacle(twin, structure, seen, mixed))


def _times(name: str, owners: Sequence[str], seen: Seen) -> set[str]:
    """Returns when a module is called; one that is not, when the module is that has it and may use its weights."""
    around = [owner for owner in owners if f"{name}.".startswith(f"{owner}.") and owner in seen.modules]
    return seen.modules[max(around, key=len)] if around else set()


def _head_name(model: PreTrainedModel, twin: Twin, after: Sequence[str]) -> str:
    """Returns the name of the head: without one of a language model, of the last module with a weight that is called
    after the layers.
    """
    if twin.head is not None:
        return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    last = next((name for name in reversed(after) if hasattr(model.get_submodule(name), "weight")), None)
    if last is None:
        raise ValueError(f"{type(model).__name__} has no head after its layers; use a class with one.")
    return last


def _loss_of_task(model: PreTrainedModel, twin: Twin, output: Any) -> LossKind:
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
        first = torch.arange(ROWS) % LENGTH
        first[-1] = LENGTH  # behind the row
        twin.labels = {kind.labels: first, kind.last: torch.arange(ROWS).flip(0) % LENGTH}
    elif logits is not None and logits.shape == (ROWS, LENGTH, classes):
        kind = replace(SAME_POSITION, output=TokenClassifierOutput)
        labels = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % classes
        labels[0, 1] = IGNORED
        twin.labels = {kind.labels: labels}
    if kind is None:
        raise ValueError(
            f"{name} returns neither logits of rows nor of positions; train it with transformers.Trainer."
        )
    try:
        _, labelled = twin.run()
    except Exception as error:  # of a family's loss: any
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ValueError(
            f"{name} computes no loss of the labels that its problem_type and num_labels ask for ({problem}); train "
            "it with transformers.Trainer."
        ) from None
    targets = kind.targets_of({"input_ids": twin.ids, **twin.labels})
    wanted = (kind.sum_of_logits(logits_of(labelled), targets) / kind.count(targets)).sum()
    twin.labels = {}
    if not torch.allclose(labelled.loss, wanted, rtol=1e-4):
        raise ValueError(f"{name} computes a loss that no adapter covers; train it with transformers.Trainer.")
    return kind


def _loss(model: PreTrainedModel, twin: Twin, output: Any) -> LossKind:
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


def _pipeline_obstacle(twin: Twin, structure: Structure, seen: Seen, mixed: list[str]) -> str | None:
    """Says why no stage can begin inside the list of layers; None if it can. Runs the model as a later stage would,
    and compares what its layers and its head get.
    """
    if twin.audio is not None:
        return "its positions are those of recordings of any length"
    if seen.hidden[0].ndim != 3 or seen.hidden[0].shape[:2] != (ROWS, twin.length):
        return "its hidden states have other dimensions than rows, positions and features"
    if not twin.form.filled:
        return "its layers return more than hidden states, and it is not clear which layer gets it"
    if mixed:
        return f"its {mixed[0]} has weights that are used beside several layers"
    if len({next(iter(spy.signature.parameters)) for spy in twin.spies}) > 1:
        return "its layers name their hidden states differently"
    count, layers = len(twin.spies), [spy.layer for spy in twin.spies]
    gone = {name: absent(twin.model.get_submodule(name)) for name in structure.before}
    form = structure.first, structure.returns
    for start in sorted({1, count // 2, count - 1} - {0}):
        received = numbers(seen.hidden[0].shape, start - 1)
        slots = [LayerSlot(layer, *form) for layer in layers[: start - 1]]
        slots.append(StageInput(layers[start - 1], *form, enter=lambda received=received: received))
        try:
            late, _ = twin.run(gone, [*slots, *twin.spies[start:]])
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
