# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Corpus of the interpreter's own standard library: real code, a long tail of lengths, no download."""

import sysconfig
import tokenize
from pathlib import Path

from datasets import Dataset


NAME = "python-stdlib"
_INSTALLED_PACKAGES = {"site-packages", "dist-packages"}


def load_python_stdlib(root: str | Path | None = None) -> Dataset:
    """
    Reads every module of the standard library, one document per file, in the order of their paths.

    Files that are not Python text (a few tests of the parser are broken on purpose) and empty files are left out.

    Args:
        root (`str` or `Path`, *optional*):
            Folder of the library; by default that of the running interpreter, without installed packages.

    Returns:
        [`~datasets.Dataset`] with the columns `path` (relative to `root`) and `text`.

    Raises:
        `ValueError`: if there is no source below `root`.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    paths, texts = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _INSTALLED_PACKAGES.isdisjoint(relative.parts) and (text := _read_source(path)):
            paths.append(relative.as_posix())
            texts.append(text)
    if not texts:
        raise ValueError(
            f"No Python source below {str(root)!r}: this interpreter ships its library compiled; use another."
        )
    return Dataset.from_dict({"path": paths, "text": texts})


def _read_source(path: Path) -> str | None:
    try:
        with tokenize.open(path) as file:  # honours the file's coding line
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
