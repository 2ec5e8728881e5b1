"""Trains a language model by PPO or GRPO.

python -m jaxrl_llm.train --config configs/smollm2_addition.py --config.trainer.steps=40 --workdir runs/addition
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.command_line import make_parser, parse_args
from jaxrl_llm.errors import INTERRUPTED, RunAborted, StorageError, UserError, leave


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 user error, 3 numeric or reward abort, 4 storage, 130 interrupted."""
    try:
        parser = make_parser("train", "Trains a language model by PPO or GRPO.")
        config, args = parse_args(parser, sys.argv[1:] if argv is None else argv)
        from jaxrl_llm.trainer import fit  # jax is slow to import, and errors in the arguments should not wait for it

        with fit(config, args.workdir) as run:
            for _ in run:
                pass
        print(f"done: {Path(args.workdir)} holds metrics.jsonl, samples.jsonl and checkpoints/")
    except (UserError, RunAborted, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    leave(main())
