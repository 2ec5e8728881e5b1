"""Reward models: their folders, their scores against torch, and as the reward of a run."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit

from jaxrl_llm import evaluate
from jaxrl_llm.config import to_json
from jaxrl_llm.errors import UserError
from jaxrl_llm.exchanges import Exchanges
from jaxrl_llm.loading import load_inputs, load_model_params, make_layout
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.tensor_files import TensorFolder, write_tensors
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.reward_scorer import RewardScorer, make_scorer
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.scoring import score_sequences
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import Array, Model, Param, Params
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.tiny_runs import compilations, on_host

FIXTURES = Path(__file__).parent / "fixtures" / "reward_models"
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


def load(folder: Path) -> tuple[Model, Params]:
    model = make_transformer(transformer_config(hf.read_config(folder)), score_head=True)
    return model, jax.tree.map(jnp.asarray, hf.load_params(folder, model.declare()))


# Folders


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_scores_equal_torch(name: str) -> None:
    model, params = load(FIXTURES / name)
    with np.load(FIXTURES / name / "expected.npz") as file:
        tokens, mask, expected = file["tokens"], file["mask"], file["scores"]
    score = jax.jit(lambda tokens, mask: score_sequences(model, params, tokens, mask))
    np.testing.assert_allclose(score(tokens, mask), expected, atol=TOLERANCE, rtol=0)
    # On whichever side the padding is, and whatever stands there, ids outside the vocabulary too.
    left = [np.stack([np.roll(row, -m.sum()) for row, m in zip(x, mask, strict=True)]) for x in (tokens, mask)]
    assert (left[1] != mask).any()
    np.testing.assert_allclose(score(np.where(left[1], left[0], 10**6), left[1]), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_folder_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name
    hf.save_params(tmp_path / "out", load(source)[1], hf.read_config(source))
    read, written = TensorFolder(source), TensorFolder(tmp_path / "out")
    assert read.names == written.names and "score.weight" in read.names and "lm_head.weight" not in read.names
    for tensor in read.names:
        np.testing.assert_array_equal(read.read(tensor), written.read(tensor))
    assert classifier.check_reward_model(tmp_path / "out") == hf.read_config(source) | {"dtype": "float32"}


@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "phi3", "qwen3_moe", "smollm3"])
def test_the_classes_are_those_of_transformers(kind: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    assert classifier.classifier_config({"model_type": kind})["architectures"] == [KNOWN[kind]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny reward model's folder, to be spoilt."""
    return Path(shutil.copytree(tiny_folder.reward_folder(), tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, **changes}.items() if v is not None}))


def rewrite(folder: Path, tensors: dict[str, np.ndarray], without: str = "") -> None:
    files = TensorFolder(folder)
    kept = {name: files.read(name) for name in files.names if name != without} | tensors
    write_tensors(folder, kept.items())


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        scorer_of(folder, **overrides)
    return str(caught.value)


def scorer_of(folder: Path, **overrides: Any) -> RewardScorer:
    config = tiny_folder.config(reward__model__path=str(folder), **overrides)
    scorer, _ = make_scorer(config, load_inputs(config), make_layout(config))
    assert scorer is not None
    scorer.load()
    scorer.compile(lambda text: None)
    return scorer


def test_a_language_model_is_no_reward_model() -> None:
    text = refusal(tiny_folder.folder())
    assert "config.reward.model.path" in text and "found ['LlamaForCausalLM']" in text
    assert "python -m jaxrl_llm.reward_model" in text


@pytest.mark.parametrize(
    ("changes", "labels"),
    [({"id2label": {"0": "bad", "1": "good"}}, 2), ({"id2label": None}, 2), ({"id2label": None, "num_labels": 3}, 3)],
)
def test_more_than_one_label(folder: Path, changes: dict[str, Any], labels: int) -> None:
    edit(folder / "config.json", **changes)
    assert f"config.json: {labels} labels" in (text := refusal(folder)) and "expected 1" in text


def test_tensors_that_are_not_those_of_a_reward_model(folder: Path) -> None:
    score = TensorFolder(folder).read("score.weight")
    rewrite(folder, {"score.weight": np.repeat(score, 2, 0)})
    assert "'score.weight': config.json asks for shape (1, 32), found (2, 32)" in refusal(folder)
    rewrite(folder, {}, without="score.weight")
    assert "1 tensor missing: 'score.weight'" in refusal(folder)
    rewrite(folder, {"score.weight": score, "lm_head.weight": np.zeros((48, 32), np.float32)})
    assert "1 tensor that config.json does not ask for: 'lm_head.weight'" in refusal(folder)


def test_a_template_that_is_missing_or_refuses(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('no assistant') if messages[-1].role == 'assistant' }}")
    assert "config.reward.model: the chat template refuses the prompt: no assistant" in refusal(folder)
    template.unlink()
    assert "config.reward.model.chat_template = True: the reward model's tokenizer has no" in refusal(folder)
    scorer_of(folder, reward__model__chat_template=False)


def test_more_tokens_than_the_model_has_positions() -> None:
    text = refusal(tiny_folder.reward_folder(), reward__model__max_length=257)
    assert "config.reward.model.max_length = 257" in text and "256 positions" in text


# Scores


RECORD = {"prompt": "What is 3+4?"}
RENDERED = "<|im_start|>user\nWhat is 3+4?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


WIDTH = 48


@functools.cache
def scoring(folder: Path) -> Callable[[Array, Array], Array]:
    model, params = load(folder)
    return jit(functools.partial(score_sequences, model, params))


def expected_score(folder: Path, ids: list[int]) -> float:
    """Of one text alone, with its padding on the left."""
    tokens, own = jnp.array([[0] * (WIDTH - len(ids)) + ids]), jnp.arange(WIDTH)[None] >= WIDTH - len(ids)
    return float(scoring(folder)(tokens, own)[0])


def ids_of(text: str) -> list[int]:
    """Of a template's rendering: control tokens where they are spelled, else one token a character."""
    found = []
    while text:
        token = next((t for t in tiny_folder.SPECIAL if text.startswith(t)), text[0])
        found.append(tiny_folder.VOCABULARY[token])
        text = text[len(token) :]
    return found


def test_a_response_is_scored_behind_its_prompt_by_the_template() -> None:
    folder = tiny_folder.reward_folder()
    scorer = scorer_of(folder, reward__model__micro_batch_size=3)  # seven rows are three calls, the last of one row
    responses = ["7", "it is 7", "", "77", "7 ", "8", "1"]
    found = scorer(["?"] * 7, responses, [RECORD] * 7)
    expected = [ids_of(RENDERED.format(response)) for response in responses]
    np.testing.assert_allclose(
        [row["score"] for row in found], [expected_score(folder, ids) for ids in expected], rtol=1e-4, atol=1e-5
    )
    assert [row["tokens"] for row in found] == [len(ids) for ids in expected]
    assert not any(row["truncated"] for row in found) and len({row["score"] for row in found}) == 7


def test_a_response_never_becomes_a_control_token() -> None:
    folder = tiny_folder.reward_folder()
    unknown, end = tiny_folder.VOCABULARY["<unk>"], ids_of("<|im_end|>\n")
    (found,) = scorer_of(folder)(["?"], ["7<|im_end|>"], [RECORD])
    spelled = [tiny_folder.VOCABULARY.get(c, unknown) for c in "7<|im_end|>"]
    ids = ids_of(RENDERED.format("")[: -len("<|im_end|>\n")]) + spelled + end
    assert found["tokens"] == len(ids)
    np.testing.assert_allclose(found["score"], expected_score(folder, ids), rtol=1e-4)


def test_without_a_template_the_end_token_ends_and_padding_is_not_read(folder: Path) -> None:
    overrides: dict[str, Any] = {"reward__model__chat_template": False, "data__chat_template": False}
    line = ids_of("What is 3+4?7")
    (found,) = scorer_of(folder, **overrides)(["?"], ["7"], [RECORD])
    np.testing.assert_allclose(found["score"], expected_score(folder, [*line, tiny_folder.EOS]), rtol=1e-4)
    edit(folder / "config.json", pad_token_id=tiny_folder.EOS)  # then transformers reads one token earlier
    (found,) = scorer_of(folder, **overrides)(["?"], ["7"], [RECORD])
    np.testing.assert_allclose(found["score"], expected_score(folder, line), rtol=1e-4)


def test_what_is_cut_is_counted_and_what_cannot_be_scored_fails_alone() -> None:
    folder = tiny_folder.reward_folder()
    whole = ids_of(RENDERED.format("it is 7"))
    scorer = scorer_of(folder, reward__model__max_length=len(whole) - 4)
    chat = [{"role": "robot", "content": "hello"}]
    long, odd, short = scorer([""] * 3, ["it is 7", "7", "7"], [RECORD, {"prompt": chat}, {"prompt": "3+4"}])
    assert (long["truncated"], long["tokens"], short["truncated"]) == (True, len(whole), False)
    np.testing.assert_allclose(long["score"], expected_score(folder, whole[:-4]), rtol=1e-4, atol=1e-5)
    assert isinstance(odd, UserError) and "has role 'robot'" in str(odd)


def test_what_is_cut_behind_padding_is_read_before_it(folder: Path) -> None:
    """As transformers reads the same tokens: padding within the text is the last of them once the rest is cut off."""
    edit(folder / "config.json", pad_token_id=tiny_folder.EOS)
    prompt = ids_of(RENDERED.split("<|im_start|>assistant")[0])
    assert prompt[-2] == tiny_folder.EOS
    (found,) = scorer_of(folder, reward__model__max_length=len(prompt) - 1)([""], ["7"], [RECORD])
    np.testing.assert_allclose(found["score"], expected_score(folder, prompt[:-2]), rtol=1e-4, atol=1e-5)


def test_nothing_to_score_and_tokens_without_a_row_fail_alone(folder: Path) -> None:
    tokenizer = tiny_folder.tokenizer()
    options: dict[str, Any] = {"eos_id": 0, "pad_id": None, "template_kwargs": {}, "system_prompt": None}
    options |= {"prompt_key": "prompt", "prompt_template": ""}
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(UserError, match="no tokens: there is nothing to score"):
        Exchanges(tokenizer, 48, chat_template=True, **options).ids(RECORD, "7")
    seven = tiny_folder.VOCABULARY["7"]
    with pytest.raises(UserError, match=r"token id \d+: the embedding has \d+ rows"):
        Exchanges(tokenizer, seven, chat_template=False, **options).ids({"prompt": "1"}, "7")


# As a reward


def test_a_run_is_rewarded_by_functions_and_by_the_model(tmp_path: Path) -> None:
    """One column more, weighed; the same again after a resume; in evaluation; in no checkpoint; compiled beforehand."""
    config = tiny_folder.config(
        reward__model__path=str(tiny_folder.reward_folder()),
        reward__model__weight=0.5,
        reward__weights=(0.0,),
        trainer__steps=2,
        trainer__save_interval=1,
    )
    with fit(config, tmp_path / "run") as run:
        next(run)
        with compilations() as events:
            metrics, batch = next(run)
        assert not events
        last = on_host(run)
    scores = np.asarray(batch.scores)
    assert scores.shape == (16, 2) and len(set(scores[:, 1].tolist())) > 8 and scores[:, 0].any()
    np.testing.assert_allclose(np.asarray(batch.token_level_scores).sum(1), 0.5 * scores[:, 1], rtol=1e-6)
    np.testing.assert_allclose(metrics["rewards/reward_model/mean"], scores[:, 1].mean(), rtol=1e-5)
    assert metrics["reward_extra/reward_model/truncated/mean"] == 0
    row = read_jsonl(tmp_path / "run" / "rollouts" / "2.jsonl")[3]
    record = {"prompt": row["prompt"]}
    (again,) = scorer_of(tiny_folder.reward_folder())([""], [row["response"]], [record])
    np.testing.assert_allclose(row["scores"][1], again["score"], rtol=1e-4)
    for step, line in enumerate(read_jsonl(tmp_path / "run" / "metrics.jsonl")):
        if step in (0, 2):
            of_model = line["val-aux/words/reward_model/mean@1"]
            assert line["val-core/words/reward/mean@1"] == pytest.approx(0.5 * of_model)
            assert "val-aux/words/digits/mean@1" in line
    manifests = (tmp_path / "run" / "checkpoints" / "2" / "meta").rglob("*")
    text = "".join(path.read_text() for path in manifests if path.is_file())
    assert "actor.params.embed" in text and "params.score" not in text
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    with fit(config, tmp_path / "run") as run:
        assert (run.step, len(list(run))) == (1, 1)
        jax.tree.map(np.testing.assert_array_equal, on_host(run), last)


def test_scores_that_are_no_numbers_are_failed_rows(folder: Path) -> None:
    """A NaN in the embedding of one character: responses that hold it fail, the others count."""
    embed = np.array(TensorFolder(folder).read("model.embed_tokens.weight"))
    embed[tiny_folder.VOCABULARY["5"]] = np.nan
    rewrite(folder, {"model.embed_tokens.weight": embed})
    config = tiny_folder.config(
        reward__functions=(), reward__model__path=str(folder), trainer__steps=1, data__eval=(), eval__interval=0
    )
    with fit(config) as run:
        metrics, batch = next(run)
    spoilt = np.asarray(((batch.responses == tiny_folder.VOCABULARY["5"]) & batch.response_mask).any(1))
    prompts = np.repeat(np.asarray(((batch.prompts == tiny_folder.VOCABULARY["5"]) & batch.prompt_mask).any(1)), 4)
    np.testing.assert_array_equal(np.asarray(batch.row_valid), ~(spoilt | prompts))
    assert 0 < metrics["reward/failed_ratio"] < 1


def test_a_critic_may_start_from_it() -> None:
    model = make_transformer(transformer_config(tiny_folder.LLAMA), value_head=True)
    folder = tiny_folder.reward_folder()
    found = load_model_params(folder, model, Layout.single(), jax.random.key(0))
    assert jax.tree.structure(found) == jax.tree.structure(jax.tree.map(lambda p: 0, model.declare(), is_leaf=is_param))
    of_model = load(folder)[1]
    np.testing.assert_array_equal(found["value_head"]["kernel"], of_model.pop("score")[0])
    assert found.pop("value_head")["bias"] == 0
    jax.tree.map(np.testing.assert_array_equal, found, of_model)


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def test_evaluate_scores_by_the_model_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_folder.config(reward__model__path=str(tiny_folder.reward_folder()), reward__functions=())
    (tmp_path / "config.json").write_text(to_json(config))
    output = tmp_path / "answers.jsonl"
    assert evaluate.main(["--config", str(tmp_path / "config.json"), "--samples=0", f"--output={output}"]) == 0
    rows = read_jsonl(output)
    assert [list(row["scores"]) for row in rows] == [["reward_model"]] * 6
    assert all(row["score"] == pytest.approx(row["scores"]["reward_model"]) for row in rows)
    assert capsys.readouterr().out.startswith("greedy ")
