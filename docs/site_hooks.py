# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: make pages of CONTRIBUTING and CHANGELOG, and put the files outside docs/ that pages link to into
the site, so that one link works in the repository and in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parent.parent
# Pages of the site whose text is a file of the repository outside docs/.
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
COPIES = "repository"  # the folder of the site with files that pages link to
_LINK = re.compile(r"(!?)\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```\s*?$)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of PAGES, and the files that any page links to."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    wanted: set[str] = set()
    for file in files.documentation_pages():
        text = Path(file.abs_src_path).read_text(encoding="utf-8")
        _with_links(text, file.src_uri, wanted)
    for target in sorted(wanted):
        name = target.removeprefix(f"{COPIES}/")
        files.append(File.generated(config, target, abs_src_path=str(ROOT / name), inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page with the links of the site."""
    return _with_links(markdown, page.file.src_uri, set())


def _with_links(markdown: str, page: str, wanted: set[str]) -> str:
    """Returns a text with the links of the site, and adds the files that it needs to `wanted`."""

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or ":" in target:
            return match[0]
        found = _site_path(page, target)
        if found is None:  # a folder, which the site does not have
            return text
        if found.startswith(f"{COPIES}/"):
            wanted.add(found)
        return f"{picture}[{text}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def _site_path(page: str, target: str) -> str | None:
    """Returns the path in the site of a link's target; None for a folder of the repository."""
    source = PAGES.get(page, f"docs/{page}")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if found == "README.md":
        return "index.md"
    for made, of in PAGES.items():
        if found == of:
            return made
    if found.startswith("docs/"):
        return found.removeprefix("docs/")
    return f"{COPIES}/{found}" if (ROOT / found).is_file() else None
