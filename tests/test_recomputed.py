"""Texts, rewards, advantages and losses of runs, computed again from the rollouts that they wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.samplers import response_texts
from jaxrl_llm.steps.rollout import no_stop_rules
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.tiny_runs import Rows, Watched

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(params=["grpo", "ppo"])
def either(request: pytest.FixtureRequest) -> Watched:
    return request.getfixturevalue(request.param)


def column(rows: Rows, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], np.float64)


def tokens(rows: Rows, name: str) -> np.ndarray:
    return np.concatenate([np.array(row[name], np.float64) for row in rows])


def text_of(ids: Sequence[int]) -> str:
    text = tiny_folder.tokenizer().decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def check_summary(metrics: dict[str, float], name: str, values: np.ndarray) -> None:
    for statistic in ("mean", "max", "min"):
        expected = getattr(np, statistic)(values)
        np.testing.assert_allclose(metrics[f"{name}/{statistic}"], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_rows_of_a_rollout_are_what_their_tokens_say(either: Watched) -> None:
    endings = set()
    for step in (1, 2, 3, 4):
        rows = either.rollouts(step)
        uids = np.repeat(np.arange(4) + 4 * (step - 1), 4)
        np.testing.assert_array_equal(column(rows, "uid"), uids)
        for row in rows:
            ids, ended = row["responses"], row["responses"][-1] == tiny_folder.EOS
            assert row["length"] == len(ids) and row["response_mask"] == [True] * len(ids) == row["loss_mask"]
            assert tiny_folder.EOS not in ids[:-1]
            assert row["finish_reason"] == ("stop" if ended else "length")
            assert ended or len(ids) == tiny_folder.WIDTH
            assert row["response"] == text_of(ids)
            content = text_of(row["prompt_ids"])
            assert row["prompt"] in content and content.endswith("assistant\n")
            endings.add((row["finish_reason"], len(ids)))
    assert ("length", tiny_folder.WIDTH) in endings and any(reason == "stop" for reason, _ in endings)


def test_scores_and_lengths_in_the_metrics(either: Watched) -> None:
    for step, metrics in enumerate(either.metrics, 1):
        rows = either.rollouts(step)
        first = np.array([tiny_folder.digits("", row["response"], {})["score"] for row in rows])
        total = first
        if either.config.reward.weights:
            second = np.array([tiny_folder.brief("", row["response"], {}) for row in rows])
            total = first + 0.5 * second
            np.testing.assert_allclose(metrics["rewards/brief/mean"], second.mean(), rtol=1e-5)
        np.testing.assert_allclose(column(rows, "scores")[:, 0], first, rtol=1e-6)
        np.testing.assert_allclose(column(rows, "score"), total, rtol=1e-5)
        for row, score in zip(rows, total, strict=True):  # all of it on the last token
            np.testing.assert_allclose(row["token_level_scores"], [0.0] * (row["length"] - 1) + [score], rtol=1e-5)
        check_summary(metrics, "critic/score", total)
        np.testing.assert_allclose(metrics["rewards/digits/mean"], first.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["rewards/digits/std"], first.std(ddof=1), rtol=1e-5)
        letters = [sum(c.isalpha() for c in row["response"]) for row in rows]
        np.testing.assert_allclose(metrics["reward_extra/digits/letters/mean"], np.mean(letters), rtol=1e-6)
        length, prompt = column(rows, "length"), np.array([len(row["prompt_ids"]) for row in rows])
        check_summary(metrics, "response_length", length)
        check_summary(metrics, "prompt_length", prompt)
        assert metrics["prompt_length/clip_ratio"] == np.mean(prompt == tiny_folder.LONGEST)
        assert metrics["response/truncated_ratio"] == np.mean([row["finish_reason"] == "length" for row in rows])
        assert metrics["perf/total_num_tokens"] == (length + prompt).sum()
        assert metrics["reward/failed_ratio"] == 0


def test_grpo_advantages_and_loss(grpo: Watched) -> None:
    for step, metrics in enumerate(grpo.metrics, 1):
        rows = grpo.rollouts(step)
        groups = column(rows, "score").reshape(4, 4)
        spread = groups.std(1, ddof=1, keepdims=True)
        advantage = ((groups - groups.mean(1, keepdims=True)) / (spread + 1e-6)).ravel()
        for row, expected in zip(rows, advantage, strict=True):
            np.testing.assert_allclose(row["advantages"], [expected] * row["length"], rtol=1e-4, atol=1e-4)
            assert row["returns"] == row["advantages"] and row["token_level_rewards"] == row["token_level_scores"]
        per_token = np.repeat(advantage, [row["length"] for row in rows])
        check_summary(metrics, "critic/advantages", tokens(rows, "advantages"))
        np.testing.assert_allclose(metrics["reward_std"], spread.mean(), rtol=1e-4)
        assert metrics["frac_reward_zero_std"] == np.mean(groups.max(1) == groups.min(1))
        # The ratio is 1 at a step's only update.
        np.testing.assert_allclose(metrics["actor/pg_loss"], -per_token.mean(), rtol=1e-3, atol=1e-5)
        difference = tokens(rows, "ref_log_prob") - tokens(rows, "rollout_log_probs")
        kl = (np.exp(difference) - difference - 1).mean()
        np.testing.assert_allclose(metrics["actor/kl_loss"], kl, rtol=1e-3, atol=1e-6)
        expected = metrics["actor/pg_loss"] + 0.05 * metrics["actor/kl_loss"]
        np.testing.assert_allclose(metrics["actor/loss"], expected, rtol=1e-5, atol=1e-7)
    assert grpo.metrics[0]["actor/kl_loss"] < 1e-9 < grpo.metrics[-1]["actor/kl_loss"]


def test_ppo_rewards_advantages_and_loss(ppo: Watched) -> None:
    coefficient, gamma, lam = 0.1, 0.97, 0.9
    for step, metrics in enumerate(ppo.metrics, 1):
        rows = ppo.rollouts(step)
        np.testing.assert_allclose(metrics["actor/reward_kl_penalty_coeff"], coefficient, rtol=1e-6)
        raw, kls = [], []
        for row in rows:
            kl = np.subtract(row["old_log_probs"], row["ref_log_prob"])
            kls.append(kl.mean())
            rewards = row["token_level_scores"] - coefficient * kl
            np.testing.assert_allclose(row["token_level_rewards"], rewards, rtol=1e-4, atol=1e-6)
            values, backwards, advantage = [*row["values"], 0.0], [], 0.0
            for t in reversed(range(row["length"])):
                advantage = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * advantage
                backwards.append(advantage)
            raw.append(np.array(backwards[::-1]))
            np.testing.assert_allclose(row["returns"], raw[-1] + row["values"], rtol=1e-4, atol=1e-5)
        every = np.concatenate(raw)
        white = [(advantage - every.mean()) / every.std(ddof=1) for advantage in raw]
        for row, expected in zip(rows, white, strict=True):
            np.testing.assert_allclose(row["advantages"], expected, rtol=1e-3, atol=1e-4)
        check_summary(metrics, "critic/rewards", np.array([sum(row["token_level_rewards"]) for row in rows]))
        for name in ("advantages", "returns", "values"):
            check_summary(metrics, f"critic/{name}", tokens(rows, name))
        explained = 1 - (tokens(rows, "returns") - tokens(rows, "values")).var() / tokens(rows, "returns").var()
        np.testing.assert_allclose(metrics["critic/vf_explained_var"], explained, rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(metrics["actor/entropy"], tokens(rows, "entropys").mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["actor/reward_kl_penalty"], np.mean(kls), rtol=1e-3, atol=1e-7)
        pg_loss = -np.mean([advantage.mean() for advantage in white])  # seq-mean-token-mean, ratio 1
        np.testing.assert_allclose(metrics["actor/pg_loss"], pg_loss, rtol=1e-3, atol=1e-5)
        coefficient *= 1 + np.clip(np.mean(kls) / 0.02 - 1, -0.2, 0.2) * 16 / 100
    np.testing.assert_allclose(ppo.states[-1].kl_coef, coefficient, rtol=1e-5)
    assert coefficient != pytest.approx(0.1, rel=1e-2)


# Rewards of several kinds


def test_rewards_of_every_kind_together(tmp_path: Path) -> None:
    """Weights, routing by data_source, extras, failures, a JAX function beside text functions, and stop strings."""
    config = tiny_folder.config(
        **tiny_folder.KL_LOSS,
        reward__functions=tuple(f"tests.tiny_folder:{name}" for name in ("picky", "digits", "brief", "near_answer")),
        reward__weights=(2.0, 1.0, 0.5, 0.25),
        reward__data_sources=("", "words", "signs", "words"),
        rollout__stop=("e", "d", "33"),
        trainer__steps=3,
    )
    with fit(config, tmp_path) as run:
        assert len(list(run)) == 3
    lines, samples = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "samples.jsonl")
    failed, stopped = 0, 0
    for line in lines[1:]:
        rows = read_jsonl(tmp_path / "rollouts" / f"{line['step']}.jsonl")
        for row in rows:
            text, words = row["response"], row["prompt"].startswith("What")
            whole = text_of(row["responses"])
            found = [at for at in map(whole.find, config.rollout.stop) if at >= 0]
            assert text == whole[: min(found, default=len(whole))]
            if found:  # the response ends with the token that completes the stop string, and the text before it
                assert row["finish_reason"] == "stop" and len(whole) - min(found) in (1, 2)
                stopped += 1
            assert row["valid"] == (not "a" <= text[:1] < "s")
            if not row["valid"]:
                failed += 1
                assert row["scores"] == [0.0] * 4 and not any(row["loss_mask"]) and not any(row["advantages"])
                assert row["extras"] == ({"digits/letters": sum(map(str.isalpha, text))} if words else {})
                continue
            share = tiny_folder.digits("", text, {})["score"]
            a, b = (int(c) for c in row["prompt"] if c.isdigit())
            near = -0.1 * abs(row["length"] - (a + b))
            expected = [share, share * words, tiny_folder.brief("", text, {}) * (not words), near * words]
            np.testing.assert_allclose(row["scores"], expected, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(row["score"], np.dot(expected, config.reward.weights), rtol=1e-5, atol=1e-6)
        valid = np.array([row["valid"] for row in rows])
        np.testing.assert_allclose(line["reward/failed_ratio"], np.mean(~valid), rtol=1e-6)
        scores, score = column(rows, "scores"), column(rows, "score")
        check_summary(line, "critic/score", score[valid])
        of_words = np.array([row["prompt"].startswith("What") for row in rows])
        everything = np.ones_like(of_words)
        own_rows = {"picky": everything, "digits": of_words, "brief": ~of_words, "near_answer": of_words}
        for k, (name, own) in enumerate(own_rows.items()):
            expected = scores[valid & own, k].mean() if (valid & own).any() else 0
            np.testing.assert_allclose(line[f"rewards/{name}/mean"], expected, rtol=1e-5, atol=1e-7)
        for group in range(4):  # the group's statistics are over its valid rows
            own = np.arange(16)[4 * group : 4 * group + 4][valid[4 * group : 4 * group + 4]]
            if len(own) < 2 or np.ptp(score[own]) == 0:
                expected = np.zeros(len(own))
            else:
                expected = (score[own] - score[own].mean()) / (score[own].std(ddof=1) + 1e-6)
            for row, advantage in zip(own, expected, strict=True):
                np.testing.assert_allclose(rows[row]["advantages"], advantage, rtol=1e-3, atol=1e-4)
        letters = [row["extras"]["digits/letters"] for row in rows if row["valid"] and row["extras"]]
        if letters:
            np.testing.assert_allclose(line["reward_extra/digits/letters/mean"], np.mean(letters), rtol=1e-6)
    assert failed > 3 and stopped > 3, (failed, stopped)
    assert any("digits/letters" in row["extras"] for row in samples)
    for line in (lines[0], lines[2], lines[3]):
        names = {name for name in line if name.startswith("val-")}
        assert {"val-core/words/reward/mean@1", "val-core/signs/reward/mean@1"} <= names
        assert {"val-aux/words/digits/letters/mean@1", "val-aux/words/near_answer/mean@1"} <= names
        assert {"val-aux/words/failed_ratio", "val-aux/signs/response_length/mean"} <= names
        assert not {"val-aux/words/brief/mean@1", "val-aux/signs/near_answer/mean@1"} & names  # not their rows


def test_rewards_see_neither_stop_tokens_nor_special_ones() -> None:
    """A stop token goes where it ended the response, and nowhere else; so do stop strings."""
    ids = tiny_folder.VOCABULARY
    cases = [  # own tokens, finish_reason, the text
        ([tiny_folder.EOS], FINISH_STOP, ""),
        ([ids["a"], tiny_folder.EOS], FINISH_STOP, "a"),
        ([ids["a"], ids["?"]], FINISH_STOP, "a"),
        ([ids["a"], ids["?"]], FINISH_LENGTH, "a?"),
        ([ids["?"], ids["b"], ids["="], ids["="]], FINISH_STOP, "?b"),
        ([0, ids["c"], ids["<unk>"]], FINISH_LENGTH, "c"),
        ([], FINISH_LENGTH, ""),
    ]
    rows = len(cases)
    responses, mask = np.full((rows, 4), ids["z"], np.int32), np.zeros((rows, 4), bool)
    for row, (tokens, _, _) in enumerate(cases):
        responses[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    batch = Batch(
        prompts=jnp.zeros((rows, 1), jnp.int32),
        prompt_mask=jnp.ones((rows, 1), bool),
        prompt_valid=jnp.ones(rows, bool),
        record_arrays={},
        uid=jnp.arange(rows),
        responses=jnp.asarray(responses),
        response_mask=jnp.asarray(mask),
        response_length=jnp.asarray(mask.sum(1)),
        rollout_log_probs=None,
        finish_reason=jnp.array([reason for _, reason, _ in cases]),
    )
    stops = no_stop_rules(48).replace(ids=jnp.array([tiny_folder.EOS, ids["?"]]))
    assert response_texts(batch, tiny_folder.tokenizer(), stops, ("==",)) == [text for _, _, text in cases]
    # In "?b==" the stop string is complete with the fourth token: held back to there it ends the response, to the fifth
    # it is part of it.
    for least, text in ((4, "?b"), (5, "?b==")):
        held = stops.replace(min_new_tokens=jnp.int32(least))
        assert response_texts(batch, tiny_folder.tokenizer(), held, ("==",))[4] == text


def test_a_jax_reward_alone_that_scores_tokens(tmp_path: Path) -> None:
    config = tiny_folder.config(
        **tiny_folder.KL_LOSS,
        reward__functions=("tests.tiny_folder:even_tokens",),
        reward__weights=(0.5,),
        trainer__steps=2,
        eval__interval=0,
    )
    with fit(config, tmp_path) as run:
        assert len(list(run)) == 2
    for step in (1, 2):
        for row in read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl"):
            answer = sum(int(c) for c in row["prompt"] if c.isdigit())
            expected = [0.5 * answer * (token % 2 == 0) for token in row["responses"]]
            assert row["token_level_scores"] == expected and row["scores"] == [2 * sum(expected)]
    assert all(np.isfinite(value) for line in read_jsonl(tmp_path / "metrics.jsonl") for value in line.values())
