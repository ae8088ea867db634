"""The documents' links lead to files that are there; their Python compiles."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted(ROOT.glob("packages/*/README.md"))


def tokens(page):
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def links(page):
    return [t.attrs["href"] for t in tokens(page) if t.type == "link_open"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    local = [link.split("#")[0] for link in links(page) if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if link and not (page.parent / link).exists()] == []


def test_links_are_found_at_all():
    assert len(links(ROOT / "docs" / "contract.md")) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_compiles(page):
    """Code without prompts; code with prompts is run as a doctest."""
    blocks = [t.content for t in tokens(page) if t.type == "fence" and t.info == "python"]
    for block in blocks:
        if not block.startswith(">>>"):
            compile(block, str(page), "exec")
