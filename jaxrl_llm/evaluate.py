"""The score of a model, or of a run's checkpoint, on each source of `data.eval`: greedy, and sampled, with a 95%
interval. Of a reward model, or its run: the share of the pairs that it puts in order.

python -m jaxrl_llm.evaluate --config configs/smollm2_addition.py
python -m jaxrl_llm.evaluate --run runs/addition --samples 4 --output answers.jsonl
python -m jaxrl_llm.evaluate --run runs/addition --step 20
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.command_line import keep_programs, make_parser, parse_args, run_config
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError, exit_code, leave, put, say
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.run_files import storage, to_line


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    given = list(sys.argv[1:] if argv is None else argv)

    def body() -> None:
        about = (
            "The score on each source of data.eval, greedy and sampled, with a 95% interval. Needs --config, or --run, "
            "or both."
        )
        parser = make_parser("evaluate", about, workdir=False, config_required=False)
        parser.add_argument(
            "--run", metavar="DIR", help="a run's folder: its newest checkpoint, and its config if none is given"
        )
        parser.add_argument("--step", type=int, help="the checkpoint of this step of --run instead of the newest")
        parser.add_argument("--samples", type=int, default=4, help="sampled responses per prompt; 0 for greedy alone")
        parser.add_argument("--output", metavar="FILE", help="write every response and score to this JSONL file")
        known, rest = parser.parse_known_args(given)
        if not known.config and not known.run:
            alone = f"{rest[0]!r} stands alone: " if rest else ""
            raise UserError(f"{alone}give --config FILE (the model it names is evaluated), --run DIR (a run), or both")
        if known.step is not None and not known.run:
            raise UserError(f"--step={known.step}: is of a run's checkpoints; give --run DIR as well")
        of_run = ["--config", str(run_config(known.run))] if known.run else []
        config, args = parse_args(parser, given if known.config else [*of_run, *given])
        if not config.data.eval:
            raise UserError("config.data.eval: must be given: a source of prompts to evaluate on")
        if args.samples < 0:
            raise UserError(f"--samples={args.samples}: must be at least 0")
        if args.output and not Path(args.output).absolute().parent.is_dir():
            raise UserError(f"--output={args.output}: there is no folder {str(Path(args.output).parent)!r}")
        keep_programs(config.trainer.compilation_cache)
        results = evaluate(config, run=args.run, step=args.step, samples=args.samples)
        for name, rows in results.items():
            for source in dict.fromkeys(row["data_source"] for row in rows):
                put(summary(name, source, [row for row in rows if row["data_source"] == source]))
        if args.output:
            rows = [{"mode": name, **row} for name, found in results.items() for row in found]
            with storage(Path(args.output)):
                lines = "".join(map(to_line, rows))
                Path(args.output).write_text(lines, encoding="utf-8", errors="backslashreplace")

    return exit_code(body)


def evaluate(
    config: Config, *, run: str | None = None, step: int | None = None, samples: int = 4
) -> dict[str, list[dict[str, Any]]]:
    """The responses to the prompts of `data.eval` with their scores: {"greedy": rows, "sampled": rows}; of a reward
    model, or its run, {"pairs": rows}.

    Args:
      run: a run's folder, whose checkpoint is evaluated; None is the model that the config names.
      step: of the checkpoint; None is the newest.
      samples: responses per prompt at rollout.temperature; 0 leaves "sampled" out.
    """
    from jaxrl_llm.collect import open_rewards, try_out
    from jaxrl_llm.compile_log import CompileLog
    from jaxrl_llm.compiled import Compiled, sampler_programs
    from jaxrl_llm.evaluation import make_evaluator
    from jaxrl_llm.loading import build_program, holds_reward_model, load_inputs, make_layout, policy_params
    from jaxrl_llm.models import hf
    from jaxrl_llm.reward_model import evaluate_pairs
    from jaxrl_llm.reward_scorer import make_scorer
    from jaxrl_llm.steps.phases import train_sampling
    from jaxrl_llm.steps.sampling import Sampling

    def report(text: object) -> None:
        say(str(text), sys.stderr)

    if run is not None and holds_reward_model(run, step):
        return {"pairs": evaluate_pairs(config, run, report, step)}
    inputs = load_inputs(config, train=False)
    assert inputs.held_out is not None
    for notice in [*inputs.held_out.skip_notices(), *inputs.held_out.notices()]:
        report(f"notice: {notice}")
    of_pairs = config.data.chosen_key in inputs.held_out.first()[1]
    if run is None and of_pairs and hf.is_classifier(hf.read_config(inputs.folder)):
        return {"pairs": evaluate_pairs(config, None, report)}
    inputs = open_rewards(config, inputs)
    with inputs.rewards:
        layout = make_layout(config)
        scorer, inputs = make_scorer(config, inputs, layout)
        program = build_program(config, inputs, layout, total_steps=1)
        params, step = policy_params(config, program.actor_model, layout, inputs.folder, run, step)
        if run is not None:
            report(f"checkpoint of step {step}")
        try_out(inputs)
        if scorer:
            scorer.load()
        ways = [("greedy", 1, Sampling(temperature=0.0)), ("sampled", samples, train_sampling(config))]
        ways = ways if samples else ways[:1]
        expected = 1 + len(ways) * (sampler_programs(config) + 1) + (scorer is not None)
        with CompileLog(report, report, expected=expected) as log:
            if scorer:
                scorer.compile(log)
            view = Compiled("update_weights", program.update_weights, params, report=log)(params)
            evaluators = {
                name: make_evaluator(program, inputs, view, mode=name, n=n, sampling=sampling, name=name, report=log)
                for name, n, sampling in ways
            }
        return {name: list(evaluator.rows(view, step)) for name, evaluator in evaluators.items()}


def summary(name: str, source: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line: a source's mean score with its 95% interval over problems, how many there are, of several responses to
    each what they are worth together (pass@k, or best@k where scores are not all 0 and 1, and maj@n), and each reward's
    mean where there are several.

    >>> row = {"length": 3, "finish_reason": "stop", "scores": {"exact": 1.0}}
    >>> summary("greedy", "sums", [{"uid": i, "score": float(i < 90), **row} for i in range(100)])
    'greedy   sums  0.900 [0.826, 0.945]  100 problems x 1, mean length 3.0, 0% truncated'
    >>> row["extras"] = {"exact/pred": "7"}
    >>> summary("sampled", "sums", [{"uid": i, "score": float(i < 6), **row} for i in range(9) for _ in range(2)])
    'sampled  sums  0.667 [0.354, 0.879]  9 problems x 2, pass@2 0.667, maj@2 0.667, mean length 3.0, 0% truncated'
    """
    from jaxrl_llm.evaluation import of_several, score_interval

    mean, low, high = score_interval(rows)
    count = len({row["uid"] for row in rows})
    n = len(rows) // count
    length = np.mean([row["length"] for row in rows])
    truncated = np.mean([row["finish_reason"] == "length" for row in rows])
    failed = sum(row["score"] is None for row in rows)
    rewards: dict[str, list[float]] = {}
    for row in rows:
        for reward, score in row["scores"].items():
            rewards.setdefault(reward, []).append(score)
    problems: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["uid"], []).append(row)
    worth = of_several(list(problems.values()), n)
    same = {key.replace("pass", "best") for key in worth if key.startswith("pass")}  # which pass@k tells
    together = [f"{key} {np.mean(values):.3f}" for key, values in worth.items() if key not in same]
    several = [f"{reward} {np.mean(scores):.3f}" for reward, scores in rewards.items()] if len(rewards) > 1 else []
    return (
        f"{name:<8} {source}  {mean:.3f} [{low:.3f}, {high:.3f}]  {count} problems x {n}, "
        + ", ".join([*together, *several, f"mean length {length:.1f}", f"{truncated:.0%} truncated"])
        + (f"; the reward failed on {failed} of {len(rows)} responses, which count as 0" if failed else "")
    )


if __name__ == "__main__":
    in_huge_pages()
    leave(main())
