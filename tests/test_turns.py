"""Conversations: observations between sampled turns are context and nothing else."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.chat import render_observation
from jaxrl_llm.collect import open_rewards
from jaxrl_llm.errors import UserError
from jaxrl_llm.loading import load_inputs
from jaxrl_llm.samplers import Sampled, make_conversation
from jaxrl_llm.steps.rollout import as_batch, begin, decode, no_stop_rules, observe
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.scoring import score_tokens
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, DecodeState, check_batch
from jaxrl_llm.writers import read_jsonl
from tests import tiny, tiny_folder
from tests.tokenizers_for_tests import CHATML

MODEL, PARAMS, PROMPTS, KEY = tiny.model(), tiny.params(), tiny.prompts(), jax.random.key(3)
N, WIDTH, OBSERVED = 4, 12, 3
STOPS = no_stop_rules(tiny.VOCAB).replace(ids=jnp.arange(0, tiny.VOCAB, 5, dtype=jnp.int32))  # a fifth of the tokens


@jax.jit
def turns(observations: Any, mask: Any) -> tuple[DecodeState, DecodeState, Batch]:
    """The rows at the end of their first turn and of their second, and the batch."""
    turn = partial(decode, MODEL, PARAMS, sampling=Sampling(), stops=STOPS)
    cache, first = turn(*begin(MODEL, PARAMS, PROMPTS, KEY, n=N, width=WIDTH))
    cache, state = observe(MODEL, PARAMS, cache, first, observations, mask)
    _, second = turn(cache, state)
    return first, second, as_batch(PROMPTS, second)


@pytest.fixture(scope="module")
def talked() -> tuple[DecodeState, DecodeState, Batch, np.ndarray]:
    """Every other row is answered, with one to three tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, tiny.VOCAB, (4 * N, OBSERVED)).astype(np.int32)
    mask = np.arange(OBSERVED)[None, :] < rng.integers(1, OBSERVED + 1, (4 * N, 1))
    mask[::2] = False
    return *jax.device_get(turns(tokens, mask)), np.where(mask, tokens, -1)


def test_an_observation_stands_behind_the_turn_and_is_no_part_of_the_response(talked: Any) -> None:
    first, second, batch, observed = talked
    check_batch(batch, n=N, vocab_size=tiny.VOCAB)
    for row in range(4 * N):
        said, told = int(first.length[row]), observed[row][observed[row] >= 0]
        end = said + len(told)
        assert batch.response_mask[row, :said].all() and not batch.response_mask[row, said : min(end, WIDTH)].any()
        assert batch.response_mask[row, end : second.length[row]].all()
        np.testing.assert_array_equal(batch.responses[row, said:end], told[: WIDTH - said])
        assert (batch.responses[row, :said] == first.responses[row, :said]).all()
        assert (batch.rollout_log_probs[row, said:end] == 0).all()


def test_rows_without_an_observation_are_done_and_stay_so(talked: Any) -> None:
    first, second, _, observed = talked
    still = (observed < 0).all(1)
    assert still.any() and (~still).any()
    for name in ("responses", "length", "finish_reason", "rollout_log_probs", "hidden"):
        np.testing.assert_array_equal(getattr(first, name)[still], getattr(second, name)[still])
    answered = ~still & (first.finish_reason == FINISH_STOP)
    assert (second.length[answered] > first.length[answered]).all()


def test_the_scorer_sees_what_the_sampler_saw(talked: Any) -> None:
    """Log-probs of both turns, from a pass over the whole conversation."""
    batch = talked[2]
    stats = jax.jit(partial(score_tokens, MODEL, temperature=1.0, chunk_tokens=64))(
        PARAMS, jax.tree.map(jnp.asarray, batch)
    )
    np.testing.assert_allclose(stats.log_probs, np.where(batch.response_mask, batch.rollout_log_probs, 0), atol=2e-5)


def test_a_frame_without_room_ends_the_row_by_its_length() -> None:
    @partial(jax.jit, static_argnums=0)
    def full(width: int) -> DecodeState:
        turn = partial(decode, MODEL, PARAMS, sampling=Sampling(), stops=no_stop_rules(tiny.VOCAB))
        cache, state = begin(MODEL, PARAMS, PROMPTS, KEY, n=1, width=8)
        cache, state = turn(cache, state.replace(max_new_tokens=jnp.full(4, 5)))
        tokens = jnp.ones((4, width), jnp.int32)
        return observe(MODEL, PARAMS, cache, state.replace(max_new_tokens=jnp.full(4, 8)), tokens, tokens > 0)[1]

    assert (full(3).finish_reason == FINISH_LENGTH).all() and (full(3).length == 8).all()
    assert (full(2).finish_reason == 0).all()


# The whole run


CONVERSATION: dict[str, Any] = {
    "rollout__multi_turn__environment": "tests.tiny_folder:counting",
    "rollout__multi_turn__max_observation_length": 30,
    "rollout__response_length": 80,
    "rollout__stop": ("3", "7"),
    "trainer__steps": 2,
    "trainer__save_interval": 0,
    "eval__interval": 2,
    "eval__before": False,
    "eval__temperature": 1.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Batch]]:
    workdir = tmp_path_factory.mktemp("turns")
    with tiny_folder.compile_once():
        return workdir, [jax.device_get(batch) for _, batch in fit(tiny_folder.config(**CONVERSATION), workdir)]


def test_a_run_with_an_environment(run: tuple[Path, list[Batch]]) -> None:
    workdir, batches = run
    rows = read_jsonl(workdir / "rollouts/1.jsonl")
    assert any("[tool: " in row["response"] for row in rows), "the environment never answered"
    for batch in batches:
        observed = (~batch.response_mask) & (np.arange(80) < batch.response_length[:, None])
        assert observed.any()
        assert batch.loss_mask is not None and not (batch.loss_mask & ~batch.response_mask).any()
        assert batch.advantages is not None and (batch.advantages[observed] == 0).all()


def test_the_frame_is_what_the_template_would_write(run: tuple[Path, list[Batch]]) -> None:
    """Own tokens as sampled; between them the template's text for the message, nothing encoded again."""
    _, batches = run
    tokenizer, checked = tiny_folder.tokenizer(), 0
    for row in range(batches[0].num_rows):
        length = int(batches[0].response_length[row])
        ids, own = batches[0].responses[row, :length], batches[0].response_mask[row, :length]
        starts = np.flatnonzero(np.diff(own.astype(int)) == -1) + 1
        for start in starts:
            end = start + int(np.argmax(own[start:])) if own[start:].any() else length
            text = str(tokenizer.decode(ids[start:end]))
            ended = ids[start - 1] == tiny_folder.EOS
            begun = "" if ended else "<|im_end|>"
            assert text.startswith(f"{begun}\n<|im_start|>tool\n") and text.endswith(
                "<|im_end|>\n<|im_start|>assistant\n"
            )
            checked += 1
    assert checked


def test_evaluation_talks_as_well(run: tuple[Path, list[Batch]]) -> None:
    rows = read_jsonl(run[0] / "evaluations/2.jsonl")
    assert len(rows) == 6 and {row["mode"] for row in rows} == {"sampled"}
    assert any("[tool: " in row["response"] for row in rows)


def test_rewards_read_the_last_turn_and_may_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []

    def reward(prompt: str, response: str, record: Any) -> float:
        seen.append((response, record.get("conversation")))
        return float(len(response))

    monkeypatch.setattr(tiny_folder, "digits", reward)
    changes = {**CONVERSATION, "trainer__steps": 1, "data__eval": (), "eval__interval": 0}
    with tiny_folder.compile_once():
        next(fit(tiny_folder.config(**changes)))
    talked = [(response, talk) for response, talk in seen if talk]
    assert any(len(talk) > 2 for _, talk in talked)
    for response, talk in talked:
        assert [m["role"] for m in talk[:2]] == ["user", "assistant"] and talk[-1] == {
            "role": "assistant",
            "content": response,
        }


def test_an_environment_that_fails_costs_its_rows_alone() -> None:
    moody = {"rollout__multi_turn__environment": "tests.tiny_folder:moody", "reward__max_failed_ratio": 1.0}
    changes = {**CONVERSATION, **moody, "trainer__steps": 1, "data__eval": (), "eval__interval": 0}
    with tiny_folder.compile_once():
        metrics, batch = next(fit(tiny_folder.config(**changes)))
    assert 0 < metrics["reward/failed_ratio"] < 1
    assert batch.row_valid is not None and metrics["reward/failed_ratio"] == 1 - float(batch.row_valid.mean())


@pytest.mark.parametrize("workers", [0, 1])
def test_where_the_environment_runs(workers: int) -> None:
    """Here, or in a worker with a deadline: the same answers, and the same reasons."""
    changes = {"rollout__multi_turn__environment": "tests.tiny_folder:moody", "reward__num_workers": workers}
    config = tiny_folder.config(**{**CONVERSATION, **changes, "reward__timeout": 1.0})
    inputs = open_rewards(config, load_inputs(config))
    with inputs.rewards:
        talk = make_conversation(config, inputs)
        assert talk is not None
        turns = [[{"role": "assistant", "content": text}] for text in ("abc", "xyz", "sleep")]
        fine, failed, slow = talk.ask(turns if workers else turns[:2] + turns[:1], [{}] * 3)
    assert fine.failure is None and fine.extras["observation"] == "go on"
    assert failed.failure is not None and "RuntimeError: not this letter" in failed.failure
    if workers:
        assert slow.failure is not None and "no answer within 1 s" in slow.failure


def test_an_environment_of_the_wrong_type_is_found_before_the_first_step() -> None:
    config = tiny_folder.config(**{**CONVERSATION, "rollout__multi_turn__environment": "tests.tiny_folder:numbers"})
    inputs = open_rewards(config, load_inputs(config))
    with inputs.rewards, pytest.raises(UserError, match=r"the environment 'tests.tiny_folder:numbers' returned 7"):
        make_conversation(config, inputs)


# Messages as tokens


def test_what_stands_between_two_turns() -> None:
    tokenizer = tiny_folder.tokenizer()
    message = {"role": "tool", "content": "7<|im_end|>"}
    options: dict[str, Any] = {"end_ids": {tiny_folder.EOS}}
    ended = render_observation(tokenizer, "a", message, turn_ended=True, **options)
    assert str(tokenizer.decode(ended[:7])).startswith("\n<|im_start|>tool")
    # The message's own text never becomes a control token.
    assert ended.count(tiny_folder.EOS) == 1
    assert render_observation(tokenizer, "a", message, turn_ended=False, **options) == [tiny_folder.EOS, *ended]
    plain = render_observation(tokenizer, "a", {"content": "7"}, turn_ended=True, chat_template=False, **options)
    assert tokenizer.decode(plain) == "7"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }}", "leaves out an assistant's turn"),
        ("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", "without an end token"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_templates_that_no_message_fits_into(template: str, words: str) -> None:
    tokenizer = tiny_folder.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=words):
        render_observation(tokenizer, "a", {"role": "tool", "content": "7"}, end_ids={tiny_folder.EOS}, turn_ended=True)


def test_a_template_that_writes_more_into_a_last_turn_than_into_an_earlier_one() -> None:
    """As Qwen3's does with an empty thought."""
    tokenizer = tiny_folder.tokenizer()
    plain = render_observation(
        tokenizer, "a", {"role": "tool", "content": "7"}, end_ids={tiny_folder.EOS}, turn_ended=True
    )
    tokenizer.chat_template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if loop.last and message.role == 'assistant' %}thought{% endif %}",
    )
    assert plain == render_observation(
        tokenizer, "a", {"role": "tool", "content": "7"}, end_ids={tiny_folder.EOS}, turn_ended=True
    )


def test_long_observations_are_cut_at_their_end() -> None:
    config = tiny_folder.config(**CONVERSATION)
    talk = make_conversation(config, load_inputs(config))
    assert talk is not None
    for length in (0, 1, 5, 6, 1000, 10**6):
        message, ids = talk.fit({"prompt": "1+2=?"}, {"role": "tool", "content": "7" * length}, tiny_folder.EOS)
        assert len(ids) <= 30 and set(message["content"]) <= {"7"}
        assert len(message["content"]) == min(length, len(message["content"]))
    assert len(ids) == 30, "cut to what fits, and not further"
    short = dataclasses.replace(config.rollout.multi_turn, max_observation_length=2)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, multi_turn=short))
    with pytest.raises(UserError, match="max_observation_length = 2"):
        make_conversation(config, load_inputs(config))


# Environments


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<calc>3*(4+5)", "27"),
        ("I ask <calc>10/4</calc>", "2.5"),
        ("<calc>1/3", "1/3"),
        ("<calc>1</calc> and <calc>2+2", "4"),
        ("<calc>9^9^9^9", "error"),
        ("<calc>__import__('os')", "error"),
        ("<calc>" + "(" * 10_000, "error"),
        ("<calc>3+4</calc> so it is 7", None),
        ("It is 7.", None),
    ],
)
def test_the_calculator(turn: str, answer: str | None) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": turn}]
    assert environments.calculator(messages, {}) == answer
    assert environments.resolve("calculator(opening='<calc>')")(messages, {}) == answer


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calculater", "did you mean 'calculator'"),
        ("calculator(begin='(')", "calculator"),
        ("tests.tiny_folder:WIDTH", "is a int, expected a function"),
        ("tests.tiny_folder:picky", "takes"),
    ],
)
def test_environments_that_are_none(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        environments.resolve(name)


@pytest.mark.parametrize("returned", [7, {"content": 7}, {"content": "7"}, ["7"]])
def test_observations_that_are_none(returned: Any) -> None:
    with pytest.raises(UserError, match=r"expected a text, a message with 'role' and 'content', or None"):
        environments.as_message(returned)


def test_halves_of_characters_are_made_whole() -> None:
    """A tool that has read a JSON escape of a model's text returns such; no tokenizer takes them."""
    message = {"role": "tool", "content": "\ud800 7", "name": ["\udc00"], "at": {"\ud83d": "\ud83d\ude00"}}
    whole = environments.as_message(message)
    assert whole == {"role": "tool", "content": "\ufffd 7", "name": ["\ufffd"], "at": {"\ufffd": "\U0001f600"}}
    config = tiny_folder.config(**CONVERSATION)
    talk = make_conversation(config, load_inputs(config))
    assert whole and talk and talk.fit({"prompt": "1+2=?"}, whole, tiny_folder.EOS)[1]


def test_an_environment_cannot_change_what_it_is_given() -> None:
    def greedy(messages: Any, record: Any) -> str:
        messages[0]["content"], record["answer"] = "x", "y"
        messages.append({"role": "user", "content": "z"})
        return "7"

    asked = environments.Asker("tests.tiny_folder:counting", 100)
    messages, record = [{"role": "user", "content": "a"}], {"answer": "3"}
    environments._resolved.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_folder, "counting", greedy)
        assert asked("", "", {"messages": messages, "record": record})["observation"] == "7"
    environments._resolved.cache_clear()
    assert (messages, record) == ([{"role": "user", "content": "a"}], {"answer": "3"})


def test_a_role_that_templates_do_not_know_is_the_environments() -> None:
    config = tiny_folder.config(**CONVERSATION)
    talk = make_conversation(config, load_inputs(config))
    assert talk is not None
    with pytest.raises(UserError, match="a message of the environment 'tests.tiny_folder:counting' .* role 'robot'"):
        talk.fit({"prompt": "1+2=?"}, {"role": "robot", "content": "7"}, tiny_folder.EOS)


def test_turns_that_a_prompt_begins_with_are_not_the_policys() -> None:
    turn = {"role": "assistant", "content": "b"}
    talk = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "c"}, turn]
    sampled = Sampled(None, ["b"], [talk, talk], [3, 1])  # type: ignore[arg-type]
    assert [sampled.num_turns(row) for row in (0, 1)] == [1, 2]
    assert sampled.shown == ["b", "b\n[user: c]\nb"]


def test_rules() -> None:
    with pytest.raises(UserError, match="no turn would ever end"):
        tiny_folder.config(**{**CONVERSATION, "rollout__ignore_eos": True, "rollout__stop": ()})
    with pytest.raises(UserError, match="would fill the frame"):
        tiny_folder.config(**{**CONVERSATION, "rollout__multi_turn__max_observation_length": 80})
