# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""No file but `galvatron_hf.utils.compat` uses private names of other libraries."""

import ast
import re
from pathlib import Path

import pytest

import galvatron_hf


SOURCE = Path(galvatron_hf.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "peft")
STANDARD = {"argparse", "os", "sys"}  # whose private names the standard library documents or its typing needs
SELF = {"self", "cls", "super()"}


def private_names(path: Path, known: set[str]) -> list[str]:
    """Returns the private names of libraries in a file; attributes that this package defines do not count."""
    found = []
    trainer = (
        {*SELF, "TrainingArguments", "trainer"} if "trainer" in path.relative_to(SOURCE).parts else set()
    )  # overrides
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if not (owner in trainer or node.attr in known or owner in STANDARD):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            if any(re.match(r"_[^_]", part) for name in node.names for part in (*node.module.split("."), name.name)):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if "._" in name.name]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w[\w.]*", str(node.value)):
            found.append(node.value)
    return [f"{path.relative_to(SOURCE)}: {name}" for name in found]


def defined_names(path: Path) -> set[str]:
    """Returns the functions, methods and attributes that a file defines."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in SELF:
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_private_names_of_libraries_are_in_compat_alone():
    paths = [path for path in SOURCE.rglob("*.py") if path.name != "compat.py"]
    known = set().union(*map(defined_names, paths))
    assert [name for path in sorted(paths) for name in private_names(path, known)] == []


def test_a_private_name_of_a_library_is_found():
    lines = (
        "from torch.utils._pytree import tree_map",
        "import torch._inductor",
        "x = torch._foreach_norm([])",
        "y = module._buffers",
        "logging.getLogger('torch.distributed._shard')",
    )
    probe = SOURCE / "utils" / "probe.py"
    text = Path.read_text

    def read(path: Path) -> str:
        return "\n".join(lines) if path == probe else text(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", read)
        assert len(private_names(probe, set())) == len(lines)
