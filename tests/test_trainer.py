"""`fit` end to end on a tiny folder: what a run computes, writes down, resumes, survives and refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import Config
from jaxrl_llm.errors import RunAborted, UserError
from jaxrl_llm.evaluation import response_texts
from jaxrl_llm.steps.rollout import no_stop_rules
from jaxrl_llm.trainer import Run, fit
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, RunState
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder

GRPO = {
    "reward__functions": ("tests.tiny_folder:digits", "tests.tiny_folder:brief"),
    "reward__weights": (1.0, 0.5),
    **tiny_folder.KL_LOSS,
}
PPO = {
    "algorithm__estimator": "gae",
    "algorithm__gamma": 0.97,
    "algorithm__lam": 0.9,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__kl_coef": 0.1,
    "algorithm__kl_ctrl__target_kl": 0.02,
    "algorithm__kl_ctrl__horizon": 100,
    "actor__loss_agg_mode": "seq-mean-token-mean",
    "critic__mini_batch_size": 2,
    "critic__epochs": 2,
}
QUIET = {"data__eval": (), "eval__interval": 0, "trainer__save_interval": 0}
COMPILED = "/jax/core/compile/backend_compile_duration"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def compilations() -> Iterator[list[str]]:
    """The events of everything that is compiled, or read back compiled, as they come."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@dataclasses.dataclass
class Watched:
    """What happened in a run."""

    config: Config
    folder: Path
    killed: Path  # the folder as it was after the third step, with a line cut short
    metrics: list[dict[str, float]]  # as yielded
    states: list[RunState]  # before the first step, and after each
    compiled: int  # while the steps ran

    def lines(self) -> Rows:
        return read_jsonl(self.folder / "metrics.jsonl")

    def rollouts(self, step: int) -> Rows:
        return read_jsonl(self.folder / "rollouts" / f"{step}.jsonl")


def on_host(run: Run) -> RunState:
    return jax.tree.map(np.asarray, run.state())


def watch(config: Config, folder: Path, compilations: Sequence[str]) -> Watched:
    watched = Watched(config, folder, folder.with_name(f"{folder.name}-killed"), [], [], 0)
    with fit(config, folder) as run:
        watched.states.append(on_host(run))
        while run.step < run.total_steps:
            before = len(compilations)
            metrics, _ = next(run)
            watched.compiled += len(compilations) - before
            watched.metrics.append(metrics)
            watched.states.append(on_host(run))
            if run.step == 3:
                shutil.copytree(folder, watched.killed)
                with (watched.killed / "metrics.jsonl").open("a") as file:
                    file.write('{"step": 4, "critic/sc')
    return watched


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory, compilations: list[str]) -> Watched:
    return watch(tiny_folder.config(**GRPO), tmp_path_factory.mktemp("runs") / "grpo", compilations)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory, compilations: list[str]) -> Watched:
    return watch(tiny_folder.config(**PPO), tmp_path_factory.mktemp("runs") / "ppo", compilations)


@pytest.fixture(params=["grpo", "ppo"])
def either(request: pytest.FixtureRequest) -> Watched:
    return request.getfixturevalue(request.param)


def assert_equal(a: Any, b: Any) -> None:
    """Bit for bit, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def differ(a: Any, b: Any) -> bool:
    return any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# What a run leaves behind


def test_a_run_fills_its_folder(either: Watched) -> None:
    assert [line["step"] for line in either.lines()] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (either.folder / "rollouts").iterdir()) == [f"{i}.jsonl" for i in (1, 2, 3, 4)]
    assert sorted(path.name for path in (either.folder / "checkpoints").iterdir()) == ["2", "4"]
    assert {row["step"] for row in read_jsonl(either.folder / "samples.jsonl")} == {1, 2, 4}
    assert json.loads((either.folder / "config.json").read_text())["trainer"]["steps"] == 4
    for line, metrics in zip(either.lines()[1:], either.metrics, strict=True):
        assert line == {"step": line["step"], **metrics}
    evaluated = [line["step"] for line in either.lines() if any(name.startswith("val-core/") for name in line)]
    assert evaluated == [0, 2, 4]


def test_every_phase_has_its_timer(grpo: Watched, ppo: Watched) -> None:
    common = {"step", "data", "update_weights", "gen", "reward", "ref", "adv", "update_actor"}
    common |= {"testing", "save_checkpoint"}
    for watched, expected in ((grpo, common), (ppo, common | {"old_log_prob", "values", "update_critic"})):
        found = {name.removeprefix("timing_s/") for name in watched.metrics[1] if name.startswith("timing_s/")}
        assert found == expected


def test_training_moves_all_that_is_trained_and_nothing_else(either: Watched) -> None:
    first, last = either.states[0], either.states[-1]
    assert differ(first.actor.params, last.actor.params)
    assert (int(last.step), int(last.actor.updates), int(last.actor.skipped)) == (4, 4, 0)
    if last.critic:
        assert first.critic and differ(first.critic.params, last.critic.params) and int(last.critic.updates) == 16

    def digest(params: Any) -> str:
        return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()

    assert digest(first.reference) == digest(last.reference) == digest(first.actor.params)


def test_nothing_compiles_after_the_warm_up(either: Watched, compilations: list[str]) -> None:
    """The run evaluates, saves, dumps and shows samples while it is counted."""
    assert either.compiled == 0
    before = len(compilations)
    jax.jit(lambda x: x * 3.25 + either.compiled)(jnp.arange(7.0))
    assert len(compilations) > before, f"{COMPILED} is not reported any more: nothing was counted above"


# Killed and resumed


def test_a_killed_run_resumes_bit_for_bit(either: Watched) -> None:
    """Killed in the fourth step, it goes on from the checkpoint of step 2, and no file tells."""
    with fit(either.config, either.killed) as run:
        assert run.step == 2
        resumed = list(run)
        final = on_host(run)
    assert [int(metrics["actor/skipped_updates"]) for metrics, _ in resumed] == [0, 0]
    assert_equal(final, either.states[-1])
    lines, expected = read_jsonl(either.killed / "metrics.jsonl"), either.lines()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line, wanted in zip(lines, expected, strict=True):
        assert without_clocks(line) == without_clocks(wanted)
    for name in ("samples.jsonl", "rollouts/3.jsonl", "rollouts/4.jsonl"):
        assert (either.killed / name).read_bytes() == (either.folder / name).read_bytes()


def without_clocks(line: dict[str, Any]) -> dict[str, Any]:
    clocks = ("timing", "perf/time_per_step", "perf/throughput")
    return {name: value for name, value in line.items() if not name.startswith(clocks)}


def test_a_finished_run_can_be_made_longer(grpo: Watched, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(grpo.folder, longer)
    with fit(tiny_folder.config(**GRPO, trainer__steps=5), longer) as run:
        steps = [run.step for _ in run]
        assert steps == [5] and int(run.state().step) == 5
    assert [line["step"] for line in read_jsonl(longer / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    with fit(tiny_folder.config(**GRPO, trainer__steps=5), longer) as run:
        assert list(run) == []


def test_another_configuration_is_refused_and_named(grpo: Watched) -> None:
    before = (grpo.folder / "config.json").read_bytes()
    with pytest.raises(UserError) as caught:
        fit(tiny_folder.config(**GRPO, optimizer__lr=0.5, trainer__steps=9), grpo.folder)
    assert "config.optimizer.lr: was 0.01, now 0.5" in str(caught.value)
    assert "trainer.steps" not in str(caught.value)
    assert (grpo.folder / "config.json").read_bytes() == before


def test_epochs_instead_of_steps() -> None:
    """12 prompts, 4 a step: after two epochs each was drawn twice, and no uid came back."""
    run = fit(tiny_folder.config(**GRPO, **QUIET, trainer__epochs=2))
    assert run.total_steps == 6
    batches = [batch for _, batch in run]
    prompts = [
        np.asarray(row)[mask].tobytes() for b in batches for row, mask in zip(b.prompts, b.prompt_mask, strict=True)
    ]
    assert len(prompts) == 24 and set(prompts[:12]) == set(prompts[12:]) and len(set(prompts)) == 12
    np.testing.assert_array_equal(np.concatenate([b.uid for b in batches]), np.repeat(np.arange(24), 4))


# Time


def test_a_slow_reward_lengthens_the_reward_and_nothing_else() -> None:
    """The least of three steps, so that a busy machine does not decide."""
    seconds = 0.5
    config = tiny_folder.config(
        **{**GRPO, **QUIET, "reward__functions": (f"tests.tiny_folder:sleeping(seconds={seconds})", "exact")},
        trainer__steps=3,
    )
    timings = [
        {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
        for metrics, _ in fit(config)
    ]
    least = {name: min(timing[name] for timing in timings) for name in timings[0]}
    assert seconds <= least["reward"] < 1.3 * seconds
    others = {name: value for name, value in least.items() if name not in ("reward", "step")}
    assert max(others.values()) < 0.5 * seconds, others
    unaccounted = [timing["step"] - sum(timing[name] for name in (*others, "reward")) for timing in timings]
    assert 0 <= min(unaccounted) < 0.05 * seconds


# The first update, the critic


def test_the_first_update_has_ratio_one(grpo: Watched, ppo: Watched) -> None:
    """Without a pass of its own for the old log-probs (GRPO here), and with one (PPO)."""
    assert "timing_s/old_log_prob" in ppo.metrics[0] and "timing_s/old_log_prob" not in grpo.metrics[0]
    for metrics in (*grpo.metrics, *ppo.metrics):
        assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
    assert all(metrics["actor/ppo_kl"] == 0 for metrics in grpo.metrics)
    assert all(abs(metrics["actor/ppo_kl"]) < 1e-6 for metrics in ppo.metrics)


def test_grpo_with_a_critic_trains_the_same_actor(grpo: Watched, tmp_path: Path) -> None:
    config = tiny_folder.config(**GRPO, **QUIET, critic__enable="yes", trainer__steps=2)
    with fit(config, tmp_path) as run:
        found = list(run)
        state = on_host(run)
    assert_equal(state.actor, grpo.states[2].actor)
    assert state.critic and int(state.critic.updates) == 2
    # One update a step: the new value is the old one, so clipping does nothing, and the returns are the advantages.
    for step, (metrics, _) in enumerate(found, 1):
        rows = read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl")
        errors = np.concatenate([np.subtract(row["values"], row["returns"]) for row in rows])
        np.testing.assert_allclose(metrics["critic/vf_loss"], 0.5 * np.square(errors).mean(), rtol=1e-5)


# Metrics, recomputed from the dumped rollouts


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
        for k, name in enumerate(("picky", "digits", "brief", "near_answer")):
            np.testing.assert_allclose(line[f"rewards/{name}/mean"], scores[valid, k].mean(), rtol=1e-5, atol=1e-7)
        for group in range(4):  # the group's statistics are over its valid rows
            own = np.arange(16)[4 * group : 4 * group + 4][valid[4 * group : 4 * group + 4]]
            if len(own) < 2 or np.ptp(score[own]) == 0:
                expected = np.zeros(len(own))
            else:
                expected = (score[own] - score[own].mean()) / (score[own].std(ddof=1) + 1e-6)
            for row, advantage in zip(own, expected, strict=True):
                np.testing.assert_allclose(rows[row]["advantages"], advantage, rtol=1e-3, atol=1e-4)
        letters = [row["extras"]["digits/letters"] for row in rows if row["extras"]]
        if letters:
            np.testing.assert_allclose(line["reward_extra/digits/letters/mean"], np.mean(letters), rtol=1e-6)
    assert failed > 3 and stopped > 3, (failed, stopped)
    assert any("digits/letters" in row["extras"] for row in samples)
    for line in (lines[0], lines[2], lines[3]):
        names = {name for name in line if name.startswith("val-")}
        assert {"val-core/words/reward/mean@1", "val-core/signs/reward/mean@1"} <= names
        assert {"val-aux/words/digits/letters/mean@1", "val-aux/words/near_answer/mean@1"} <= names
        assert {"val-aux/words/failed_ratio", "val-aux/signs/response_length/mean"} <= names


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


# Leaving early


def test_state_is_a_copy_that_outlives_the_steps() -> None:
    run = fit(tiny_folder.config(**GRPO, **QUIET))
    next(run)
    first, params = run.state(), run.actor_params
    kept = jax.tree.map(np.array, first)
    assert_equal(params, kept.actor.params)
    next(run)
    assert_equal(first, kept)
    assert_equal(params, kept.actor.params)
    assert differ(run.state().actor.params, kept.actor.params)
    run.close()


def test_the_state_survives_a_loop_that_is_left(grpo: Watched, tmp_path: Path) -> None:
    config = tiny_folder.config(**GRPO, **QUIET)
    run = fit(config)
    for _ in run:
        break
    assert_equal(on_host(run), grpo.states[1])
    with pytest.raises(ZeroDivisionError), run:
        for _ in run:
            raise ZeroDivisionError
    assert_equal(on_host(run), grpo.states[2])
    del run

    def loop() -> None:
        for _ in fit(config, tmp_path):
            break

    loop()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_an_error_within_a_step_leaves_the_state_of_the_last(grpo: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit(tiny_folder.config(**GRPO, **QUIET))
    next(run)

    def fail(*_: Any) -> Any:
        raise UserError("a reward that is no score")

    monkeypatch.setattr("jaxrl_llm.trainer.score_texts", fail)
    with pytest.raises(UserError):
        next(run)
    assert run.step == 1
    assert_equal(on_host(run), grpo.states[1])


def test_an_interrupted_update_leaves_a_whole_state(ppo: Watched) -> None:
    """The critic has been trained, its old buffers are gone, and the actor is as it was."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    run = fit(tiny_folder.config(**PPO, **QUIET))
    update = dataclasses.replace(run._phases.update_actor, update=interrupt)
    run._phases = dataclasses.replace(run._phases, update_actor=update)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    state = on_host(run)
    assert_equal(state.critic, ppo.states[1].critic)
    assert_equal(state.actor, ppo.states[0].actor)


# Giving up


def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    config = tiny_folder.config(**tiny_folder.KL_LOSS, **QUIET, reward__functions=("tests.tiny_folder:broken",))
    with pytest.raises(RunAborted, match="step 1: the reward failed on every response") as caught:
        list(fit(config, tmp_path))
    assert "the scorer is down" in str(caught.value) and caught.value.exit_code == 3


def test_updates_that_are_never_finite_end_the_run() -> None:
    """From a model whose numbers are NaN: no update is applied, and after two the run is over."""
    config = tiny_folder.config(**GRPO, **QUIET, trainer__max_skipped_updates=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tiny_folder.folder(True))))
    run = fit(config)
    first = on_host(run)
    metrics, _ = next(run)
    assert metrics["actor/skipped_updates"] == 1
    with pytest.raises(RunAborted, match="step 2: 2 updates of the actor in a row"):
        next(run)
    state = on_host(run)
    assert_equal((state.actor.params, state.actor.opt_state), (first.actor.params, first.actor.opt_state))
    assert (int(state.actor.updates), int(state.actor.skipped)) == (0, 2)
