# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Writes the pages of `docs/reference` from the code: the fields of plans, the training arguments, the commands and the
Python API. `make reference` runs it.

    python docs/make_reference.py
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from galvatron_hf.cli.main import COMMANDS
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, SequenceGroups, Stage, VocabularyStrategy
from galvatron_hf.plan.serialization import GROUP_FIELDS, LAYER_FIELDS, PLAN_FIELDS, VOCABULARY_FIELDS
from galvatron_hf.trainer.argument_table import as_markdown
from galvatron_hf.trainer.arguments import GalvatronTrainingArguments


FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- `make reference` writes this page from the code: change the code, or docs/make_reference.py. -->"

# The public names, by what they are for: the name and its module.
API = {
    "Training": {
        "GalvatronTrainer": "trainer.trainer",
        "GalvatronSeq2SeqTrainer": "trainer.trainer",
        "GalvatronMixin": "trainer.mixin",
        "GalvatronTrainingArguments": "trainer.arguments",
        "GalvatronSeq2SeqTrainingArguments": "trainer.arguments",
        "Outcome": "trainer.planning.step_meter",
    },
    "Training without a Trainer": {
        "parallelize": "parallel.parallelize",
        "ParallelModel": "parallel.model",
        "unpad": "data.packing",
        "pack": "data.packing",
        "in_order": "data.placement",
    },
    "Plans": {
        "ParallelPlan": "plan",
        "LayerStrategy": "plan",
        "VocabularyStrategy": "plan",
        "Precision": "plan",
        "Stage": "plan",
        "SequenceGroups": "plan",
        "unsupported": "plan.supported",
        "read_galvatron_plan": "interop.galvatron.plan",
        "to_galvatron": "interop.galvatron.plan",
    },
    "Searching": {
        "search_plan": "planner.search",
        "SearchResult": "planner.search",
        "Limits": "planner.space",
        "Workload": "planner.cost.workload",
        "estimate_plan": "planner.estimate",
        "Estimate": "planner.estimate",
        "explain": "planner.report.report",
        "simplest": "planner.simplify",
    },
    "Profiles": {
        "HardwareProfile": "profiler.profiles.hardware",
        "hardware_preset": "profiler.profiles.presets",
        "profile_hardware": "profiler.measure.hardware",
        "load_or_profile_hardware": "profiler.cache",
        "ModelProfile": "profiler.profiles.model",
        "profile_model": "profiler.measure.model",
        "load_or_profile_model": "profiler.cache",
        "profile_from_config": "profiler.trace.tracing",
    },
}
NAMES = {name for group in API.values() for name in group}
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields", "Example")
_CODE = re.compile(r"(`[^`]*`)")
_HEADER = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.M)
_ENTRY = re.compile(r"(\*{0,2}[`\w][`\w, ]*?)(?: \((.+?)\))?: (.*)", re.S)


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """Holds the parts of a docstring in the Hugging Face form."""

    text: str
    sections: Mapping[str, str]

    @classmethod
    def of(cls, documented: Any) -> Docstring:
        """Returns the parts of the docstring of a class or function."""
        text, *rest = _HEADER.split(inspect.getdoc(documented) or "")
        return cls(text=text.strip(), sections=dict(zip(rest[::2], rest[1::2])))

    def entries(self, section: str) -> list[tuple[str, str, str]]:
        """Returns the name, the type and the text of each entry of a section."""
        lines = self.sections.get(section, "").strip("\n")
        items = [item for item in re.split(r"\n(?=    \S)", lines) if item.strip()]
        found = [(item, _ENTRY.fullmatch(_one_line(item))) for item in items]
        for item, match in found:
            if match is None:
                raise ValueError(f"{section} has {item.strip()!r}, which has no name: write `name: text`.")
        return [(match[1], match[2] or "", match[3]) for _, match in found]


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ---- Plan ----

# What the types of the dataclasses are in JSON.
JSON_TYPES = {
    "`int`": "integer",
    "`bool`": "true or false",
    "`str`": "string",
    "`dict`": "object",
    "`Mapping[str, int]`": "object of integers",
    "`tuple[int, ...]`": "list of integers",
    "`tuple[int, int]`": "list of two integers",
    "`tuple[str, ...]`": "list of strings",
    "`tuple[Stage, ...]`": "list of [stages](#stages)",
    "`tuple[LayerStrategy, ...]`": "list of [layers](#layers)",
    "[`Precision`]": "[object](#precision)",
    "[`VocabularyStrategy`]": "[object](#embedding-and-head)",
    "[`SequenceGroups`]": "[object](#sequence-groups)",
}


def plan_page() -> str:
    """Returns the page with every field of a plan, its default and its meaning."""
    parts = [
        ("The plan", ParallelPlan, PLAN_FIELDS, "The fields of the JSON object."),
        (
            "Layers",
            LayerStrategy,
            LAYER_FIELDS,
            "Each entry of `layers` also has `span`, which is required: `[first, end]` are the layers from `first` to "
            "`end` - 1. Spans follow one another and cover all layers.",
        ),
        ("Embedding and head", VocabularyStrategy, VOCABULARY_FIELDS, "The fields of `embedding` and of `head`."),
        ("Precision", Precision, ("compute", "master", "reduce"), "The fields of `precision`."),
        ("Stages", Stage, ("ranks", "layers"), "The fields of each entry of `stages`."),
        ("Sequence groups", SequenceGroups, (*GROUP_FIELDS, "kinds"), "The fields of `sequence_groups`."),
    ]
    lines = [
        "# Plan reference",
        "",
        NOTE,
        "",
        "Every field of a plan, as JSON. A field with a default may be left out. R is the number of ranks of a stage.",
        "[Writing a plan](../writing-a-plan.md) explains them with examples; [Concepts](../concepts/index.md) has a "
        "picture of each kind of parallelism.",
    ]
    for title, kind, names, text in parts:
        lines += ["", f"## {title}", "", text, "", *_field_table(kind, names)]
    return "\n".join(lines) + "\n"


def _field_table(kind: type, names: tuple[str, ...]) -> list[str]:
    documented = {name: (form, text) for name, form, text in Docstring.of(kind).entries("Args")}
    fields = {one.name: one for one in dataclasses.fields(kind)}
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        form, text = documented[name]
        kept = ", ".join(part for part in form.split(", ") if not part.startswith(("defaults", "*optional*")))
        text = re.sub(r"\bNone\b", "`null`", _references(text))
        lines.append(f"| `{name}` | {JSON_TYPES[kept]} | {_default(fields[name])} | {text} |")
    return lines


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "`{}`" if made == {} else "the defaults of its fields"
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


# ---- Arguments ----


def arguments_page() -> str:
    """Returns the page of the training arguments: those that are added, and what a plan makes of the others."""
    inherited = {one.name for one in dataclasses.fields(TrainingArguments)}
    lines = [
        "# Training arguments",
        "",
        NOTE,
        "",
        "`GalvatronTrainingArguments` adds the arguments of the first table to those of `TrainingArguments`, of which "
        "the second table says what a plan makes. On the command line each is an option of the same name.",
        "",
        "## Added arguments",
        "",
        "| argument | type | default | meaning |",
        "|---|---|---|---|",
    ]
    annotations = GalvatronTrainingArguments.__annotations__  # HfArgumentParser changes the types of fields
    for one in dataclasses.fields(GalvatronTrainingArguments):
        if one.name not in inherited:
            help_text = _escaped(_code(one.metadata["help"]))
            default = "none" if one.default is None else f"`{json.dumps(one.default)}`"
            lines.append(f"| `{one.name}` | {_type(annotations[one.name])} | {default} | {help_text} |")
    lines += [
        "",
        "## Arguments of TrainingArguments",
        "",
        "*Honoured* arguments do what they do on one process. *Refused* ones raise a `ValueError` before training. "
        "Those with *no effect* change no result. An argument that a later version of transformers adds is refused "
        "unless it has its default.",
        "",
        as_markdown(),
    ]
    return "\n".join(lines) + "\n"


def _type(annotation: Any) -> str:
    names = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kinds = [name.strip() for name in names.split(" | ") if name.strip() != "None"]
    return " or ".join(f"`{name}`" for name in kinds)


def _code(text: str) -> str:
    """Marks the names of arguments, which have an underscore, and quoted values as code."""
    parts = _CODE.split(text)
    for index in range(0, len(parts), 2):
        marked = re.sub(r"(?<![\w\"'])((?:\w+=)?\"[^\"]+\")", r"`\1`", parts[index])
        pieces = _CODE.split(marked)
        for piece in range(0, len(pieces), 2):
            pieces[piece] = re.sub(
                r"(?<![\w$/.])([a-z]+(?:_[a-z0-9]+)+(?:\.json)?(?:=[\w']+)?)(?!\w)", r"`\1`", pieces[piece]
            )
        parts[index] = "".join(pieces)
    return "".join(parts)


# ---- Commands ----


def command_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of one command of `galvatron`."""
    parser = argparse.ArgumentParser(prog=f"galvatron {name}")
    import_module(f"galvatron_hf.cli.{name.replace('-', '_')}").add_arguments(parser)
    return parser


def commands_page() -> str:
    """Returns the page with the arguments of every command."""
    lines = [
        "# Command line",
        "",
        NOTE,
        "",
        "`galvatron COMMAND --help` prints the same. A failure prints one sentence and ends with the exit code 1.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`galvatron {name}`](#galvatron-{name}) | {_escaped(text)} |" for name, text in COMMANDS.items()),
    ]
    for name, text in COMMANDS.items():
        lines += _command(command_parser(name), text, level=2)
    return "\n".join(lines) + "\n"


def _command(parser: argparse.ArgumentParser, text: str, level: int) -> Iterator[str]:
    description = parser.description or f"{text[0].upper()}{text[1:]}."
    yield from ("", f"{'#' * level} {parser.prog}", "", _escaped(_code(description)))
    usual = [group for group in parser._action_groups if group.title in _USUAL_GROUPS]
    named_groups = [group for group in parser._action_groups if group.title not in _USUAL_GROUPS]
    for group in (usual[0], *named_groups, *usual[1:]):  # arguments by position come first, other options last
        actions = [action for action in group._group_actions if not isinstance(action, _NOT_LISTED)]
        if actions:
            title = "argument" if group in usual else group.title
            yield from ("", f"| {title} | |", "|---|---|")
            yield from (f"| {_invocation(action)} | {_help(parser, action)} |" for action in actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, of_action in action.choices.items():
                yield from _command(of_action, helps[name], level + 1)


_USUAL_GROUPS = ("positional arguments", "options")
_NOT_LISTED = (argparse._HelpAction, argparse._SubParsersAction)


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper())
    value = "" if action.nargs == 0 else f" {value}"
    more = " ..." if action.nargs in ("+", "*") else ""
    return f"`{', '.join(action.option_strings)}{value}{more}`".replace("|", "\\|")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = _escaped(_code(parser._get_formatter()._expand_help(action) if action.help else ""))
    default = action.default if action.option_strings and action.nargs != 0 else None
    if default not in (None, []) and "default:" not in text:
        text = f"{text} (default: {default})".strip()
    return f"{text} (required)" if action.required and action.option_strings else text


def _escaped(text: str) -> str:
    """Returns a text whose characters have no meaning in Markdown, but for those in code."""
    parts = _CODE.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*<|])", r"\\\1", parts[index])
    return "".join(parts)


# ---- Python ----


def api_page() -> str:
    """Returns the page of the public names with their docstrings."""
    lines = [
        "# Python API",
        "",
        NOTE,
        "",
        "`from galvatron_hf import NAME` works for the names marked with a star; the others are imported from their "
        "module, which stands below each name.",
    ]
    exported = import_module("galvatron_hf").__all__
    for group, names in API.items():
        lines += ["", f"## {group}", ""]
        lines += [f"- [`{name}`](#{name.lower()}){' *' if name in exported else ''}" for name in names]
        for name, module in names.items():
            lines += _entry(getattr(import_module(f"galvatron_hf.{module}"), name), name, module)
    return "\n".join(lines) + "\n"


def _entry(documented: Any, name: str, module: str) -> Iterator[str]:
    yield from ("", f"### {name}", "", f"`galvatron_hf.{module}`", "")
    if not _inherits_signature(documented):
        yield from ("```py", _signature(documented, name), "```", "")
    yield from _body(documented)
    for method_name, method in _methods(documented):
        yield from ("", f"#### {name}.{method_name}", "")
        if not isinstance(method, property):
            yield from ("```py", _signature(method, method_name), "```", "")
        yield from _body(method.fget if isinstance(method, property) else method)


def _inherits_signature(documented: Any) -> bool:
    """Tells whether a class has the constructor of a class of transformers, or many fields that another page lists."""
    return inspect.isclass(documented) and (
        issubclass(documented, TrainingArguments) or documented.__init__ is object.__init__
        or documented.__init__.__module__.startswith("transformers.")
    )  # fmt: skip


def _methods(documented: Any) -> list[tuple[str, Any]]:
    """Returns the public methods and properties of a class that have docstrings, in their order."""
    if not inspect.isclass(documented):
        return []
    found = []
    for name, value in vars(documented).items():
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            if inspect.getdoc(value):
                found.append((name, value))
    return found


def _signature(documented: Callable, name: str) -> str:
    parameters = [one for one in inspect.signature(documented).parameters.values() if one.name not in ("self", "cls")]
    written, keyword_only = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any(other.kind is other.VAR_POSITIONAL for other in parameters):
                written.append("*")
        written.append(_parameter(one))
    short = f"{name}({', '.join(written)})"
    if len(short) <= 100:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in written) + ")"


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    annotation = one.annotation
    if annotation is not one.empty and not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    text = f"{stars}{one.name}" + ("" if annotation is one.empty else f": {annotation}")
    if one.default is one.empty:
        return text
    written = json.dumps(one.default) if isinstance(one.default, str) else repr(one.default)  # as ruff quotes it
    default = "..." if "<" in written else written
    return f"{text} = {default}" if ": " in text else f"{text}={default}"


def _body(documented: Any) -> Iterator[str]:
    parts = Docstring.of(documented)
    yield _references(parts.text, linked=True)
    for section in parts.sections:
        if section == "Example":
            yield from ("", "Example:", "", inspect.cleandoc(parts.sections[section]).strip())
            continue
        yield from ("", f"**{section}**", "")
        if section in ("Args", "Attributes", "Raises"):
            for name, form, text in parts.entries(section):
                bare = name.strip("`")
                names = ", ".join(f"`{one}`" for one in bare.split(", "))
                kind = f" ({_references(form, linked=True)})" if form else ""
                yield f"- {names}{kind}: {_references(text, linked=True)}"
        else:
            yield _references(_one_line(parts.sections[section]), linked=True)


def _references(text: str, linked: bool = False) -> str:
    """Returns a text whose references, such as [`ParallelPlan`], are code, or links on the page of the API."""

    def link(match: re.Match[str]) -> str:
        name = match[1].lstrip("~").rpartition(".")[2]
        return f"[`{name}`](#{name.lower()})" if linked and name in NAMES else f"`{name}`"

    return re.sub(r"\[`([~\w.]+)`\]", link, text)


PAGES = {"plan.md": plan_page, "arguments.md": arguments_page, "cli.md": commands_page, "api.md": api_page}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
