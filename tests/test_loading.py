"""What is refused when a run's models, tokenizer and prompts are brought together, before any parameter is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.loading import build_program, load_inputs, make_layout
from tests import tiny_folder


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be spoilt."""
    return Path(shutil.copytree(tiny_folder.folder(), tmp_path / "model"))


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(**overrides: Any) -> str:
    config = tiny_folder.config(**overrides)
    with pytest.raises(UserError) as caught:
        build_program(config, load_inputs(config), make_layout(config), total_steps=1)
    return str(caught.value)


def test_token_ids_beyond_the_embedding() -> None:
    assert "the embedding has 48 rows, and token id 48 is in use" in refusal(rollout__stop_token_ids=(48,))


def test_more_positions_than_the_model_has() -> None:
    text = refusal(rollout__prompt_length=200, rollout__response_length=100)
    assert "config.rollout.prompt_length + config.rollout.response_length = 300" in text
    assert "256 positions" in text


@pytest.mark.parametrize(
    "role",
    [{"reference__path": "{}", "actor__use_kl_loss": True}, {"critic__path": "{}", "algorithm__estimator": "gae"}],
    ids=["reference", "critic"],
)
def test_a_role_whose_tokens_are_others(folder: Path, role: dict[str, Any]) -> None:
    role = {key: str(folder) if value == "{}" else value for key, value in role.items()}

    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    config = tiny_folder.config(**role)
    build_program(config, load_inputs(config), make_layout(config), total_steps=1)  # as long as they are the same
    edit(folder / "tokenizer.json", swap)
    text = refusal(**role)
    a, b = (tiny_folder.VOCABULARY[c] for c in "ab")
    assert f"differs from the actor's ({tiny_folder.folder()}) in 2 tokens; 'a' is {a} for the actor, here {b}" in text


def test_a_reference_that_computes_otherwise(folder: Path) -> None:
    """With tensors of the same shapes, which the actor's program would read without a word."""
    role = {"reference__path": str(folder), "actor__use_kl_loss": True}
    edit(folder / "config.json", lambda content: content.update(max_position_embeddings=512))
    config = tiny_folder.config(**role)
    build_program(config, load_inputs(config), make_layout(config), total_steps=1)  # which changes nothing
    edit(folder / "config.json", lambda content: content.update(rope_theta=500.0))
    text = refusal(**role)
    assert text.startswith(f"config.reference.path: {folder}: config.json describes another model than the actor's")
    assert "rope is RopeConfig(theta=500.0" in text and "the actor's RopeConfig(theta=10000.0" in text


def test_a_critic_that_lacks_rows_for_what_the_actor_may_draw(folder: Path) -> None:
    """Prompts hold none of these ids; a sampled one would be read as the last row there is."""
    edit(folder / "config.json", lambda content: content.update(vocab_size=46))
    text = refusal(critic__path=str(folder), algorithm__estimator="gae")
    assert f"{folder}: the embedding has 46 rows, and token id 46 is in use" in text


def test_a_critic_of_fewer_positions(folder: Path) -> None:
    edit(folder / "config.json", lambda content: content.update(max_position_embeddings=32))
    assert "32 positions" in refusal(critic__path=str(folder), algorithm__estimator="gae")
