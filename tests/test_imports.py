"""Imports run one way (see README, "The rooms"): each room names the rooms that it may import, and no other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxrl_llm"

# Room -> what it may import of this package. A room is a folder, or a module of its own.
BASE = {"errors"}
CONFIG = BASE | {
    "config",
    "config_devices",
    "config_roles",
    "config_rules",
    "config_values",
    "dotted",
    "environments",
    "rewards",
    "algorithms",
}
HOST = CONFIG | {
    "types",
    "tokenizer",
    "chat",
    "control_tokens",
    "sources",
    "records",
    "order",
    "repeats",
    "data",
    "metrics",
    "writers",
    "progress",
    "checkpoint",
    "sharding",
}
FILES = BASE | {"run_files"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {"command_line", "trainer"},
    "errors": set(),
    "dotted": BASE,
    "types": BASE,
    "algorithms": BASE,
    "config_values": BASE,
    "config_roles": BASE | {"algorithms", "config", "dotted"},
    "config_devices": BASE | {"config", "config_roles"},
    "config_rules": BASE | {"algorithms", "config", "config_roles", "dotted", "environments", "rewards"},
    "config": CONFIG,
    "command_line": CONFIG | {"compilation_cache", "peers"},
    "rewards": BASE | {"dotted"},
    "environments": BASE | {"dotted", "rewards"},
    "curriculum": set(),
    "peers": BASE,
    "tasks": BASE,
    "tokenizer": BASE,
    "control_tokens": BASE,
    "chat": BASE | {"control_tokens"},
    "source_files": BASE,
    "sources": BASE | {"dotted", "source_files"},
    "records": BASE | {"chat", "sources"},
    "order": BASE,
    "bad_records": BASE,
    "data": BASE | {"bad_records", "chat", "control_tokens", "dotted", "order", "records", "sources", "types"},
    "repeats": {"data"},
    "exchanges": BASE | {"chat", "records", "sources"},
    "sharding": BASE | {"types"},
    "checkpoint": BASE | {"types"},
    "metrics": BASE | {"algorithms", "types"},
    "meters": set(),
    "live": {"meters"},
    "progress": {"live", "meters"},
    "run_files": BASE,
    "loggers": FILES | {"config"},
    "report_charts": set(),
    "report_numbers": {"meters"},
    "report": FILES | {"config", "meters", "report_charts", "report_numbers"},
    "run_mark": FILES | {"peers"},
    "writers": CONFIG | FILES | {"loggers", "progress", "report", "report_numbers"},
    "samples": BASE | {"sharding", "data", "rewards", "tokenizer", "types"},
    "models": BASE | {"types"},
    "steps": CONFIG | {"types", "models", "metrics", "sharding"},
    "roles": BASE | {"models", "tokenizer"},
    "loading": HOST | {"models", "roles", "steps"},
    "accounting": CONFIG | {"costs", "lengths", "models", "steps"},
    "lengths": set(),
    "peaks": {"chips", "run_files"},
    "compilation_cache": set(),
    "huge_pages": set(),
    "compile_log": set(),
    "compiled": HOST | {"compile_log", "models", "steps"},
    "samplers": HOST | {"models", "steps", "compiled", "loading"},
    "collect": HOST
    | {"lengths", "peers", "steps", "compiled", "curriculum", "environments", "loading", "samplers", "timers"},
    "evaluation": HOST | {"models", "steps", "compile_log", "compiled", "loading", "collect", "samplers"},
    "reward_scorer": HOST | {"models", "steps", "compile_log", "compiled", "exchanges", "loading"},
    "signals": BASE,
    "watchdog": BASE,
    "guard": BASE | {"config", "signals", "watchdog"},
    "profiling": BASE,
    "timers": {"metrics", "profiling", "steps", "watchdog"},
    "memory": {"compiled", "config", "run_mark"},
    "health": {"config", "rewards", "types"},
    "resume": HOST | {"curriculum", "loading", "peers", "steps"},
    "input_notes": HOST | {"costs", "loading", "models", "steps"},
    "ahead": HOST | {"collect", "curriculum", "lengths", "resume"},
    "run_start": HOST
    | {"ahead", "models", "steps", "loading", "compile_log", "compiled", "collect", "evaluation"}
    | {"accounting", "peaks", "profiling"}
    | {"guard", "input_notes", "memory", "resume", "run_mark"}
    | {"peers", "reward_scorer", "samplers", "timers"},
    "trainer": HOST
    | {"models", "steps", "loading", "compiled", "evaluation", "run_start"}
    | {"accounting", "lengths", "profiling"}
    | {"guard", "health", "memory", "samples", "timers"},
    "hlo": set(),
    "dry_run": HOST
    | {"models", "steps", "loading", "compile_log", "compiled", "collect", "evaluation"}
    | {"hlo", "input_notes", "reward_scorer"},
    "costs": CONFIG | {"models", "sharding", "steps", "types"},
    "phase_costs": CONFIG | {"costs", "hlo", "steps"},
    "chips": BASE,
    "plan": CONFIG | {"chips", "command_line", "costs", "models", "phase_costs"},
    "train": {"command_line", "dry_run", "errors", "guard", "huge_pages", "profiling", "signals", "trainer"},
    "evaluate": HOST
    | {"command_line", "models", "steps", "loading", "collect", "compile_log", "compiled", "evaluation"}
    | {"huge_pages", "reward_model", "reward_scorer", "run_files"},
    "fetch": BASE | {"models"},
    "supervised": HOST
    | {"command_line", "compile_log", "compiled", "evaluation", "guard", "lengths"}
    | {"loading", "models", "signals", "steps", "timers", "trainer"},
    "sft": HOST | {"command_line", "exchanges", "huge_pages", "models", "steps", "supervised"},
    "reward_model": HOST
    | {"accounting", "command_line", "compile_log", "compiled", "evaluation", "exchanges"}
    | {"huge_pages", "loading", "models", "steps", "supervised"},
    "export": {"command_line", "errors", "loading", "models"},
    "quickstart": BASE | {"models"},
    "__main__": set(),
    "generate": HOST | {"command_line", "huge_pages", "models", "steps", "loading"},
}


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return found


def imported_rooms(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "jaxrl_llm" else [f"jaxrl_llm.{a.name}" for a in node.names]
            assert node.level == 0, f"{path}: relative import"
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("jaxrl_llm.")}


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    assert room in ALLOWED, f"{room} is a new room: say in ALLOWED what it may import"
    for path in rooms()[room]:
        assert imported_rooms(path) - {room} <= ALLOWED[room], path.name


def test_algorithms_know_no_model_and_no_config() -> None:
    assert not ALLOWED["algorithms"] & {"models", "config", "trainer", "types"}


@pytest.mark.parametrize("room", ["rewards", "report"])
def test_what_does_not_pull_in_jax(room: str) -> None:
    program = f"import sys, jaxrl_llm.{room}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent).returncode == 0
