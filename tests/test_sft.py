"""Supervised fine-tuning and export: the loss by hand, learning, and the folder that comes out."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import export, quickstart
from jaxrl_llm.command_line import load_config
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sft import main, sft
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.tiny_runs import QUIET, on_host

SFT = {"data__response_key": "answer", "actor__mini_batch_size": 4, "optimizer__weight_decay": 0.0}


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


def cross_entropy(params: dict, prompt: str, answer: str) -> list[float]:
    """−log π of each token of the answer and its end, by a forward pass over the bare line."""
    tokenizer = load_tokenizer(tiny_folder.folder())
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    response = [*(tiny_folder.VOCABULARY[c] for c in answer), tiny_folder.EOS]
    line = jnp.array([[*rendered, *response]], jnp.int32)
    model = make_transformer(transformer_config(tiny_folder.LLAMA))
    hidden, _ = model.forward(params, line, jnp.arange(line.shape[1])[None], jnp.ones_like(line))
    log_probs = jax.nn.log_softmax(model.heads["logits"](params, hidden)[0].at[:, 47].set(-jnp.inf))
    return [-float(log_probs[len(rendered) - 1 + i, token]) for i, token in enumerate(response)]


def test_the_loss_is_the_cross_entropy_of_the_responses_and_falls() -> None:
    config = tiny_folder.config(**{**SFT, **QUIET, "trainer__steps": 8, "trainer__rollout_dump": False})
    with sft(config) as run:
        params = run.state().actor.params
        first = run._data.batch(0, 4)
        expected = [loss for r in first.records for loss in cross_entropy(params, str(r["prompt"]), str(r["answer"]))]
        losses = [metrics["train/loss"] for metrics, _ in run]
    np.testing.assert_allclose(losses[0], np.mean(expected), rtol=1e-5)
    assert losses[-1] < 0.7 * losses[0]


def test_micro_batches_and_a_response_longer_than_its_frame(tmp_path: Path) -> None:
    """Rows computed in parts give the same update; what does not fit into the frame is cut, its end with it."""
    overrides = {**SFT, **QUIET, "rollout__response_length": 2, "trainer__steps": 1}
    states = []
    for micro in (0, 2):
        with sft(tiny_folder.config(**overrides, actor__micro_batch_size=micro)) as run:
            _, batch = next(run)
            states.append(on_host(run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *(s.actor.params for s in states))
    ended = np.asarray(batch.responses == tiny_folder.EOS).any(1)
    np.testing.assert_array_equal(np.asarray(batch.finish_reason) == 1, ended)
    assert ended.any() and not ended.all() and np.asarray(batch.response_mask).sum(1).max() == 2


def test_a_run_is_resumed_evaluated_exported_and_trained_on(tmp_path: Path) -> None:
    overrides = {**SFT, "trainer__steps": 2, "trainer__save_interval": 1, "eval__interval": 2, "trainer__export": True}
    with sft(tiny_folder.config(**overrides), tmp_path / "run") as run:
        assert len(list(run)) == 2
    with sft(tiny_folder.config(**{**overrides, "trainer__steps": 3}), tmp_path / "run") as run:
        assert (run.step, len(list(run))) == (2, 1)
        state = on_host(run)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all("val-core/words/reward/mean@1" in lines[i] for i in (0, 2, 3))
    assert export.main([str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    model = make_transformer(transformer_config(tiny_folder.LLAMA))
    loaded = hf.load_params(tmp_path / "model", model.declare())
    jax.tree.map(np.testing.assert_array_equal, loaded, state.actor.params)
    at_the_end = hf.load_params(tmp_path / "run" / "model", model.declare())  # the run wrote it too, and once more
    jax.tree.map(np.testing.assert_array_equal, at_the_end, state.actor.params)
    with fit(tiny_folder.config(**QUIET, **tiny_folder.KL_LOSS, model__path=str(tmp_path / "model"))) as further:
        jax.tree.map(np.testing.assert_array_equal, on_host(further).actor.params, state.actor.params)


def test_fresh_parameters_come_from_the_seed_alone() -> None:
    def start(seed: int) -> dict:
        with sft(tiny_folder.config(**SFT, **QUIET, model__fresh=True, seed=seed)) as run:
            return on_host(run).actor.params

    a, again, other = start(1), start(1), start(2)
    jax.tree.map(np.testing.assert_array_equal, a, again)
    assert (a["embed"] != other["embed"]).any()


def test_a_record_without_a_response_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no field 'solution' in the record"):
        sft(tiny_folder.config(**{**SFT, **QUIET, "data__response_key": "solution"}))
    assert main(["--config", "nowhere.py"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_response_whose_tokens_the_embedding_lacks_is_named(tmp_path: Path) -> None:
    """No prompt holds such a token, and on a device it would be read as the last one there is, or as NaN."""
    for path in tiny_folder.folder().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    rows = tiny_folder.VOCABULARY["z"]  # of an embedding that ends before the last letter
    (tmp_path / "config.json").write_text(json.dumps({**tiny_folder.LLAMA, "vocab_size": rows}))
    data = {"data__train": "tests.test_sft:fizz", "data__response_key": "reply"}
    config = tiny_folder.config(**QUIET, **data, model__path=str(tmp_path), model__fresh=True)
    with pytest.raises(UserError, match=rf"data.response_key: 'fizz': token id {rows}: the embedding has {rows} rows"):
        sft(config)


def fizz() -> list[dict[str, str]]:
    return [{"prompt": "3+3", "reply": "fizz"}] * 4


def test_exporting_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


# The model of the quickstart


def test_the_quickstarts_folder_is_what_its_module_writes(tmp_path: Path) -> None:
    quickstart.write_shape(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert filecmp.cmpfiles(tmp_path, quickstart.FOLDER, names, shallow=False) == (names, [], [])
    assert sum(path.stat().st_size for path in quickstart.FOLDER.iterdir()) < 4e6


@pytest.mark.long
def test_a_short_run_of_the_quickstarts_recipe_learns(tmp_path: Path) -> None:
    root = Path(quickstart.__file__).parents[1]
    changes = {"trainer.steps": 40, "data.train_batch_size": 64, "optimizer.warmup_steps": 5, "data.eval": ()}
    config = load_config(
        root / "configs" / "quickstart_sft.py", {**changes, "eval.interval": 0, "logging.progress": "none"}
    )
    with sft(config) as run:
        losses = [metrics["train/loss"] for metrics, _ in run]
    assert losses[0] > 3.0 and np.mean(losses[-5:]) < 1.9  # from log 32 = 3.5 nats a token
