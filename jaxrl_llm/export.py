"""Writes a run's policy, or its reward model, as a Hugging Face folder: for transformers, vLLM, llama.cpp's converter.

python -m jaxrl_llm.export runs/addition models/addition
python -m jaxrl_llm.export runs/addition models/addition-40 --step 40 --dtype bfloat16
python -m jaxrl_llm.export runs/lora adapters/lora --adapter
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.command_line import load_config, run_config
from jaxrl_llm.errors import UserError, exit_code, leave, say
from jaxrl_llm.loading import (
    holds_reward_model,
    load_inputs,
    make_layout,
    make_models,
    make_reward_model,
    policy_params,
    trained_params,
)
from jaxrl_llm.models import hf
from jaxrl_llm.models.hf_export import export_policy
from jaxrl_llm.models.peft import export_adapter


def export(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> int:
    """Writes the policy of one of a run's checkpoints to `folder`; the step that it is of.

    Args:
      step: None is the newest.
      dtype: "float32" or "bfloat16"; None is that of the run's parameters.
      adapter: only what LoRA trained, as an adapter folder of PEFT's; else the two are merged.

    Raises:
      UserError: the run's config.json is not there or not valid, or `folder` holds something already.
      StorageError: there is no whole checkpoint, or none of that step.
    """
    config = load_config(run_config(run))
    inputs = load_inputs(config, train=False)
    layout = make_layout(config)
    if holds_reward_model(run, step):
        model = make_reward_model(config, inputs, layout)
    else:
        model, _ = make_models(config, inputs, layout)
    if adapter:
        m = config.model
        if not m.lora_rank:
            raise UserError(f"{run}: was trained without LoRA (model.lora_rank is 0), so there is no adapter")
        overlay, step = trained_params(config, model, layout, run, step)
        export_adapter(folder, overlay, hf.read_config(inputs.folder), alpha=m.lora_alpha, base_model=m.path)
        return step
    params, step = policy_params(config, model, layout, inputs.folder, run, step)
    export_policy(folder, params, inputs.folder, dtype=dtype)
    return step


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder; its newest checkpoint is written")
    parser.add_argument("folder", metavar="FOLDER", help="where to; must not exist or be empty")
    parser.add_argument("--step", type=int, help="the checkpoint of this step instead of the newest")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the files (default: the run's parameters')"
    )
    parser.add_argument("--adapter", action="store_true", help="only what LoRA trained, as PEFT's adapter folder")
    args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))

    def body() -> None:
        if args.adapter and args.dtype:
            raise UserError("--dtype: an adapter is written as it was trained; leave it out")
        step = export(args.run, args.folder, step=args.step, dtype=args.dtype, adapter=args.adapter)
        say(f"{args.folder}: the model of {args.run} after step {step}")

    return exit_code(body)


if __name__ == "__main__":
    leave(main())
