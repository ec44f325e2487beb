# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads weights from safetensors files: each rank reads its pieces, one tensor at a time. A weight may be joined from
several tensors, such as those of a layer's experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.loading_report import LoadStateDictInfo

from galvatron_hf.parallel.comm.objects import is_rank_0, on_every_rank
from galvatron_hf.parallel.weights.converters import join, missing_keys, unsupported
from galvatron_hf.parallel.weights.deferred_init import Template
from galvatron_hf.parallel.weights.joined_tensors import JoinedTensor, StoredTensor
from galvatron_hf.parallel.weights.sources import WeightPiece, fill_with_initial_values
from galvatron_hf.utils.compat import drop_harmless_keys, kept_in_float32


logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Reads weights from the safetensors files of a Hugging Face folder. `name`, the folder or the id on the Hub,
    serves messages. `dtype` is that of [`WeightSource`], `key_mapping` that of `from_pretrained`.
    """

    name: str
    files: tuple[str, ...]
    dtype: torch.dtype | None = None
    key_mapping: Mapping[str, str] | None = None

    @classmethod
    def find(cls, name: str | os.PathLike, *, variant: str | None = None, **options: Any) -> WeightFiles:
        """Finds the safetensors files of a folder or of an id on the Hub, and refuses one without; collective, rank 0
        downloads first. The options (`revision`, `subfolder`, `cache_dir`, `token` ...) are those of
        `from_pretrained`.
        """
        name = os.fspath(name)
        return cls(name=name, files=on_every_rank(lambda: find_files(name, variant, options), rank_0_first=True))

    def stored(self) -> dict[str, StoredTensor]:
        """Returns the tensors that the headers of the files list, by key."""
        found = {}
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    header = file.get_slice(key)
                    kind = str_to_torch_dtype.get(header.get_dtype())
                    shape = tuple(header.get_shape())
                    found[key] = StoredTensor(file=path, key=key, shape=shape, dtype=kind)
        return found

    def fill(self, template: Template, pieces: list[WeightPiece]) -> None:
        sources = on_every_rank(lambda: self._sources(template))
        exact = kept_in_float32(template.model, self.dtype)
        on_every_rank(lambda: self._read(sources, pieces, exact))
        fresh = template.model.state_dict().keys() - sources.keys()
        if fresh:
            fill_with_initial_values(template, pieces, only=fresh)

    def _read(
        self, sources: Mapping[str, StoredTensor | JoinedTensor], pieces: list[WeightPiece], exact: set[str]
    ) -> None:
        found = [(sources[piece.name], piece) for piece in pieces if piece.name in sources]
        for source, piece in sorted(found, key=lambda pair: (pair[0].file, pair[0].key)):
            source.read_into(piece.tensor, piece.region, None if piece.name in exact else self.dtype)

    def _sources(self, template: Template) -> dict[str, StoredTensor | JoinedTensor]:
        """Returns where every weight and persistent buffer is stored, under each of its names. A weight that the
        family allows to be missing has no place, and neither has a head if the files are a base model's. Such weights
        are initialised.

        Raises:
            ValueError: if a weight of the base model is missing, has another shape, or needs a conversion that does
                more than join and transpose tensors.
        """
        model, expected = template.model, template.model.state_dict()
        found: dict[str, StoredTensor | JoinedTensor] = {}
        unexpected = set()
        for name, source in self._named(model, expected):
            if name not in expected:
                unexpected.add(name)
            elif source.shape != tuple(expected[name].shape):
                raise ValueError(
                    f"{source.key} in {self.name} has shape {source.shape}, and {type(model).__name__} has "
                    f"{tuple(expected[name].shape)}; load a folder of the same configuration."
                )
            elif isinstance(found.get(name, source), JoinedTensor) is not isinstance(source, JoinedTensor):
                raise ValueError(
                    f"{self.name} has {name} as a whole and in parts such as {source.key}; remove one of the two."
                )
            else:
                found[name] = source
        for name in expected:
            there = [found[tied] for tied in template.tied_to(name) if tied in found]
            if there and name not in found:
                found[name] = there[0]
        self._report(model, expected.keys() - found.keys(), unexpected)
        _check_tied(self.name, template, found)
        return found

    def _named(
        self, model: PreTrainedModel, expected: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, StoredTensor | JoinedTensor]]:
        """Yields the tensors of the files under the names that this version of the family gives them, with those in
        one that its converters join.
        """
        stored, joined = self.stored(), {}
        for key, (name, pattern, converter) in self._renamed(model, expected, stored).items():
            if converter is None or name not in expected:
                yield name, stored[key]
            elif (what := unsupported(converter)) is not None:
                raise ValueError(
                    f"{key} in {self.name} is converted by {what}, not only joined or renamed, where "
                    f"{type(model).__name__} is loaded, which is not possible for a piece of a tensor; load it by "
                    "from_pretrained and pass the model."
                )
            else:
                _, found = joined.setdefault(name, (converter, {}))
                found.setdefault(pattern, []).append(stored[key])
        for name, (converter, found) in joined.items():
            yield name, self._joined(name, converter, found, tuple(expected[name].shape))

    def _joined(
        self, name: str, converter: WeightConverter, found: Mapping[str, list[StoredTensor]], shape: tuple[int, ...]
    ) -> JoinedTensor:
        missing = missing_keys(converter, found)
        if not missing:
            try:
                source = join(converter, found, shape)
            except ValueError as error:
                raise ValueError(
                    f"{name} cannot be joined from {self.name} ({error}); load a folder of the same configuration."
                ) from error
            stacked = [size for size, dim in zip(shape, source.parts[0].dims, strict=False) if dim is None]
            missing = missing_keys(converter, found, *stacked[:1])
        if missing:
            raise ValueError(
                f"{self.name} lacks {_some(missing)}, from which {name} is joined; give a complete folder."
            )
        return source

    def _renamed(
        self, model: PreTrainedModel, expected: Mapping[str, torch.Tensor], keys: Iterable[str]
    ) -> dict[str, tuple[str, str | None, WeightConverter | None]]:
        """Returns, for each key of the files in the order of their numbers, the name that this version of the family
        gives to it, and the converter with that of its patterns which matches.
        """
        mapping = get_model_conversion_mapping(model, dict(self.key_mapping) if self.key_mapping else None)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names = {}
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
            names[key] = name, pattern, by_pattern.get(pattern)
        return names

    def _report(self, model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
        report = LoadStateDictInfo(
            missing_keys=missing,
            unexpected_keys=unexpected,
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        drop_harmless_keys(model, report)
        needed = sorted(name for name in report.missing_keys if name.startswith(f"{model.base_model_prefix}."))
        if needed:
            raise ValueError(
                f"{self.name} lacks {_some(needed)}, which {type(model).__name__} needs; give a complete folder."
            )
        if report.missing_keys and is_rank_0():
            logger.warning(f"{self.name} has no {_some(sorted(report.missing_keys))}: initialised as in a new model.")
        if report.unexpected_keys and is_rank_0():
            unused = _some(sorted(report.unexpected_keys))
            logger.warning(f"{self.name} has {unused}, which {type(model).__name__} does not use.")


def find_files(name: str, variant: str | None, options: dict[str, Any]) -> tuple[str, ...]:
    """Returns the safetensors files of a folder or an id on the Hub; see [`WeightFiles.find`]."""
    one, index = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        one = one.replace(".safetensors", f".{variant}.safetensors")
        index = index.replace(".index.json", f".index.{variant}.json")
    quiet = dict(options, _raise_exceptions_for_missing_entries=False)
    found = cached_file(name, one, **quiet)
    if found is not None:
        return (found,)
    found = cached_file(name, index, **quiet)
    if found is None:
        raise ValueError(
            f"{name} has no {one} and no {index}, and pickles such as pytorch_model.bin are never opened; "
            "convert the model first: from_pretrained(...).save_pretrained(FOLDER)."
        )
    files, _ = get_checkpoint_shard_files(name, found, **options)
    folder = os.path.dirname(os.path.abspath(found))
    for file in files:
        if os.path.dirname(os.path.abspath(file)) != folder:
            raise ValueError(
                f"{found} names {file}, which is outside of its folder; use an index of plain file names."
            )
        if not os.path.isfile(file):
            raise ValueError(f"{found} names {os.path.basename(file)}, which is not there; give a complete folder.")
    return tuple(files)


def _check_tied(where: str, template: Template, found: Mapping[str, StoredTensor | JoinedTensor]) -> None:
    """Refuses a tied weight that is stored under two names with different values."""
    if not is_rank_0():
        return
    for names in template.names.values():
        copies = list(dict.fromkeys(found[name] for name in names if name in found))
        for copy in copies[1:]:
            if not _equal(copies[0], copy):
                raise ValueError(
                    f"{where} has different values for {copies[0].key} and {copy.key}, which its configuration ties; "
                    "set tie_word_embeddings to False."
                )


def _equal(first: StoredTensor | JoinedTensor, second: StoredTensor | JoinedTensor, rows: int = 1024) -> bool:
    for start in range(0, first.shape[0], rows):
        region = (slice(start, min(start + rows, first.shape[0])),)
        parts = [torch.empty(region[0].stop - start, *first.shape[1:]) for _ in range(2)]
        for stored, part in zip((first, second), parts, strict=True):
            stored.read_into(part, region)
        if not torch.equal(*parts):
            return False
    return True


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
