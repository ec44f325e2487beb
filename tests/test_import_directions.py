# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Imports between the packages point one way, without circles; what plans and predicts needs no torch."""

import ast
import graphlib
from dataclasses import dataclass
from pathlib import Path

import pytest


SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = "galvatron_hf"
# A package imports those before it. Exceptions are below.
ORDER = (
    "utils",
    "plan",
    "models",
    "checkpoint",
    "parallel",
    "data",
    "profiler",
    "planner",
    "interop",
    "trainer",
    "plots",
    "cli",
)
PLANNER_IMPORTS = ("utils", "plan", "models", "profiler.profiles", "planner")
PLOTS_IMPORTS = ("utils", "plan", "profiler.profiles", "planner", "data", "plots")
# These run where torch is not installed or slow to load.
WITHOUT_TORCH = ("plan", "planner", "profiler.profiles", "models.shape", "interop", "cli.main")
WITH_TORCH = ("plan.schedule",)  # it plays torch's own schedules
TORCH = ("torch", "transformers", "accelerate", "datasets")


@dataclass(frozen=True, kw_only=True)
class Import:
    """Describes one import statement: who imports what, and when.

    Attributes:
        importer, target (`str`): names of modules, those of this package without its name.
        deferred (`bool`): inside a function.
        typing (`bool`): under `if TYPE_CHECKING`, so it never runs.
    """

    importer: str
    target: str
    deferred: bool
    typing: bool


def read_modules(source: Path) -> dict[str, ast.Module]:
    """Returns the syntax tree of each module of the package, by its name without the package's."""
    modules = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source / PACKAGE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return modules


def read_imports(modules: dict[str, ast.Module]) -> list[Import]:
    """Returns every import of the modules, also those inside functions and under TYPE_CHECKING."""

    def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        assert node.level == 0, f"line {node.lineno} has a relative import: write the whole name"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name.removeprefix(f"{PACKAGE}.") in modules else node.module for name in names]

    found = []

    def visit(node: ast.AST, importer: str, deferred: bool, typing: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target in targets(node):
                own = target == PACKAGE or target.startswith(f"{PACKAGE}.")
                name = target.removeprefix(PACKAGE).removeprefix(".") if own else target
                prefix = "" if own else "external:"
                found.append(Import(importer=importer, target=prefix + name, deferred=deferred, typing=typing))
        deferred = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                visit(child, importer, deferred, True)
            for child in node.orelse:
                visit(child, importer, deferred, typing)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, importer, deferred, typing)

    for name, tree in modules.items():
        visit(tree, name, False, False)
    return found


def wrong_directions(imports: list[Import]) -> list[str]:
    """Returns the imports that point to a later package."""
    wrong = []
    for each in imports:
        if each.target.startswith("external:") or not each.importer:
            continue  # the package itself offers names of all packages
        package, target = each.importer.split(".")[0], each.target.split(".")[0]
        if package in ("planner", "plots"):
            allowed = PLANNER_IMPORTS if package == "planner" else PLOTS_IMPORTS
            right = any(f"{each.target}.".startswith(f"{one}.") for one in allowed)
        else:
            right = target in ORDER and ORDER.index(target) <= ORDER.index(package)
        if not right:
            wrong.append(f"{each.importer} imports {each.target or PACKAGE}")
    return wrong


def circle(imports: list[Import]) -> list[str]:
    """Returns the modules of a circle of imports that run, deferred ones too; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        if not each.typing and not each.target.startswith("external:") and each.importer:
            graph.setdefault(each.importer, set()).add(each.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def torch_importers(imports: list[Import]) -> list[str]:
    """Returns the modules that import torch, transformers and the like when they are imported, directly or not."""
    runs = [each for each in imports if not each.typing and not each.deferred]
    heavy = {each.importer for each in runs if each.target.removeprefix("external:").split(".")[0] in TORCH}
    while more := {each.importer for each in runs if each.target in heavy} - heavy:
        heavy |= more
    return sorted(heavy)


MODULES = read_modules(SOURCE)
IMPORTS = read_imports(MODULES)


def test_every_package_has_a_place_in_the_order():
    assert {name.split(".")[0] for name in MODULES if name} == set(ORDER)
    assert len(IMPORTS) > 1000


def test_imports_point_one_way():
    assert wrong_directions(IMPORTS) == []


def test_pictures_alone_import_matplotlib():
    """What plans, predicts and trains runs without it; methods that draw load the pictures by name."""
    users = {
        each.importer for each in IMPORTS if each.target.split(".")[0] == "external:matplotlib" and not each.typing
    }
    assert users and {name.split(".")[0] for name in users} == {"plots"}


def test_no_imports_form_a_circle():
    assert circle(IMPORTS) == []


def test_plans_and_predictions_need_no_torch():
    light = [name for name in MODULES if any(f"{name}.".startswith(f"{part}.") for part in WITHOUT_TORCH)]
    assert len(light) > 25
    assert [name for name in torch_importers(IMPORTS) if name in light and name not in WITH_TORCH] == []


def users_of_collectives(modules: dict[str, ast.Module]) -> list[str]:
    """Returns the modules that call torch's collectives, as `dist.name(...)` or through `functional_collectives`."""
    no_message = ("get_rank", "get_world_size", "get_backend", "is_initialized", "is_available", "is_gloo_available")

    def uses(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
            return ast.unparse(node.func).removeprefix("dist.") not in no_message
        return isinstance(node, ast.Name) and node.id == "functional_collectives"

    return [name for name, tree in modules.items() if any(uses(node) for node in ast.walk(tree))]


def test_layers_send_through_the_collectives_of_parallel_comm_alone():
    """The recorded collectives are then all that a layer's forward and backward send."""
    apart = ("plan", "models", "checkpoint", "planner", "parallel.layers", "parallel.activation")
    users = users_of_collectives(MODULES)
    assert "parallel.comm.collectives" in users
    assert [name for name in users if any(f"{name}.".startswith(f"{part}.") for part in apart)] == []


@pytest.mark.parametrize(
    "module, line, check",
    [
        ("plan.table", "from galvatron_hf.interop.galvatron.plan import to_galvatron", wrong_directions),
        ("planner.search", "def f():\n    import galvatron_hf.parallel.model", wrong_directions),
        ("planner.search", "from galvatron_hf.profiler import cache", wrong_directions),
        ("planner.estimate", "def f():\n    from galvatron_hf.plots.memory import memory_figure", wrong_directions),
        ("plots.memory", "from galvatron_hf.trainer.trainer import GalvatronTrainer", wrong_directions),
        ("utils.machine", "if TYPE_CHECKING:\n    from galvatron_hf.trainer.trainer import T", wrong_directions),
        ("plan.validation", "def f():\n    from galvatron_hf.plan.plan import ParallelPlan", circle),
        ("plan.validation", "import torch", torch_importers),
        ("profiler.profiles.hardware", "from galvatron_hf.plan.schedule import actions", torch_importers),
    ],
)
def test_a_wrong_import_is_found(module, line, check):
    spoiled = MODULES | {module: ast.parse(ast.unparse(MODULES[module]) + f"\n{line}")}
    before, after = check(IMPORTS), check(read_imports(spoiled))
    assert any(module in entry for entry in set(after) - set(before))
