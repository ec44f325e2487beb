# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Stores PyTorch's distributed checkpoints in safetensors files only, without pickle. `torch.distributed.checkpoint`
(DCP) plans which rank writes and reads which piece. Its Hugging Face storage keeps the offsets of pieces in the
headers of the files; its file system storage would pickle an index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from galvatron_hf.checkpoint.manifest import FileEntry


# A file is assembled in memory before it is written.
MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class _Written:
    """Replaces DCP's record of the location of an item, which safetensors files do not need."""

    files: dict[str, FileEntry]


class StateWriter(HuggingFaceStorageWriter):
    """Writes and syncs the pieces of all ranks, and gives their checksums to the rank that completes the checkpoint.

    Args:
        complete (`Callable`, *optional*): called once with the files by name, on the first rank of the group, after
            all ranks have written; an error in it is raised on all ranks.
        max_file_bytes (`int`): bytes of tensors in one file, which has at least one tensor.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        complete: Callable[[dict[str, FileEntry]], None] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ):
        super().__init__(os.fspath(folder), save_distributed=True)
        self._complete, self._max_file_bytes = complete, max_file_bytes

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Limits the size of files, where the parent writes one file a rank; numbers the ranks from 1."""
        return [
            replace(plan, storage_data={"shard_index": index, "fqn_to_index_mapping": self._files(plan.items)})
            for index, plan in enumerate(plans, start=1)
        ]

    def _files(self, items: Sequence[WriteItem]) -> dict[str, int]:
        files, number, filled = {}, 1, 0
        for item in items:
            size = (
                item.tensor_data.size.numel()
                if item.tensor_data.chunk is None
                else item.tensor_data.chunk.sizes.numel()
            )
            size *= item.tensor_data.properties.dtype.itemsize
            if filled and filled + size > self._max_file_bytes:
                number, filled = number + 1, 0
            files[item.index.fqn] = number
            filled += size
        return files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes like the parent, and returns the checksums in the results."""
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        entries = _Written({name: FileEntry.from_file(Path(self.path) / name) for name in names})
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(result, storage_data=entries) for result in results[:1]])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Calls `complete` instead of writing DCP's index, which this format does not need."""
        files: dict[str, FileEntry] = {}
        for rank_results in results:
            for result in rank_results:
                files |= result.storage_data.files
        if self._complete is not None:
            self._complete(files)


class StateReader(HuggingFaceStorageReader):
    """Reads the files of [`StateWriter`] on any number of ranks; refuses a folder without safetensors files."""

    def __init__(self, folder: str | os.PathLike):
        if not any(Path(folder).glob("*.safetensors")):
            raise ValueError(f"{os.fspath(folder)} has no safetensors files; give the state folder of a checkpoint.")
        super().__init__(os.fspath(folder))
