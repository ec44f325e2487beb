# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs blocks of Python of several pages, given as JSON: each page in a fork with a folder of its own, after the
imports that most of them need.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import datasets  # noqa: F401
import torch
import transformers  # noqa: F401

from galvatron_hf import GalvatronTrainer  # noqa: F401


def run_page(page: str, blocks: list[str]) -> None:
    """Runs the blocks of a page one after the other with the same names."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names = {"__name__": "__main__"}
        for block in blocks:
            exec(compile(block, page, "exec"), names)
        os.chdir("/")


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for page, blocks in json.loads(Path(sys.argv[1]).read_text()).items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                run_page(page, blocks)
            except BaseException:
                print(page, file=sys.stderr)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        failed += status != 0
        print(f"{'ran' if status == 0 else 'failed'} {page}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
