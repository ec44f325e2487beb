# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's distributed checkpoint in safetensors files alone: each rank's pieces with their offsets, no pickle.

`torch.distributed.checkpoint` plans who writes and who reads which piece; its Hugging Face storage keeps the offsets
in the headers of the files, where its file system storage has a pickled index.
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


# A file is put together in memory before it is written.
MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class _Written:
    """In place of DCP's own word on where an item lies, which its safetensors files do not need."""

    files: dict[str, FileEntry]


class StateWriter(HuggingFaceStorageWriter):
    """Writes the ranks' pieces, synced, and hands their checksums to the rank that completes the checkpoint.

    Args:
        folder (`str` or `os.PathLike`): created if needed.
        complete (`Callable`, *optional*): called once, on the first rank of the group, when all ranks have written,
            with the files by name; an error in it is everybody's.
        max_file_bytes (`int`): how many bytes of tensors go into one file, but at least one tensor.
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
        """As the parent's, with files of limited size; each rank has its own numbers."""
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
        """As the parent's; the results carry the checksums."""
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        entries = _Written({name: FileEntry.of(Path(self.path) / name) for name in names})
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(result, storage_data=entries) for result in results[:1]])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint."""
        files: dict[str, FileEntry] = {}
        for of_rank in results:
            for result in of_rank:
                files |= result.storage_data.files
        if self._complete is not None:
            self._complete(files)


class StateReader(HuggingFaceStorageReader):
    """Reads what [`StateWriter`] wrote, whatever ranks wrote it.

    Args:
        folder (`str` or `os.PathLike`): where the files are.

    Raises:
        ValueError: if the folder has none.
    """

    def __init__(self, folder: str | os.PathLike):
        if not any(Path(folder).glob("*.safetensors")):
            raise ValueError(f"{os.fspath(folder)} has no safetensors files; give the state of a checkpoint.")
        super().__init__(os.fspath(folder))
