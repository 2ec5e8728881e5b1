"""Reward models trained on pairs: the loss, the pairs as batches, and runs, whose folders are then used as rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import jit
from safetensors.numpy import load_file

from jaxrl_llm import evaluate, export, generate, reward_model
from jaxrl_llm.algorithms.losses import bradley_terry
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.loading import load_inputs, load_model_params, make_layout
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.tensor_files import TensorFolder
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.reward_model import make_pairs, train_reward_model
from jaxrl_llm.reward_scorer import make_scorer
from jaxrl_llm.sft import sft
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.scoring import score_sequences
from jaxrl_llm.steps.step import init_key
from jaxrl_llm.tasks import column_pairs
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Params
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.test_reward_model import RENDERED, ids_of
from tests.tiny_runs import QUIET, compilations, on_host

TRAINED: dict[str, Any] = {
    "data__train": "tests.tiny_folder:pairs",
    "data__eval": "tests.tiny_folder:pairs(count=6)",
    "rollout__response_length": 12,
    "optimizer__weight_decay": 0.0,
    "trainer__rollout_dump": False,
}


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


# The loss


def test_the_loss_is_that_of_the_papers_and_its_gradient_that_of_finite_differences() -> None:
    c, r = np.array([2.0, -0.5, 30.0, 0.1]), np.array([0.5, 1.5, -80.0, 0.1])
    mask, coefficient = np.array([True, True, True, False]), 0.3

    def loss(c: Any, r: Any) -> Any:
        return bradley_terry(jnp.asarray(c), jnp.asarray(r), jnp.asarray(mask), 3.0, center_coef=coefficient)[0]

    def by_hand(c: np.ndarray, r: np.ndarray) -> float:
        each = np.log1p(np.exp(r - c)) + coefficient * (c + r) ** 2
        return float(each[mask].sum() / 3)

    np.testing.assert_allclose(loss(c, r), by_hand(c, r), rtol=1e-6)
    found = jax.grad(loss, (0, 1))(jnp.asarray(c), jnp.asarray(r))
    for side, gradient in enumerate(found):
        for i in range(4):
            step = np.eye(4)[i] * 1e-6
            up, down = ([x + s * step if k == side else x for k, x in enumerate((c, r))] for s in (1, -1))
            np.testing.assert_allclose(gradient[i], (by_hand(*up) - by_hand(*down)) / 2e-6, rtol=1e-4, atol=1e-6)


def test_pairs_that_do_not_count_reach_nothing() -> None:
    mask = jnp.array([True, False])

    def loss(c: Any) -> Any:
        value, metrics = bradley_terry(c, jnp.array([0.0, jnp.inf]), mask, 1.0, center_coef=1.0)
        return value, metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([1.0, jnp.nan]))
    np.testing.assert_allclose(value, np.log1p(np.exp(-1)) + 1, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1 / (1 + np.e) + 2, 0], rtol=1e-6)
    assert {name: float(x) for name, x in metrics.items()} == {
        "accuracy": 1.0,
        "margin": 1.0,
        "chosen": 1.0,
        "rejected": 0.0,
    }


def test_the_pairs_of_the_quickstart() -> None:
    found = column_pairs(split="test", copies=3)
    assert len(found) == 3000
    for pair in found:
        a, b = pair["prompt"].rstrip("=").split("+")
        assert pair["chosen"] == pair["answer"] == str(int(a) + int(b)) != pair["rejected"]
    kinds = [len(pair["rejected"]) - len(pair["chosen"]) for pair in found]
    assert {-1, 0, 1} == set(kinds)
    off = [abs(int(pair["rejected"]) - int(pair["answer"])) == 10 for pair in found]
    assert 0.45 < np.mean(off) < 0.6


# Pairs


def pairs_of(config: Config, *records: dict[str, Any]) -> Any:
    """The batch of a run's first pairs, the first of them made of the records instead of its own."""
    inputs = load_inputs(config)
    assert inputs.train is not None
    given = inputs.train.batch(0, 4)
    given.records[: len(records)] = records
    return make_pairs(config, inputs).batch(given)


def whole_rows(batch: Any) -> list[list[int]]:
    """Each row's prompt and response together."""
    prompts = [ids[own].tolist() for ids, own in zip(batch.prompts, batch.prompt_mask, strict=True)]
    return [
        prompts[row // 2] + batch.responses[row][batch.response_mask[row]].tolist() for row in range(batch.num_rows)
    ]


def test_a_pair_is_its_two_renderings_with_a_shared_beginning() -> None:
    config = tiny_folder.config(**{**TRAINED, **QUIET}, rollout__prompt_length=24, data__too_long="drop")
    chat = [{"role": "user", "content": "3+4"}]
    turns = [[{"role": "assistant", "content": text}] for text in ("seven", "eight")]
    given: list[dict[str, Any]] = [
        {"prompt": "3+4", "chosen": "seven", "rejected": "seventeen"},
        {"prompt": chat, "chosen": turns[0], "rejected": turns[1]},
        {"prompt": "3+4", "chosen": "<|im_end|>", "rejected": "a longer one than all others"},
    ]
    batch = pairs_of(config, *given)
    rows, reasons = whole_rows(batch), batch.finish_reason.reshape(-1, 2).tolist()

    def rendered(text: str) -> list[int]:
        return ids_of(RENDERED.replace("What is 3+4?", "3+4").format(text))

    assert rows[:4] == [rendered(text) for text in ("seven", "seventeen", "seven", "eight")]
    # The prompt's frame is full; the second pair's texts share nothing after it.
    assert batch.prompt_mask.sum(1)[:2].tolist() == [24, 22]
    assert reasons[:3] == [[FINISH_STOP] * 2, [FINISH_STOP] * 2, [FINISH_STOP, FINISH_LENGTH]]
    assert rows[4].count(tiny_folder.EOS) == 2  # the template's own, not the one that the response spells
    assert rows[5] == rendered("a longer one than all others")[: 22 + 12]
    with pytest.raises(UserError, match=r"data.rejected_key: no field 'rejected' in the record"):
        pairs_of(config, {"prompt": "3+4", "chosen": "7"})
    with pytest.raises(UserError, match=r"data.chosen_key: a response is a string or a list of chat messages"):
        pairs_of(config, {"prompt": "3+4", "chosen": 7, "rejected": "8"})


def test_filler_pairs_count_for_nothing() -> None:
    config = tiny_folder.config(**TRAINED)
    inputs = load_inputs(config)
    assert inputs.held_out is not None
    last = make_pairs(config, inputs).batch(list(inputs.held_out.eval_batches(4))[-1])
    assert last.prompt_valid.tolist() == [True, True, False, False]
    assert np.asarray(last.loss_mask).any(1).tolist() == [True] * 4 + [False] * 4
    assert np.asarray(last.prompt_mask).any(1).all()


# Runs


def scores_of(params: Params, rows: list[list[int]]) -> np.ndarray:
    width = 64
    tokens, own = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], own[row, : len(ids)] = ids, True
    model = make_transformer(transformer_config(tiny_folder.LLAMA), score_head=True)
    return np.asarray(jit(lambda *args: score_sequences(model, *args))(params, jnp.asarray(tokens), jnp.asarray(own)))


def test_the_first_loss_by_hand_then_it_falls_in_parts_as_at_once() -> None:
    """Every row scored alone and whole gives the first step's numbers; micro-batches of one pair give its update."""
    overrides = {**TRAINED, **QUIET, "trainer__steps": 40, "reward__model__center_coefficient": 0.05}
    overrides |= {"optimizer__eps": 0.01, "optimizer__lr": 0.02}  # so that equal updates mean equal gradients
    config = tiny_folder.config(**overrides)
    rows = whole_rows(pairs_of(config))
    with train_reward_model(config) as run:
        params = on_host(run).actor.params
        first, _ = next(run)
        after = on_host(run)
        losses = [first["train/loss"], *(metrics["train/loss"] for metrics, _ in run)]
    chosen, rejected = scores_of(params, rows).reshape(-1, 2).T
    expected = np.log1p(np.exp(rejected - chosen)) + 0.05 * (chosen + rejected) ** 2
    np.testing.assert_allclose(first["train/loss"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(first["train/margin"], (chosen - rejected).mean(), rtol=1e-4)
    assert first["train/accuracy"] == (chosen > rejected).mean() and np.abs(chosen - rejected).min() > 0
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    with train_reward_model(tiny_folder.config(**overrides, actor__micro_batch_size=2)) as run:
        again, _ = next(run)
        np.testing.assert_allclose(again["train/grad_norm"], first["train/grad_norm"], rtol=1e-4)
        parts = on_host(run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), parts.actor.params, after.actor.params)


@pytest.mark.long
def test_from_a_run_to_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed bit for bit, evaluated, exported, trained further, used as the reward of another run; refused as text."""
    overrides = {**TRAINED, "trainer__steps": 3, "trainer__save_interval": 1, "eval__interval": 3}
    config, folder = tiny_folder.config(**overrides), tmp_path / "run"
    with train_reward_model(config, folder) as run:
        next(run)
        with compilations() as events:
            rest = list(run)
        assert not events and [step["train/truncated_ratio"] for step, _ in rest] == [0, 0]
        last = on_host(run)
    with train_reward_model(tiny_folder.config(**{**overrides, "trainer__steps": 2}), tmp_path / "other") as run:
        assert len(list(run)) == 2
    with train_reward_model(config, tmp_path / "other") as run:
        assert (run.step, len(list(run))) == (2, 1)
        jax.tree.map(np.testing.assert_array_equal, on_host(run), last)
    lines = read_jsonl(folder / "metrics.jsonl")
    accuracy = [lines[i]["val-core/words/reward/mean@1"] for i in (0, 3)]
    assert accuracy[1] == lines[3]["val-aux/words/accuracy/mean@1"] and "val-aux/signs/margin/mean@1" in lines[3]
    assert "Pairs in order" in (folder / "report.html").read_text()
    capsys.readouterr()
    assert evaluate.main(["--run", str(folder), f"--output={tmp_path / 'pairs.jsonl'}"]) == 0
    pairs = capsys.readouterr().out
    assert pairs.startswith("pairs    words  ")
    rows = read_jsonl(tmp_path / "pairs.jsonl")
    assert len(rows) == 6  # in batches of four, the last of which has two fillers
    np.testing.assert_allclose(np.mean([r["score"] for r in rows if r["data_source"] == "words"]), accuracy[1])
    assert generate.main(["--model", str(folder), "3+4"]) == 2
    assert "is a run of jaxrl_llm.reward_model, whose model writes no text" in capsys.readouterr().err

    out = tmp_path / "model"
    assert export.main([str(folder), str(out)]) == 0
    capsys.readouterr()
    assert evaluate.main([f"--config={folder / 'config.json'}", f"--config.model.path={out}"]) == 0
    assert capsys.readouterr().out == pairs
    written = classifier.check_reward_model(out)
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert written["pad_token_id"] == tiny_folder.EOS  # the language model's own, which transformers does not read at
    reward = tiny_folder.config(**QUIET, reward__model__path=str(out), reward__functions=())
    scorer, _ = make_scorer(reward, load_inputs(reward), make_layout(reward))
    assert scorer is not None
    scorer.load()
    scorer.compile(lambda text: None)
    pairs = tiny_folder.pairs(6)
    for side in ("chosen", "rejected"):
        found = scorer([""] * 6, [pair[side] for pair in pairs], pairs)
        np.testing.assert_allclose([x["score"] for x in found], [r["extras"][side] for r in rows], rtol=1e-4, atol=1e-5)
    further = tiny_folder.config(**{**TRAINED, **QUIET, "model__path": str(out)})
    with train_reward_model(further) as run:
        jax.tree.map(np.testing.assert_array_equal, on_host(run).actor.params, last.actor.params)
    with pytest.raises(UserError, match="no language model, but a sequence classifier"):
        fit(tiny_folder.config(**QUIET, model__path=str(out)))


LORA: dict[str, Any] = {
    **TRAINED,
    **QUIET,
    "reward__functions": (),  # nothing is scored, so nothing need be named
    "model__lora_rank": 2,
    "model__target_modules": ("q_proj", "down_proj"),
    "model__dtype": "bfloat16",
    "trainer__steps": 3,
}


@pytest.mark.parametrize("start", [pytest.param("language model", marks=pytest.mark.long), "reward model"])
def test_lora_trains_the_overlay_and_the_whole_head(tmp_path: Path, start: str) -> None:
    """On frozen parameters in the dtype of the computation; resumed bit for bit; exported merged and as an adapter."""
    folder = tiny_folder.folder() if start == "language model" else tiny_folder.reward_folder()
    overrides = {**LORA, "model__path": str(folder), "trainer__save_interval": 2}
    with train_reward_model(tiny_folder.config(**overrides), tmp_path / "run") as run:
        first = on_host(run)
        assert first.base is not None and set(first.base) == {"embed", "layers", "final_norm"}
        assert {x.dtype.name for x in jax.tree.leaves(first.base)} == {"bfloat16"}
        list(run)
        last = on_host(run)
    assert set(last.actor.params) == {"layers", "score"} and set(last.actor.params["layers"]) == {"q", "down"}
    assert {x.dtype.name for x in jax.tree.leaves(last.actor.params)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, last.base, first.base)
    for a, b in zip(jax.tree.leaves(first.actor.params), jax.tree.leaves(last.actor.params), strict=True):
        assert (a != b).mean() > 0.9
    if start == "reward model":  # whose head is where training starts from, in all its digits
        model = make_transformer(transformer_config(hf.read_config(folder)), score_head=True)
        np.testing.assert_array_equal(first.actor.params["score"], hf.load_params(folder, model.declare())["score"])
    else:
        with train_reward_model(tiny_folder.config(**{**overrides, "trainer__steps": 2}), tmp_path / "other") as run:
            list(run)
        with train_reward_model(tiny_folder.config(**overrides), tmp_path / "other") as run:
            assert run.step == 2
            list(run)
            jax.tree.map(np.testing.assert_array_equal, on_host(run), last)

    assert export.export(tmp_path / "run", tmp_path / "merged") == 3
    assert export.export(tmp_path / "run", tmp_path / "adapter", adapter=True) == 3
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert settings["base_model_name_or_path"] == str(folder) and settings["target_modules"] == ["down_proj", "q_proj"]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged, base = (TensorFolder(path) for path in (tmp_path / "merged", folder))
    classifier.check_reward_model(tmp_path / "merged")
    score = adapter.pop("base_model.model.score.weight")
    np.testing.assert_array_equal(score, last.actor.params["score"])
    np.testing.assert_array_equal(merged.read("score.weight"), score)
    assert len(adapter) == 2 * 2 * tiny_folder.LLAMA["num_hidden_layers"]
    for name in merged.names - {"score.weight"}:
        expected = base.read(name).astype(ml_dtypes.bfloat16)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            a, b = (adapter[f"{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
            whole = expected.astype(np.float32) + 8.0 * (b @ a)
            np.testing.assert_allclose(merged.read(name).astype(np.float32), whole, rtol=2**-8, atol=1e-6)
        else:
            np.testing.assert_array_equal(merged.read(name), expected)


def test_a_head_comes_from_the_seed_and_the_trunk_from_the_folder() -> None:
    model = make_transformer(transformer_config(tiny_folder.LLAMA), score_head=True)

    def start(seed: int) -> dict[str, Any]:
        params = load_model_params(tiny_folder.folder(), model, Layout.single(), init_key(seed, 0))
        return jax.tree.map(np.asarray, params)

    a, again, other = start(1), start(1), start(2)
    jax.tree.map(np.testing.assert_array_equal, a, again)
    assert (a["score"] != other["score"]).all() and a["score"].shape == (1, 32)
    folder = hf.load_params(tiny_folder.folder(), make_transformer(transformer_config(tiny_folder.LLAMA)).declare())
    jax.tree.map(np.testing.assert_array_equal, {k: x for k, x in a.items() if k != "score"}, folder)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model__lora_rank": 2, "model__target_modules": ("q_proj", "q_prj")}, "config.model.target_modules"),
        ({"actor__micro_batch_size": 1}, "each of 1 shard(s) takes whole pairs"),
        ({"data__chosen_key": "good"}, "data.chosen_key: no field 'good' in the record"),
    ],
)
def test_what_is_refused(overrides: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(UserError) as caught:
        train_reward_model(tiny_folder.config(**{**TRAINED, **QUIET, **overrides}), tmp_path / "run")
    assert text in str(caught.value) and not (tmp_path / "run").exists()


def test_a_run_that_scores_needs_a_reward() -> None:
    """Which a configuration does not say: with this one pairs are trained on."""
    for start in (fit, sft):
        with pytest.raises(UserError, match=r"config.reward.functions = \(\): must be given: at least one reward"):
            start(tiny_folder.config(reward__functions=(), data__response_key="answer"))


def test_a_classifier_of_several_labels_is_no_start(tmp_path: Path) -> None:
    shape = {**tiny_folder.LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 5}
    for path in tiny_folder.folder().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UserError, match=r"config.model.path: .*config.json: 5 labels"):
        train_reward_model(tiny_folder.config(**{**TRAINED, **QUIET}, model__path=str(tmp_path)))


def test_the_command_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert reward_model.main(["--config", "nowhere.py"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert reward_model.main(["--config", "configs"]) == 2
    assert "--config=configs: a folder, expected a recipe" in capsys.readouterr().err
