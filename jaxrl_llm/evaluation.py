"""Held-out evaluation: greedy and sampled responses to prompts that are not learned from, and what they are worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.collect import start_scoring
from jaxrl_llm.compile_log import Report
from jaxrl_llm.compiled import Compiled, compile_reward, compile_sampler, sampler_programs
from jaxrl_llm.config import Config, Eval
from jaxrl_llm.data import PromptData
from jaxrl_llm.loading import Inputs
from jaxrl_llm.metrics import finite_number
from jaxrl_llm.rewards import RewardSet
from jaxrl_llm.samplers import Sampler, make_sampler
from jaxrl_llm.sharding import Layout, abstract_like, fetch
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.types import Params


class GivenUp(Exception):
    """An evaluation was given up between two of its batches, since the run is to stop."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """The held-out prompts, sampled n times each with the policy's present parameters and scored."""

    mode: str  # "greedy" or "sampled"
    data: PromptData
    rewards: RewardSet
    layout: Layout
    sampler: Sampler
    reward: Compiled  # (batch, scores, row_valid) -> batch
    batch_size: int  # prompts at a time

    def rows(self, view: Params, step: int, give_up: Callable[[], object] | None = None) -> Iterator[dict[str, Any]]:
        """One dict a response: prompt, response, score (None where the reward failed), extras, length, record.

        Raises:
          GivenUp: `give_up`, asked before each batch, says so.
        """
        weights = self.rewards.weights
        for given in self.data.eval_batches(self.batch_size):
            if give_up and give_up():
                raise GivenUp
            sampled = self.sampler(view, given, step)
            scored = start_scoring(self.rewards, given, sampled)()
            batch = self.reward(sampled.batch, *self.layout.put_rows((scored.scores, scored.valid)), None)
            scores, scored_by, valid, lengths, reasons = fetch(
                (batch.scores, batch.scores_mask, batch.row_valid, batch.response_length, batch.finish_reason)
            )
            n, shown = batch.n, sampled.shown
            for row in range(int(np.asarray(given.prompts.prompt_valid).sum()) * n):
                yield {
                    "mode": self.mode,
                    "uid": int(np.asarray(given.prompts.uid)[row // n]),
                    "prompt": given.texts[row // n],
                    "response": shown[row],
                    "score": float(scores[row] @ weights) if valid[row] else None,
                    "scores": {
                        name: float(score)
                        for name, score, own in zip(self.rewards.names, scores[row], scored_by[row], strict=True)
                        if own
                    },
                    "extras": scored.extras[row],
                    "length": int(lengths[row]),
                    "finish_reason": {1: "stop", 2: "length"}[int(reasons[row])],
                    "num_turns": sampled.num_turns(row),
                    "data_source": given.sets[row // n],
                }


@dataclasses.dataclass(frozen=True)
class Evaluators:
    """Greedy, sampled, or both."""

    each: tuple[Evaluator, ...]

    def __call__(
        self, view: Params, step: int, give_up: Callable[[], object] | None = None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The metrics of an evaluation, and its rows.

        Raises:
          GivenUp: as `Evaluator.rows`.
        """
        metrics, rows = {}, []
        for evaluator in self.each:
            found = list(evaluator.rows(view, step, give_up))
            # The last one's have the plain names; what is told of another way of sampling is not lost under them.
            metrics |= evaluation_metrics(found, beside="" if evaluator is self.each[-1] else evaluator.mode)
            rows += found
        return metrics, rows


def sampling_ways(settings: Eval) -> list[tuple[str, int, Sampling]]:
    """What `config.eval` asks for: of each way its mode, the responses to a prompt, and how to sample."""
    mode = "sampled" if settings.temperature else "greedy"
    ways = [(mode, settings.n, Sampling(temperature=settings.temperature))]
    if settings.greedy and settings.temperature:
        ways.insert(0, ("greedy", 1, Sampling(temperature=0.0)))
    return ways


def evaluation_programs(config: Config) -> int:
    """How many `make_evaluators` compiles."""
    return len(sampling_ways(config.eval)) * (sampler_programs(config) + 1)


def make_evaluators(program: Program, inputs: Inputs, view: Any, *, report: Report) -> Evaluators:
    """What `config.eval` asks for: n responses at its temperature, and a greedy one where that is wanted as well."""
    ways = sampling_ways(program.config.eval)

    def one(mode: str, n: int, sampling: Sampling) -> Evaluator:
        name = "testing" if len(ways) == 1 else f"testing, {mode}"
        options: dict[str, Any] = {"mode": mode, "n": n, "sampling": sampling, "report": report, "name": name}
        return make_evaluator(program, inputs, view, **options)

    return Evaluators(tuple(one(*way) for way in ways))


def make_evaluator(
    program: Program,
    inputs: Inputs,
    view: Any,
    *,
    mode: str,
    n: int,
    sampling: Sampling,
    report: Report,
    name: str = "testing",
) -> Evaluator:
    """Compiles what evaluation on the held-out prompts needs.

    Args:
      view: of the sampler, arrays or abstract, with shardings.
      mode: what its rows say of how they were sampled.
      n: responses per prompt.
      report: told what is being compiled, under `name`.
    """
    assert inputs.held_out is not None
    config, layout = program.config, program.layout
    first = next(inputs.held_out.eval_batches(config.eval.batch_size)).prompts
    prompts = abstract_like(layout.put_rows(first))
    sample = compile_sampler(program, abstract_like(view), prompts, n=n, sampling=sampling, report=report, name=name)
    rewards = {"weights": tuple(inputs.rewards.weights.tolist()), "jax_rewards": inputs.rewards.jax_functions}
    return Evaluator(
        mode=mode,
        data=inputs.held_out,
        rewards=inputs.rewards,
        layout=layout,
        sampler=make_sampler(config, inputs, layout, program.stops, sample),
        reward=compile_reward(layout, sample.out, **rewards, report=report, name=f"reward of {name}"),
        batch_size=config.eval.batch_size,
    )


def evaluation_metrics(rows: Sequence[Mapping[str, Any]], *, beside: str = "") -> dict[str, float]:
    """Mean score by data source, verl's names: `val-core/SOURCE/reward/mean@n`, and per function where there are
    several; its 95% interval from `val-aux/SOURCE/reward/low95` to `high95`.

    Of several responses to a prompt also `best@k` for k = 2, 4, … n: the expected best score of k of them (`best_of`),
    named `pass@k` as well where every score is 0 or 1; and, where a reward says what it has read as the answer
    (`pred` beside the score), `maj@n`: the score of the answer given most often (`majority`). Each with its interval,
    `val-aux/SOURCE/reward/best@k/low95` and so on.

    A failed reward counts as 0 (held-out accuracy is not allowed to rise because answers crash the scorer), and is
    counted in `val-aux/SOURCE/failed_ratio`.

    Args:
      rows: see `Evaluator.rows`; n of each prompt.
      beside: where another evaluation has these names, what to put before those that do not tell n: with "greedy",
        `val-aux/SOURCE/greedy/reward/low95` and `val-aux/SOURCE/greedy/failed_ratio`.

    >>> rows = [{"uid": 1, "data_source": "sums", "score": 1.0, "scores": {"number": 1.0}, "extras": {}, "length": 3,
    ...          "finish_reason": "stop"}]
    >>> evaluation_metrics(rows)["val-core/sums/reward/mean@1"]
    1.0
    """
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(row["data_source"] for row in rows):
        own = [row for row in rows if row["data_source"] == source]
        by_problem: dict[int, list[Mapping[str, Any]]] = {}
        for row in own:
            by_problem.setdefault(row["uid"], []).append(row)
        problems, n = list(by_problem.values()), len(own) // len(by_problem)
        aux = f"val-aux/{source}/{beside}" if beside else f"val-aux/{source}"
        metrics[f"val-aux/{source}/problems"] = float(len(problems))
        metrics[f"val-core/{source}/reward/mean@{n}"] = _mean([row["score"] or 0.0 for row in own])
        if len(problems) > 1:
            _, low, high = score_interval(own)
            metrics |= {f"{aux}/reward/low95": low, f"{aux}/reward/high95": high}
        for name, values in of_several(problems, n).items():
            metrics[f"val-core/{source}/reward/{name}"] = _mean(values)
            if len(problems) > 1:
                _, low, high = score_interval([{"uid": i, "score": value} for i, value in enumerate(values)])
                several = f"val-aux/{source}/reward/{name}"
                metrics |= {f"{several}/low95": low, f"{several}/high95": high}
        functions = list(dict.fromkeys(name for row in own for name in row["scores"]))
        for name in functions if len(functions) > 1 else ():
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = _mean(
                [row["scores"][name] for row in own if name in row["scores"]]
            )
        extras: dict[str, list[float]] = {}
        for row in own:
            for name, value in row["extras"].items():
                if (number := finite_number(value)) is not None:
                    extras.setdefault(name, []).append(number)
        for name, values in sorted(extras.items()):
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = _mean(values)
        metrics[f"{aux}/response_length/mean"] = _mean([row["length"] for row in own])
        if any(row.get("num_turns", 1) != 1 for row in own):
            metrics[f"{aux}/num_turns/mean"] = _mean([row["num_turns"] for row in own])
        metrics[f"{aux}/truncated_ratio"] = _mean([row["finish_reason"] == "length" for row in own])
        metrics[f"{aux}/failed_ratio"] = _mean([row["score"] is None for row in own])
    return metrics


def of_several(problems: Sequence[Sequence[Mapping[str, Any]]], n: int) -> dict[str, list[float]]:
    """What n responses together are worth, problem by problem: best@k, pass@k and maj@n, see `evaluation_metrics`."""
    if n < 2:
        return {}
    scores = [[row["score"] or 0.0 for row in rows] for rows in problems]
    found = {}
    right_or_wrong = all(score in (0.0, 1.0) for own in scores for score in own)
    for k in sorted({n, *(2**i for i in range(1, n.bit_length()) if 2**i <= n)}):
        found[f"best@{k}"] = [best_of(own, k) for own in scores]
        if right_or_wrong:
            found[f"pass@{k}"] = found[f"best@{k}"]
    answers = [[_answer(row) for row in rows] for rows in problems]
    if any(answer is not None for own in answers for answer in own):
        found[f"maj@{n}"] = [majority(own, answer) for own, answer in zip(scores, answers, strict=True)]
    return found


def _answer(row: Mapping[str, Any]) -> str | None:
    """What the first reward that says so has read as the answer."""
    named = (value for name, value in row["extras"].items() if name.rpartition("/")[2] == "pred")
    return next((str(value) for value in named if value is not None), None)


def best_of(scores: Sequence[float], k: int) -> float:
    """The expected best of k of the n scores, drawn without replacement, unbiased for k fresh ones: with the scores in
    order, Σ_i s_i · C(i − 1, k − 1) / C(n, k). Of scores 0 and 1 that is pass@k = 1 − C(wrong, k) / C(n, k) (Chen et
    al. 2021, https://arxiv.org/abs/2107.03374).

    Raises:
      ValueError: k is not from 1 to n.

    >>> best_of([1.0, 0.0, 0.0, 0.0], 2), best_of([0.2, 0.6], 2)
    (0.5, 0.6)
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"the best of {k} of {len(scores)} scores")
    ordered = sorted(scores)
    ways = math.comb(len(ordered), k)
    return sum(score * (math.comb(i, k - 1) / ways) for i, score in enumerate(ordered))


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """The mean score of the responses with the answer that most of them give (Wang et al. 2022,
    https://arxiv.org/abs/2203.11171); of the answers that tie, the mean. None is no answer and gets no votes; 0 where
    nobody has one.

    >>> majority([1.0, 0.0, 0.0], ["7", "8", "8"]), majority([1.0, 0.0], ["7", "8"]), majority([0.0], [None])
    (0.0, 0.5, 0.0)
    """
    by_answer: dict[str, list[float]] = {}
    for score, answer in zip(scores, answers, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(score)
    most = max(map(len, by_answer.values()), default=0)
    winners = [_mean(own) for own in by_answer.values() if len(own) == most]
    return _mean(winners)


def score_interval(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """The mean score of responses and its 95% interval, over problems: what is drawn independently.

    Wilson's where every problem scores 0 or 1, else the normal one of the problems' means; of a single problem nothing
    is known, and the interval is the mean alone.

    Args:
      rows: with `uid`, by which responses belong to one problem, and `score`; a None counts as 0.

    >>> [round(x, 3) for x in score_interval([{"uid": i, "score": float(i < 90)} for i in range(100)])]
    [0.9, 0.826, 0.945]
    """
    by_problem: dict[int, list[float]] = {}
    for row in rows:
        by_problem.setdefault(row["uid"], []).append(row["score"] or 0.0)
    means = np.array([np.mean(scores) for scores in by_problem.values()])
    mean, count = float(means.mean()), len(means)
    if set(np.unique(means)) <= {0.0, 1.0}:
        return mean, *wilson_interval(float(means.sum()), count)
    half = 1.96 * float(means.std(ddof=1)) / count**0.5 if count > 1 else 0.0
    return mean, mean - half, mean + half


def wilson_interval(successes: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion, 95% by default (Wilson 1927).

    >>> [round(x, 3) for x in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    scale = 1 + z * z / count
    center = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return max(0.0, center - half), min(1.0, center + half)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
