"""Trains a language model by PPO or GRPO.

python -m jaxrl_llm.train --config configs/smollm2_addition.py --config.trainer.steps=40 --workdir runs/addition
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl_llm.command_line import join_peers, keep_programs, make_parser, parse_args
from jaxrl_llm.errors import UserError, leave, put, say
from jaxrl_llm.guard import guarded_exit_code, run_guarded
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.signals import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""

    def body(signals: StopSignals) -> None:
        parser = make_parser("train", "Trains a language model by PPO or GRPO.")
        parser.add_argument("--dry_run", action="store_true", help="check and compile all, print each device's memory")
        parser.add_argument(
            "--device_memory", type=float, metavar="GB", help="of a device, for --dry_run to compare with"
        )
        parser.add_argument(
            "--profile", action="store_true", help="write a trace of a few steps to profile/ in the run"
        )
        about = "which: a step, as 4, or a first and a last, as 4:6 (default: the third to the fifth of this start)"
        parser.add_argument("--profile_steps", metavar="FIRST:LAST", help=about)
        config, args = parse_args(parser, sys.argv[1:] if argv is None else argv)
        _check_device_memory(args.device_memory, args.dry_run)
        speaks = join_peers(config, args)
        keep_programs(config.trainer.compilation_cache, writes=speaks)
        if args.dry_run:
            from jaxrl_llm.dry_run import dry_run

            found = dry_run(config, report=say if speaks else lambda text: None)
            if speaks:
                put(found.table(1e9 * args.device_memory if args.device_memory else None))
            return
        from jaxrl_llm.profiling import Steps
        from jaxrl_llm.trainer import fit  # jax is slow to import, and errors in the arguments should not wait for it

        steps = Steps.parse(args.profile_steps) if args.profile_steps else Steps() if args.profile else None
        run_guarded(partial(fit, profile=steps), config, args, signals)
        if speaks:
            say(f"done: {Path(args.workdir)} holds metrics.jsonl, samples.jsonl and checkpoints/")

    return guarded_exit_code(body)


def _check_device_memory(given: float | None, dry_run: bool) -> None:
    if given is None:
        return
    if not dry_run:
        raise UserError(f"--device_memory={given:g}: is for --dry_run to compare with; give that as well")
    if not 0 < given < float("inf"):
        raise UserError(f"--device_memory={given:g}: expected GB of one device, above 0")


if __name__ == "__main__":
    in_huge_pages()
    leave(main())
