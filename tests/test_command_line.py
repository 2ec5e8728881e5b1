"""Arguments, and where a recipe may lie and how it may be broken."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from configs import base
from jaxrl_llm.command_line import load_config, make_parser, parse_args
from jaxrl_llm.errors import UserError
from tests.test_config import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def command(recipe: Path, *arguments: str):
    return parse_args(make_parser("train", "Trains."), [f"--config={recipe}", *arguments])


def test_command_line(recipe: Path, tmp_path: Path):
    config, args = command(recipe, "--config.rollout.n=4", '--config.rollout.stop=("a","b")', f"--workdir={tmp_path}")
    assert (config.rollout.n, config.rollout.stop, args.workdir) == (4, ("a", "b"), str(tmp_path))
    _, args = command(recipe)
    assert args.workdir.startswith("runs/recipe-")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("config.rollout.n=4", "config.rollout.n=4 has no dashes: write --config.rollout.n=4"),
        ("--config.rollout.n", "--config.rollout.n has no value: write --config.rollout.n=VALUE"),
        ("--confg=3", "--confg=3: no such flag; did you mean '--config'?"),
        ("--rollout.n=4", "--rollout.n=4: no such flag; did you mean --config.rollout.n?"),
        ("stray", "'stray' stands alone"),
        ("--config.rollout.m=4", "config.rollout.m: no such key; did you mean 'rollout.n'?"),
        ("--config.mesh.zzzzzzz=4", "config.mesh.zzzzzzz: no such key; valid: mesh.data, mesh.fsdp, mesh.tensor"),
    ],
)
def test_wrong_arguments(recipe: Path, argument: str, expected: str):
    with pytest.raises(UserError) as caught:
        command(recipe, argument)
    assert expected in str(caught.value)


def test_config_flag_is_required():
    with pytest.raises(UserError, match="--config"):
        parse_args(make_parser("train", "Trains."), [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def get_config(:", "SyntaxError"),
        ("x = 1\nraise KeyError('a')", r"recipe\.py:2: KeyError: 'a'"),
        ("x = 1", r"has no function get_config\(\)"),
        ("def get_config(): return {}", "must return an ml_collections.ConfigDict, found dict"),
        (
            "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({'seed': 1})",
            "model.path: is missing",
        ),
    ],
)
def test_broken_recipes(recipe: Path, text: str, expected: str):
    recipe.write_text(text)
    with pytest.raises(UserError, match=expected):
        load_config(recipe)


def test_missing_recipe(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "nowhere.py")


def test_recipe_may_lie_anywhere(recipe: Path):
    """From another folder, with nothing but the package itself on the path."""
    root = Path(base.__file__).resolve().parents[1]
    code = f"""
        import sys
        sys.path.insert(0, {str(root)!r})
        from jaxrl_llm.command_line import load_config
        sys.path.remove({str(root)!r})
        print(load_config({str(recipe)!r}).model.path)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=recipe.parent, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "some/model", done.stderr
