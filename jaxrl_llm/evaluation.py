"""Held-out evaluation, and what it shares with training: responses as text, and host rewards on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm.compiled import Compiled, compile_reward, compile_sampler
from jaxrl_llm.data import PromptBatch, PromptData
from jaxrl_llm.loading import Inputs
from jaxrl_llm.rewards import RewardSet, Scores
from jaxrl_llm.sharding import Layout, abstract_like
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.rollout import StopRules
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.tokenizer import response_text
from jaxrl_llm.types import FINISH_STOP, Batch, Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def response_texts(
    batch: Batch, tokenizer: PreTrainedTokenizerFast, stops: StopRules, stop: Sequence[str]
) -> list[str]:
    """The responses [B] as rewards see them: their own tokens but special ones, cut before a stop token or string."""
    host = jax.device_get((batch.responses, batch.response_mask, batch.finish_reason, stops.ids, stops.min_new_tokens))
    responses, mask, reasons, stop_ids, least = (np.asarray(x) for x in host)
    return [
        response_text(tokenizer, ids[own].tolist(), reason == FINISH_STOP, stop_ids, stop, int(least))
        for ids, own, reason in zip(responses, mask, reasons, strict=True)
    ]


def score_texts(rewards: RewardSet, given: PromptBatch, texts: Sequence[str]) -> Scores:
    """Scores of B = G · n responses; the rows of filler prompts are not scored, and not valid."""
    n = len(texts) // len(given.records)
    real = int(np.asarray(given.prompts.prompt_valid).sum())  # fillers come last
    records = [record for record in given.records[:real] for _ in range(n)]
    prompts = [text for text in given.texts[:real] for _ in range(n)]
    scored = rewards.score(prompts, texts[: real * n], records)
    fill = len(texts) - real * n
    return dataclasses.replace(
        scored,
        scores=np.pad(scored.scores, ((0, fill), (0, 0))),
        valid=np.pad(scored.valid, (0, fill)),
        extras=scored.extras + [{}] * fill,
    )


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """The held-out prompts, sampled once each (or n times) with the policy's present parameters and scored."""

    data: PromptData
    rewards: RewardSet
    tokenizer: PreTrainedTokenizerFast
    layout: Layout
    stop: tuple[str, ...]
    stops: StopRules
    sample: Compiled  # (view, prompts, stops, step) -> batch
    reward: Compiled  # (batch, scores, row_valid) -> batch
    batch_size: int  # prompts at a time

    def rows(self, view: Params, step: int) -> Iterator[dict[str, Any]]:
        """One dict a response: prompt, response, score (None where the reward failed), extras, length, record."""
        weights = self.rewards.weights
        for given in self.data.eval_batches(self.batch_size):
            batch = self.sample(view, self.layout.put_rows(given.prompts), self.stops, np.int32(step))
            texts = response_texts(batch, self.tokenizer, self.stops, self.stop)
            scored = score_texts(self.rewards, given, texts)
            batch = self.reward(batch, *self.layout.put_rows((scored.scores, scored.valid)), None)
            scores, scored_by, valid, lengths, reasons = jax.device_get(
                (batch.scores, batch.scores_mask, batch.row_valid, batch.response_length, batch.finish_reason)
            )
            n = batch.n
            for row in range(int(np.asarray(given.prompts.prompt_valid).sum()) * n):
                yield {
                    "uid": int(np.asarray(given.prompts.uid)[row // n]),
                    "prompt": given.texts[row // n],
                    "response": texts[row],
                    "score": float(scores[row] @ weights) if valid[row] else None,
                    "scores": {
                        name: float(score)
                        for name, score, own in zip(self.rewards.names, scores[row], scored_by[row], strict=True)
                        if own
                    },
                    "extras": scored.extras[row],
                    "length": int(lengths[row]),
                    "finish_reason": {1: "stop", 2: "length"}[int(reasons[row])],
                    "data_source": given.sets[row // n],
                }

    def __call__(self, view: Params, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The metrics of an evaluation, and its rows."""
        rows = list(self.rows(view, step))
        return evaluation_metrics(rows), rows


def make_evaluator(
    program: Program,
    inputs: Inputs,
    view: Any,
    *,
    n: int,
    sampling: Sampling,
    report: Callable[[str], None],
    name: str = "testing",
) -> Evaluator:
    """Compiles what evaluation on the held-out prompts needs.

    Args:
      view: of the sampler, arrays or abstract, with shardings.
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
        data=inputs.held_out,
        rewards=inputs.rewards,
        tokenizer=inputs.tokenizer,
        layout=layout,
        stop=config.rollout.stop,
        stops=program.stops,
        sample=sample,
        reward=compile_reward(layout, sample.out, **rewards, report=report, name=f"reward of {name}"),
        batch_size=config.eval.batch_size,
    )


def evaluation_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean score by data source, verl's names: `val-core/SOURCE/reward/mean@n`, and per function where there are
    several; its 95% interval from `val-aux/SOURCE/reward/low95` to `high95`.

    A failed reward counts as 0 (held-out accuracy is not allowed to rise because answers crash the scorer), and is
    counted in `val-aux/SOURCE/failed_ratio`.

    >>> rows = [{"uid": 1, "data_source": "sums", "score": 1.0, "scores": {"number": 1.0}, "extras": {}, "length": 3,
    ...          "finish_reason": "stop"}]
    >>> evaluation_metrics(rows)["val-core/sums/reward/mean@1"]
    1.0
    """
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(row["data_source"] for row in rows):
        own = [row for row in rows if row["data_source"] == source]
        problems = len({row["uid"] for row in own})
        n = len(own) // problems
        metrics[f"val-aux/{source}/problems"] = float(problems)
        metrics[f"val-core/{source}/reward/mean@{n}"] = _mean([row["score"] or 0.0 for row in own])
        if problems > 1:
            _, low, high = score_interval(own)
            metrics |= {f"val-aux/{source}/reward/low95": low, f"val-aux/{source}/reward/high95": high}
        functions = list(dict.fromkeys(name for row in own for name in row["scores"]))
        for name in functions if len(functions) > 1 else ():
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = _mean(
                [row["scores"][name] for row in own if name in row["scores"]]
            )
        extras: dict[str, list[float]] = {}
        for row in own:
            for name, value in row["extras"].items():
                if isinstance(value, bool | int | float) and math.isfinite(value):
                    extras.setdefault(name, []).append(float(value))
        for name, values in sorted(extras.items()):
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = _mean(values)
        metrics[f"val-aux/{source}/response_length/mean"] = _mean([row["length"] for row in own])
        metrics[f"val-aux/{source}/truncated_ratio"] = _mean([row["finish_reason"] == "length" for row in own])
        metrics[f"val-aux/{source}/failed_ratio"] = _mean([row["score"] is None for row in own])
    return metrics


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
