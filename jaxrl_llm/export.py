"""Writes a run's policy as a Hugging Face folder: weights, config.json, generation_config.json, tokenizer.

python -m jaxrl_llm.export runs/addition models/addition
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.command_line import load_config, run_config
from jaxrl_llm.errors import StorageError, UserError
from jaxrl_llm.loading import load_inputs, make_layout, make_models, policy_params
from jaxrl_llm.models import hf


def export(run: str | Path, folder: str | Path) -> int:
    """Writes the policy of a run's newest checkpoint to `folder`; the step that it is of.

    Raises:
      UserError: the run's config.json is not there or not valid, or `folder` holds something already.
      StorageError: there is no whole checkpoint.
    """
    config = load_config(run_config(run))
    inputs = load_inputs(config, train=False)
    layout = make_layout(config)
    model, _ = make_models(config, inputs, layout)
    params, step = policy_params(config, model, layout, inputs.folder, run)
    hf.save_params(Path(folder), params, hf.read_config(inputs.folder), source=inputs.folder)
    return step


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 user error, 4 storage."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder; its newest checkpoint is written")
    parser.add_argument("folder", metavar="FOLDER", help="where to; must not exist or be empty")
    args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        step = export(args.run, args.folder)
    except (UserError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.folder}: the policy of {args.run} after step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
