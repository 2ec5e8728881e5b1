"""The notebooks: each is paired with its text, and runs from top to bottom at a small size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_folder

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for a word problem, one token a character. (Its weights know no positions.)"""
    folder = tmp_path_factory.mktemp("notebooks") / "model"
    shutil.copytree(tiny_folder.folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


def test_there_are_six() -> None:
    assert [name[0] for name in NAMES] == list("123456")
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_what_its_text_says(name: str) -> None:
    """`jupytext --sync notebooks/*.py` makes it so."""
    cells = []
    for block in (NOTEBOOKS / f"{name}.py").read_text().split("\n# %%")[1:]:
        kind, _, body = block.partition("\n")
        lines = body.strip("\n").splitlines()
        cells.append(
            "\n".join(line.removeprefix("#").removeprefix(" ") if "markdown" in kind else line for line in lines)
        )
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert ["".join(cell["source"]) for cell in notebook["cells"]] == cells


LONG = (
    "1_quickstart",
    "2_ppo_and_grpo",
    "4_gsm8k",
    "5_your_own_reward_and_estimator",
    "6_rlhf",
)  # several trainings each; their parts are tested elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in NAMES])
def test_a_notebook_runs(name: str, model: Path, tmp_path: Path) -> None:
    small = {
        "JAXRL_LLM_SMALL": "1",
        "JAXRL_LLM_MODEL": str(model),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tiny_folder.session_folder() / "notebook_programs"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONPATH": str(NOTEBOOKS.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOKS / f"{name}.ipynb")],
        env=os.environ | small,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
