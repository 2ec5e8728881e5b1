"""Trains a reward model on pairs of responses, of which one is better: a Bradley–Terry model with one score a response.

python -m jaxrl_llm.reward_model --config configs/quickstart_reward_model.py --workdir runs/quickstart_reward_model

It starts from a language model with a fresh head, or from a reward model. Records hold a prompt (`data.prompt_key` or
`data.prompt_template`), the better response (`data.chosen_key`) and the worse one (`data.rejected_key`): TRL's fields,
as texts or as chat messages. What comes out is a run's folder as any other; exported, it is a sequence classifier that
transformers reads, and that `reward.model.path` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.accounting import Accounts
from jaxrl_llm.compile_log import Report
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.config import Config, check_devices
from jaxrl_llm.data import PromptBatch, PromptData
from jaxrl_llm.errors import UserError, leave, naming, of_kind
from jaxrl_llm.evaluation import GivenUp, evaluation_metrics
from jaxrl_llm.exchanges import Exchanges
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.loading import Inputs, load_inputs, make_layout, make_reward_model, policy_params
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.records import field
from jaxrl_llm.sharding import Layout, abstract_like, fetch
from jaxrl_llm.steps.phases import Program, make_program, sampler_view
from jaxrl_llm.steps.scoring import score_responses
from jaxrl_llm.steps.training import make_reward_training
from jaxrl_llm.supervised import SupervisedRun, command
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, Model, Params


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How records become batches of two rows to a prompt, the better response first."""

    exchanges: Exchanges
    keys: tuple[str, str]  # fields of the better and of the worse response
    prompt_length: int
    response_length: int

    def batch(self, given: PromptBatch) -> Batch:
        """The pairs on the host. What both rows of a pair begin with is their prompt, computed once; what is left of a
        row is its response, cut at the frame's width (then its `finish_reason` is FINISH_LENGTH).

        Raises:
          UserError: a record without the two responses, or whose rows have nothing in common.
        """
        groups, width = len(given.records), self.response_length
        prompts, prompt_mask = (np.zeros((groups, self.prompt_length), dtype) for dtype in (np.int32, np.bool_))
        responses, mask = (np.zeros((2 * groups, width), dtype) for dtype in (np.int32, np.bool_))
        reasons = np.full(2 * groups, FINISH_STOP, np.int32)
        prompt_mask[:, -1], mask[:, 0] = True, True  # fillers, of which nothing counts
        for group in np.flatnonzero(np.asarray(given.prompts.prompt_valid)).tolist():
            rows = self._rows(given.records[group])
            shared = min(_common(*rows), self.prompt_length)
            if not shared:
                raise UserError(f"a pair's responses follow no common prompt: {given.texts[group]!r:.80}")
            prompts[group, -shared:], prompt_mask[group, -shared:] = rows[0][:shared], True
            for row, ids in enumerate(rows, start=2 * group):
                # At least one id, which is where the two rows differ or one of them ends.
                kept = self.exchanges.cut(ids, shared + width, least=shared + 1)[shared:]
                responses[row, : len(kept)], mask[row, : len(kept)] = kept, True
                reasons[row] = FINISH_LENGTH if len(kept) < len(ids) - shared else FINISH_STOP
        valid = np.repeat(np.asarray(given.prompts.prompt_valid), 2)
        found: dict[str, Any] = {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "prompt_valid": given.prompts.prompt_valid,
            "record_arrays": {},
            "uid": np.repeat(np.asarray(given.prompts.uid), 2),
            "responses": responses,
            "response_mask": mask,
            "response_length": mask.sum(1, dtype=np.int32),
            "rollout_log_probs": None,
            "finish_reason": reasons,
            "loss_mask": mask & valid[:, None],
        }
        return Batch(**found)

    def _rows(self, record: dict[str, Any]) -> list[list[int]]:
        found = []
        for name, key in zip(("chosen_key", "rejected_key"), self.keys, strict=True):
            with naming(f"data.{name}"):
                found.append(self.exchanges.ids(record, field(record, key)))
        return found


def check_pair(config: Config, role: str, record: Mapping[str, Any]) -> None:
    """
    Raises:
      UserError: a record, whether to train or to evaluate on, lacks one of the two responses.
    """
    del role
    with of_kind("no pair"):
        for name in ("chosen_key", "rejected_key"):
            with naming(f"data.{name}"):
                response = field(record, getattr(config.data, name))
                if not isinstance(response, str | list | tuple):
                    raise UserError(f"a response is a string or a list of chat messages, found {response!r:.40}")


def _common(a: list[int], b: list[int]) -> int:
    """How many ids both begin with, but for the last of the shorter one.

    >>> _common([1, 2, 3], [1, 2, 4]), _common([1, 2], [1, 2])
    (2, 1)
    """
    shorter = min(len(a), len(b)) - 1
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


@dataclasses.dataclass(frozen=True)
class PairEvaluator:
    """The held-out pairs, scored with the present parameters: the share of them that are put in order."""

    data: PromptData
    pairs: Pairs
    layout: Layout
    batch_size: int
    score: Compiled  # (view, batch) -> scores

    def __call__(
        self, view: Params, step: int, give_up: Callable[[], object] | None = None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The metrics of an evaluation, and one row a pair, whose `score` is whether it is put in order.

        Raises:
          GivenUp: `give_up`, asked before each batch, says so.
        """
        del step
        rows = []
        for given in self.data.eval_batches(self.batch_size):
            if give_up and give_up():
                raise GivenUp
            host = self.pairs.batch(given)
            scores = np.asarray(fetch(self.score(view, self.layout.put_rows(host))), np.float64).reshape(-1, 2)
            for group in np.flatnonzero(np.asarray(given.prompts.prompt_valid)).tolist():
                (chosen, rejected), own = scores[group].tolist(), slice(2 * group, 2 * group + 2)
                whole = bool((np.asarray(host.finish_reason)[own] == FINISH_STOP).all())
                right = float(chosen > rejected)
                rows.append(
                    {
                        "uid": int(np.asarray(given.prompts.uid)[group]),
                        "prompt": given.texts[group],
                        "score": right,
                        "scores": {},
                        "extras": {
                            "accuracy": right,
                            "margin": chosen - rejected,
                            "chosen": chosen,
                            "rejected": rejected,
                        },
                        "length": float(np.asarray(host.response_length)[own].mean()),
                        "finish_reason": "stop" if whole else "length",
                        "data_source": given.sets[group],
                    }
                )
        return evaluation_metrics(rows), rows


def make_pairs(config: Config, inputs: Inputs) -> Pairs:
    data, folder = config.data, inputs.folder
    exchanges = Exchanges(
        tokenizer=inputs.tokenizer,
        vocab_size=hf.read_shape(folder).vocab_size,
        eos_id=hf.read_eos_ids(folder)[0],
        pad_id=classifier.new_pad_id(folder),
        chat_template=data.chat_template,
        template_kwargs=data.template_kwargs,
        system_prompt=data.system_prompt or None,
        prompt_key=data.prompt_key,
        prompt_template=data.prompt_template,
    )
    keys, rollout = (data.chosen_key, data.rejected_key), config.rollout
    return Pairs(exchanges, keys, rollout.prompt_length, rollout.response_length)


def make_pair_evaluator(
    config: Config, inputs: Inputs, layout: Layout, model: Model, view: Any, report: Report
) -> PairEvaluator:
    """Compiles what evaluation on the held-out pairs needs.

    Args:
      view: the parameters as `sampler_view` gives them, arrays or abstract, with shardings.
      report: told what is being compiled.
    """
    assert inputs.held_out is not None
    pairs, size = make_pairs(config, inputs), config.eval.batch_size
    first = layout.put_rows(pairs.batch(next(inputs.held_out.eval_batches(size))))

    def score(view: Params, batch: Batch) -> jax.Array:
        return score_responses(model, view, layout.constrain_rows(batch))

    given = abstract_like(view), abstract_like(first)
    compiled = Compiled("testing", score, *given, report=report, out_shardings=layout.rows)
    return PairEvaluator(inputs.held_out, pairs, layout, size, compiled)


def evaluate_pairs(
    config: Config, run: str | Path | None, report: Callable[[object], None], step: int | None = None
) -> list[dict[str, Any]]:
    """The pairs of `data.eval` as a run's checkpoint (of `step`; None: the newest), or without a run the config's model
    puts them in order, one row a pair (`PairEvaluator`).

    Raises:
      UserError, StorageError: as when a run is started.
    """
    inputs, layout = load_inputs(config, train=False, check=partial(check_pair, config)), make_layout(config)
    model = make_reward_model(config, inputs, layout)
    params, step = policy_params(config, model, layout, inputs.folder, run, step)
    if run is not None:
        report(f"checkpoint of step {step}")
    view = jax.jit(partial(sampler_view, config))(params)
    return make_pair_evaluator(config, inputs, layout, model, view, report)(view, step)[1]


class RewardModelRun(SupervisedRun):
    """A run like that of `fit`, whose step reads pairs of responses instead of sampling and scoring."""

    def _open_rewards(self) -> Inputs:  # its evaluation is of pairs
        return self._inputs

    def _check_record(self, role: str, record: Mapping[str, Any]) -> None:
        check_pair(self.config, role, record)

    def _make_scorer(self) -> tuple[None, Inputs]:
        return None, self._inputs

    def _make_program(self) -> Program:
        config = self.config
        rollout, critic = dataclasses.replace(config.rollout, n=2), dataclasses.replace(config.critic, enable="no")
        config = dataclasses.replace(config, rollout=rollout, critic=critic)
        check_devices(config, jax.device_count())
        model = make_reward_model(config, self._inputs, self._layout)
        training = make_reward_training(config, model, self._layout, self.total_steps)
        self._pairs = make_pairs(config, self._inputs)
        self._pairs.exchanges.check("config.data.chat_template")
        program = make_program(config, model, layout=self._layout, total_steps=self.total_steps)
        return dataclasses.replace(program, actor=training, ref=None)

    def _make_accounts(self) -> Accounts:
        return dataclasses.replace(super()._make_accounts(), scores=True)

    def _batch(self, given: PromptBatch) -> Batch:
        return self._pairs.batch(given)

    def _make_evaluator(self, report: Report) -> PairEvaluator | None:
        if self._inputs.held_out is None:
            return None
        model, view = self._program.actor_model, self._update_weights.out
        return make_pair_evaluator(self.config, self._inputs, self._layout, model, view, report)


def train_reward_model(config: Config, workdir: str | Path | None = None, **how: Any) -> RewardModelRun:
    """A run of `config` on pairs: iterate over it for (metrics, batch) of each step, as over `fit`'s.

    Args:
      how: `strict_resume`, `guard`: see `fit`.

    Raises:
      UserError: something in the config, the data, a model or the folder is wrong; before the first step.
    """
    return RewardModelRun(config, workdir, **how)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    return command(
        "reward_model", "Trains a reward model on pairs of a better and a worse response.", train_reward_model, argv
    )


if __name__ == "__main__":
    in_huge_pages()
    leave(main())
