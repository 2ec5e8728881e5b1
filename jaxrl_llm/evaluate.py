"""Held-out accuracy of a model, or of a run's newest checkpoint: greedy, and sampled, each with a 95% interval. Of a
reward model's run: the share of held-out pairs that it puts in order.

python -m jaxrl_llm.evaluate --config configs/smollm2_addition.py
python -m jaxrl_llm.evaluate --run runs/addition --samples 4 --output answers.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.command_line import make_parser, parse_args, run_config
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError, exit_code, leave


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    given = list(sys.argv[1:] if argv is None else argv)

    def body() -> None:
        about = "Held-out accuracy, greedy and sampled, with a 95% interval. Needs --config, or --run, or both."
        parser = make_parser("evaluate", about, workdir=False, config_required=False)
        parser.add_argument(
            "--run", metavar="DIR", help="a run's folder: its newest checkpoint, and its config if none is given"
        )
        parser.add_argument("--samples", type=int, default=4, help="sampled responses per prompt; 0 for greedy alone")
        parser.add_argument("--output", metavar="FILE", help="write every response and score to this JSONL file")
        known, _ = parser.parse_known_args(given)
        if not known.config and not known.run:
            raise UserError("nothing to evaluate: give --config FILE (the model it names), or --run DIR (a run)")
        of_run = [] if known.config else ["--config", str(run_config(known.run))]
        config, args = parse_args(parser, [*of_run, *given])
        if not config.data.eval:
            raise UserError("config.data.eval: must be given: a source of held-out prompts")
        if args.samples < 0:
            raise UserError(f"--samples={args.samples}: must be at least 0")
        if args.output and not Path(args.output).absolute().parent.is_dir():
            raise UserError(f"--output={args.output}: there is no folder {str(Path(args.output).parent)!r}")
        results = evaluate(config, run=args.run, samples=args.samples)
        for name, rows in results.items():
            print(summary(name, rows) + by_source(rows))
        if args.output:
            rows = [{"mode": name, **row} for name, found in results.items() for row in found]
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            Path(args.output).write_text(lines, encoding="utf-8")

    return exit_code(body)


def evaluate(config: Config, *, run: str | None = None, samples: int = 4) -> dict[str, list[dict[str, Any]]]:
    """The responses to the held-out prompts with their scores: {"greedy": rows, "sampled": rows}; of a reward model's
    run {"pairs": rows}.

    Args:
      run: a run's folder, whose newest checkpoint is evaluated; None is the model that the config names.
      samples: responses per prompt at rollout.temperature; 0 leaves "sampled" out.
    """
    from jaxrl_llm.compiled import Compiled
    from jaxrl_llm.evaluation import make_evaluator, open_rewards, try_out
    from jaxrl_llm.loading import build_program, holds_reward_model, load_inputs, make_layout, policy_params
    from jaxrl_llm.reward_model import evaluate_pairs
    from jaxrl_llm.reward_scorer import make_scorer
    from jaxrl_llm.steps.phases import train_sampling
    from jaxrl_llm.steps.sampling import Sampling

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if run is not None and holds_reward_model(run):
        return {"pairs": evaluate_pairs(config, run, report)}
    inputs = open_rewards(config, load_inputs(config, train=False))
    with inputs.rewards:
        layout = make_layout(config)
        scorer, inputs = make_scorer(config, inputs, layout)
        program = build_program(config, inputs, layout, total_steps=1)
        params, step = policy_params(config, program.actor_model, layout, inputs.folder, run)
        if run is not None:
            report(f"checkpoint of step {step}")
        try_out(inputs)
        if scorer:
            scorer.load()
            scorer.compile(report)
        view = Compiled("update_weights", program.update_weights, params, report=report)(params)
        results = {}
        modes = (("greedy", 1, Sampling(temperature=0.0)), ("sampled", samples, train_sampling(config)))
        for name, n, sampling in modes:
            if n:
                evaluator = make_evaluator(program, inputs, view, n=n, sampling=sampling, report=report, name=name)
                results[name] = list(evaluator.rows(view, step))
        return results


def summary(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line: the mean score with its 95% interval over problems, and how many there are.

    >>> row = {"length": 3, "finish_reason": "stop"}
    >>> summary("greedy", [{"uid": i, "score": float(i < 90), **row} for i in range(100)])
    'greedy   0.900 [0.826, 0.945]  100 problems x 1, mean length 3.0, 0% truncated'
    """
    from jaxrl_llm.evaluation import score_interval

    mean, low, high = score_interval(rows)
    count = len({row["uid"] for row in rows})
    n = len(rows) // count
    length = np.mean([row["length"] for row in rows])
    truncated = np.mean([row["finish_reason"] == "length" for row in rows])
    failed = sum(row["score"] is None for row in rows)
    return (
        f"{name:<8} {mean:.3f} [{low:.3f}, {high:.3f}]  {count} problems x {n}, "
        f"mean length {length:.1f}, {truncated:.0%} truncated"
    ) + (f"; the reward failed on {failed} of {len(rows)} responses, which count as 0" if failed else "")


def by_source(rows: Sequence[dict[str, Any]]) -> str:
    """The mean score of each data source, where there are several: what training draws from is not held out."""
    sources: dict[str, list[float]] = {}
    for row in rows:
        sources.setdefault(row["data_source"], []).append(row["score"] or 0.0)
    return "".join(f"; {name} {np.mean(scores):.3f}" for name, scores in sources.items()) if len(sources) > 1 else ""


if __name__ == "__main__":
    leave(main())
