"""What README and docs say of the configuration exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from jaxrl_llm.config import Config
from jaxrl_llm.config_values import hint_of, knobs, suggest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "BUILD.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = "|".join(field.name for field in dataclasses.fields(Config))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_knob_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "from_verl_and_trl.md":  # its first column has verl's names
        text = "\n".join(line.split("|")[3] for line in text.splitlines() if line.startswith("| "))
    named = re.findall(rf"(?:--config\.|`)((?:{SECTIONS})(?:\.[a-z_]+)+)\b(?![.(/])", text)
    names = {name for name in named if not name.endswith((".py", ".md", ".json", ".jsonl"))}
    unknown = {
        name: suggest(Config, name) for name in names if name not in knobs(Config) and hint_of(Config, name) is str
    }
    assert not {name: hint for name, hint in unknown.items() if not _is_section(name)}, unknown


def _is_section(name: str) -> bool:
    return any(knob.startswith(f"{name}.") for knob in knobs(Config))


def test_the_pages_are_not_empty_of_knobs() -> None:
    found = re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)", (ROOT / "docs" / "from_verl_and_trl.md").read_text())
    assert len(found) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing
