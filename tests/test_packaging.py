"""The files around the package say the same things."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def requirements() -> list[str]:
    lines = (line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_requirements_and_pyproject_are_the_same_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements() == project["dependencies"]


def test_requirements_are_sorted_and_bounded_below() -> None:
    names = [re.split(r"[><=]", line)[0].lower() for line in requirements()]
    assert names == sorted(set(names))
    assert all(">=" in line for line in requirements())


def test_the_report_page_is_packaged_with_its_licence() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = tool["setuptools"]["package-data"]["jaxrl_llm"]
    packaged = {path.name for pattern in patterns for path in (ROOT / "jaxrl_llm").glob(pattern)}
    folder = {path.name for path in (ROOT / "jaxrl_llm" / "report_page").iterdir()}
    assert folder <= packaged and {"page.html", "page.js", "uPlot.iife.min.js", "uPlot-LICENSE.txt"} <= folder


def test_only_the_models_folder_of_the_root_is_ignored() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/models/" in ignored
    assert "models/" not in ignored
