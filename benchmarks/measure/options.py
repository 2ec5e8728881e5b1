"""Options of the benchmarks, and their commands: a line for every case."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import lengths
from benchmarks.measure.cases import model_folder
from benchmarks.measure.presets import PRESETS, SIZES
from jaxrl_llm.errors import UserError

Line = dict[str, Any]
Case = argparse.Namespace


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark. Several values to one make a case of each combination."""
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=PRESETS, default="llama-5m", help="with random weights")
    model.add_argument("--model", type=Path, help="a folder with weights, instead of a preset")
    for name in SIZES:
        model.add_argument(f"--{name.replace('_', '-')}", type=positive, help="in place of the preset's")
    case = parser.add_argument_group("case (several values: one line for each combination)")
    for name, kind, default, text in (
        ("prompts", positive, 16, "G"),
        ("n", positive, 1, "responses to each"),
        ("prompt-length", positive, 32, "tokens of every prompt"),
        ("response-length", positive, 64, "width of the response frame"),
        ("lengths", lengths.spec, "full", "of responses: full, fixed:TOKENS, lognormal:MEAN, geometric:MEAN"),
        ("micro-batch", whole, 0, "rows at a time; 0: all at once"),
        ("logprob-chunk", positive, 1024, "tokens whose logits exist at a time"),
    ):
        case.add_argument(f"--{name}", type=kind, nargs="+", default=[default], help=f"{text} ({default})")
    for name, choices in (
        ("layers", ("unrolled", "scan")),
        ("remat", ("none", "dots", "full")),
        ("dtype", ("float32", "bfloat16")),
    ):
        case.add_argument(f"--{name}", choices=choices, nargs="+", default=[choices[0]])
    packed = "do not compute the padding of responses (model.use_remove_padding)"
    case.add_argument("--packed", choices=("no", "yes"), nargs="+", default=["no"], help=f"{packed} (no)")
    parser.add_argument("--seed", type=whole, default=0, help="of weights, prompts and the order of lengths")
    parser.add_argument("--repeats", type=positive, default=5, help="calls that are timed, after one that is not")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes", help="any other knob")
    parser.add_argument("--json", action="store_true", help="one line of JSON a case")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of benchmarks that sample."""
    group = parser.add_argument_group("sampling, as config.rollout has it")
    for name, default in (("temperature", 1.0), ("top-p", 1.0), ("min-p", 0.0)):
        group.add_argument(f"--{name}", type=float, nargs="+", default=[default], help=f"({default})")
    group.add_argument("--top-k", type=whole, nargs="+", default=[0], help="0: all (0)")


def sampling_of(case: Case) -> dict[str, Any]:
    """The overrides of a config that `add_sampling`'s options stand for."""
    return {f"rollout__{name}": getattr(case, name) for name in ("temperature", "top_p", "min_p", "top_k")}


def positive(text: str) -> int:
    return _at_least(1, text)


def whole(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number, at least {least}")
    return int(text)


def each_case(options: argparse.Namespace) -> Iterator[Case]:
    """One for each combination of the values of options that may have several."""
    swept = {name: v for name, v in vars(options).items() if isinstance(v, list) and name != "changes"}
    for values in itertools.product(*swept.values()):
        yield argparse.Namespace(**vars(options) | dict(zip(swept, values, strict=True)))


def run(
    doc: str | None,
    measure: Callable[[Case, Path], Line],
    argv: Sequence[str] | None = None,
    more_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """A benchmark's command: measures every case that the options ask for and prints a line of each.

    Args:
      doc: of the command.
      measure: (case, the model's folder) -> what was found.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    more_options(parser)
    options = parser.parse_args(argv)
    try:
        with model_folder(options) as folder:
            for case in each_case(options):
                line = described(case) | measure(case, folder)
                texts = [json.dumps(line)] if case.json else [*(f"{k:<24} {v}" for k, v in line.items()), ""]
                print("\n".join(texts), flush=True)
    except (UserError, lengths.LengthError) as error:
        parser.error(str(error))


def described(case: Case) -> Line:
    """The options that a line begins with: those of the case, and of the rest what was given."""
    left_out = {"preset", "model", "json", "changes", "repeats", *SIZES}
    given = {name: value for name, value in vars(case).items() if name in SIZES and value}
    found: Line = {"model": str(case.model.name) if case.model else case.preset} | given
    found |= {name: value for name, value in vars(case).items() if name not in left_out}
    return found | ({"set": case.changes} if case.changes else {})
