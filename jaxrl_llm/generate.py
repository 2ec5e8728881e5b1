"""Asks a model, or a run's newest checkpoint: responses to prompts, as they are sampled.

python -m jaxrl_llm.generate --model models/smollm2-135m "What is 3+4?"
python -m jaxrl_llm.generate --model runs/addition --samples 4 --temperature 0.7 --file questions.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.chat import render_prompt
from jaxrl_llm.command_line import keep_programs, load_config, run_config
from jaxrl_llm.config import Config, from_config_dict
from jaxrl_llm.errors import UserError, exit_code, leave, put, say
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.loading import load_inputs, make_layout, make_models, policy_params, stop_rules
from jaxrl_llm.models import hf
from jaxrl_llm.steps.rollout import begin, decode
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.tokenizer import load_tokenizer, response_text, unknown_in
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, DecodeState, Prompts

DEFAULT_NEW_TOKENS = 256
CHUNK = 8  # tokens between two looks at what has been sampled


def config_of(model: str, chat: bool | None = None) -> tuple[Config, str | None]:
    """The configuration to load `model` by, and its folder if it is a run.

    Args:
      model: a run's folder, a Hugging Face folder, a GGUF file or a hub id.
      chat: whether prompts go through the chat template; None: as the run did, or if the model has one.

    Raises:
      UserError: there is no such model.
    """
    if (Path(model) / "checkpoints").is_dir():
        changes: dict[str, Any] = {"data.eval": (), "eval.interval": 0}
        return load_config(run_config(model), changes | ({} if chat is None else {"data.chat_template": chat})), model
    from configs import base

    raw = base.get_config()
    raw.model.path = model
    template = load_tokenizer(hf.find_folder(model)).chat_template
    raw.data.update(train=("given on the command line",), chat_template=bool(template) if chat is None else chat)
    raw.reward.functions = ("exact",)  # a configuration must have one; nothing is scored here
    return from_config_dict(raw), None


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    step: int | None = None,
    samples: int = 1,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    chat: bool | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[list[tuple[str, bool]]]:
    """Yields, every few tokens, what has been sampled so far: for each prompt's samples in order (text, whether it has
    ended).

    Args:
      model: a run's folder, a Hugging Face folder, a GGUF file or a hub id.
      step: of the run's checkpoint; None is the newest.
      samples: responses per prompt.
      max_new_tokens: None is 256, or what the model has positions for.
      sampling: temperature 1 by default.
      chat: see `config_of`.
      report: told what is going on before the first token.

    Raises:
      UserError: no such model, an empty prompt, or more tokens than the model has positions.
    """
    config, run = config_of(model, chat)
    if step is not None and run is None:
        raise UserError(f"--step={step}: is of a run's checkpoints, and {model} is no run")
    data = config.data
    tokenizer = load_tokenizer(hf.find_folder(config.model.path))
    ids = [
        render_prompt(
            tokenizer,
            prompt,
            chat_template=data.chat_template,
            system_prompt=data.system_prompt or None,
            template_kwargs=data.template_kwargs,
        )
        for prompt in prompts
    ]
    for prompt in prompts:
        if unknown := unknown_in(tokenizer, prompt):
            report(f"notice: the model's tokenizer has no token for {', '.join(map(repr, unknown))} in {prompt!r:.60}")
    width = max(map(len, ids))
    positions = hf.read_shape(hf.find_folder(config.model.path)).max_positions
    if max_new_tokens is None:
        max_new_tokens = max(min(DEFAULT_NEW_TOKENS, positions - width), 1)
    elif width + max_new_tokens > positions:
        raise UserError(
            f"--max-new-tokens={max_new_tokens}: the model has {positions} positions, of which the longest "
            f"prompt takes {width}"
        )
    lengths = dataclasses.replace(config.rollout, prompt_length=width, response_length=max_new_tokens)
    config = dataclasses.replace(config, rollout=lengths)
    inputs, layout = load_inputs(config, train=False), make_layout(config)
    actor, _ = make_models(config, inputs, layout)
    params, step = policy_params(config, actor, layout, inputs.folder, run, step)
    chosen = sampling or Sampling()
    how = f"temperature {chosen.temperature:g}" if chosen.temperature else "greedy"
    report(f"{model}, step {step}, {how}" if run else f"{model}, {how}")
    stops = stop_rules(config.rollout, tokenizer, hf.read_eos_ids(inputs.folder), actor.vocab_size)
    tokens, mask = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), np.bool_)
    for row, prompt in enumerate(ids):
        tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, True

    count = np.arange(len(ids), dtype=np.int32)
    given: Any = Prompts(prompts=tokens, prompt_mask=mask, uid=count, prompt_valid=count >= 0)  # type: ignore[arg-type]

    @jax.jit
    def go_on(params: Any, cache: Any, state: DecodeState, stops: Any) -> Any:
        # A row that has only reached the end of its last chunk is still active.
        paused = (state.finish_reason == FINISH_LENGTH) & (state.length < max_new_tokens)
        limit = jnp.minimum(state.length + CHUNK, max_new_tokens)
        state = state.replace(max_new_tokens=limit, finish_reason=jnp.where(paused, 0, state.finish_reason))
        return decode(actor, params, cache, state, sampling=chosen, stops=stops)

    start = jax.jit(partial(begin, actor, n=samples, width=max_new_tokens))
    cache, state = start(params, given, jax.random.key(seed))
    stop_ids = set(np.asarray(stops.ids).tolist())
    ended = False
    while not ended:
        cache, state = go_on(params, cache, state, stops)
        rows = jax.device_get((state.responses, state.length, state.finish_reason))
        found = []
        for response, length, reason in zip(*rows, strict=True):
            own, stopped = response[:length].tolist(), bool(reason == FINISH_STOP)
            text = response_text(tokenizer, own, stopped, stop_ids, lengths.stop, lengths.min_new_tokens)
            found.append((text, stopped or bool(length >= max_new_tokens)))
        yield found
        ended = all(done for _, done in found)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--model", required=True, help="a run's folder, a Hugging Face folder, a GGUF file or a hub id")
    parser.add_argument("--step", type=int, help="the checkpoint of this step of a run instead of the newest")
    parser.add_argument("--file", type=Path, help="a text file with one prompt a line")
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, help=f"default: {DEFAULT_NEW_TOKENS}, or what the model has positions for"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="through the chat template (default: if there is one)"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))

    def body() -> None:
        prompts = [*args.prompts, *_lines(args.file)]
        if "" in prompts:
            raise UserError("a prompt is empty")
        if not prompts:
            raise UserError("no prompt: give one or several, or --file FILE")
        if args.samples < 1 or (args.max_new_tokens is not None and args.max_new_tokens < 1):
            raise UserError(f"--samples={args.samples}, --max-new-tokens={args.max_new_tokens}: both at least 1")
        if args.temperature < 0 or not 0 < args.top_p <= 1 or args.top_k < 0:
            raise UserError("--temperature and --top-k must be at least 0, --top-p in (0, 1]")
        keep_programs()
        so_far = generate(
            args.model,
            prompts,
            step=args.step,
            samples=args.samples,
            max_new_tokens=args.max_new_tokens,
            sampling=Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k),
            seed=args.seed,
            chat=args.chat,
            report=lambda text: say(str(text), sys.stderr),
        )
        _show(prompts, args.samples, so_far)

    return exit_code(body)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file={path}: {error}") from error


def _show(prompts: Sequence[str], samples: int, so_far: Iterator[list[tuple[str, bool]]]) -> None:
    """One response alone is written as it comes; of several each in its turn, as soon as it has ended."""
    alone, shown, done = len(prompts) * samples == 1, 0, 0
    for turn, rows in enumerate(so_far):
        if alone:
            if not turn:
                put(f"> {prompts[0]}")
            # What may still change, a character whose bytes are not all there yet, waits.
            text, ended = rows[0]
            text = text if ended else text.rstrip("\ufffd")
            put(text[shown:], end="")
            shown = len(text)
            continue
        while done < len(rows) and rows[done][1]:
            if done % samples == 0:
                put(f"> {prompts[done // samples]}")
            put(rows[done][0] if samples == 1 else f"[{done % samples + 1}] {rows[done][0]}")
            done += 1
    if alone:
        put("")


if __name__ == "__main__":
    in_huge_pages()
    leave(main())
