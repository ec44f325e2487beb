# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The planner imports values only: neither torch nor transformers, and nothing of the runtime."""

import ast
import subprocess
import sys
from pathlib import Path


SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted((SOURCE / "galvatron_hf" / "planner").rglob("*.py"))
ALLOWED = ("plan", "planner", "models.shape", "profiler.profiles", "utils")


def test_the_planner_imports_only_plans_shapes_profiles_and_utilities():
    imported = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module if node.level == 0 else "." * node.level)
    imported = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in imported if name.startswith("galvatron_hf.")}
    prefixes = tuple(f"galvatron_hf.{name}" for name in ALLOWED)
    assert ours and not [name for name in ours if not f"{name}.".startswith(tuple(f"{one}." for one in prefixes))]
    assert imported - ours == {"numpy", "rich.console", "rich.table"}


def test_the_whole_planner_loads_neither_torch_nor_transformers():
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in MODULES]
    code = f"import sys, {', '.join(names)}; print([one for one in ('torch', 'transformers') if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
