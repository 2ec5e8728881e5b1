"""Configurations from files, overrides and command lines: `--config FILE --config.a.b=value --workdir DIR`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from jaxrl_llm.config import FOLLOWS, Config, from_config_dict, unresolve, with_new_knobs
from jaxrl_llm.config_values import flatten, hint_of, knobs, parse, suggest
from jaxrl_llm.errors import UserError, nearest, nearest_path, say


def load_config(path: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Config:
    """The configuration of a file, changed by `overrides`.

    Args:
      path: a Python file with `get_config()`, or the config.json of a run.
      overrides: {"trainer.steps": 40}, or texts such as "trainer.steps=40".

    Raises:
      UserError: listing everything that is wrong.
    """
    raw = _read_file(Path(path))
    if isinstance(overrides, Mapping):
        pairs = list(overrides.items())
    else:
        texts = [override.partition("=") for override in overrides]
        pairs = [(key, parse(text, hint_of(Config, key))) for key, _, text in texts]
    with raw.unlocked(), raw.ignore_type():
        if Path(path).suffix == ".json":
            for key in unresolve(raw.to_dict()):
                _assign(raw, key, FOLLOWS[key][0])
        for key, value in pairs:
            _assign(raw, key, value)
    if isinstance(section := raw.get("logging"), ConfigDict) and section.get("name") == "":
        section.name = Path(path).stem
    return from_config_dict(raw)


def run_config(run: str | Path) -> Path:
    """The config.json of a run's folder.

    Raises:
      UserError: it is no run's folder.
    """

    def is_run(folder: Path) -> bool:
        return (folder / "checkpoints").is_dir() and (folder / "config.json").is_file()

    folder = Path(run)
    if is_run(folder):
        return folder / "config.json"
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "; ".join(filter(None, ["no such folder", nearest_path(folder)]))
    elif around := next(filter(is_run, folder.parents), None):
        why = f"but a part of one: give {str(around)!r}"
    elif any(folder.glob("*.safetensors")):
        why = "but a model's"
    else:
        missing = [name for name in ("config.json", "checkpoints/") if not (folder / name).exists()]
        why = f"no {' and no '.join(missing)} in it"
    raise UserError(f"{run}: is not a run's folder ({why})")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().strip()}")


def make_parser(
    prog: str, description: str, *, workdir: bool = True, config_required: bool = True
) -> argparse.ArgumentParser:
    """A parser that knows --config and, for a command that writes a run, --workdir; a command adds its own flags before
    `parse_args`."""
    parser = _Parser(
        prog=f"python -m jaxrl_llm.{prog}",
        description=description,
        epilog="Any knob of configs/base.py can be set by --config.section.key=value.",
        allow_abbrev=False,
    )
    about = "a recipe (.py) or a run's config.json"
    parser.add_argument("--config", required=config_required, metavar="FILE", help=about)
    if workdir:
        parser.add_argument("--workdir", metavar="DIR", help="the run's folder (default: runs/NAME-TIME)")
        about = "refuse to go on from an older checkpoint where the newest is damaged"
        parser.add_argument("--strict_resume", action="store_true", help=about)
        several = parser.add_argument_group("several hosts", "the same command in every process, with its own number")
        several.add_argument("--distributed", action="store_true", help="the cluster says who is who (TPU pods, SLURM)")
        several.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where the cluster does not")
        several.add_argument("--num_processes", type=int, metavar="N", help="of the run")
        several.add_argument("--process_id", type=int, metavar="I", help="of this process, from 0")
    return parser


def join_peers(config: Config, args: argparse.Namespace) -> bool:
    """Makes this process one of a run's, where the command line says so, and sees to it that all of them were given the
    same; to be called before anything uses a device.

    Returns:
      Whether this is the process that speaks: the first, or the only one.

    Raises:
      UserError: what was given does not make a run, or not the same one everywhere.
      TryAgain: the others do not come.
    """
    flags = {"coordinator": args.coordinator, "num_processes": args.num_processes, "process_id": args.process_id}
    given = [f"--{name}" for name, value in flags.items() if value is not None]
    if not args.distributed and not given:
        return True
    if given and len(given) < len(flags):
        raise UserError(f"{', '.join(given)}: --coordinator, --num_processes and --process_id belong together")
    if args.num_processes is not None and args.num_processes < 1:
        raise UserError(f"--num_processes={args.num_processes}: must be at least 1")
    if args.num_processes is not None and not 0 <= args.process_id < args.num_processes:
        raise UserError(f"--process_id={args.process_id}: expected 0 to --num_processes - 1 = {args.num_processes - 1}")
    if args.coordinator is not None:
        _, colon, port = args.coordinator.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UserError(f"--coordinator={args.coordinator}: expected HOST:PORT, with a port from 1 to 65535")
    from jaxrl_llm.peers import join_run, must_agree, settings_of_jax

    peers = join_run(**flags)
    given_here = {f"config.{key}": value for key, value in flatten(config).items()}
    given_here["--workdir"] = os.path.abspath(args.workdir)
    must_agree(peers, given_here | settings_of_jax())
    return peers.first


def keep_programs(setting: str = "auto", *, writes: bool = True) -> None:
    """Keeps on disk what this command compiles, see `compilation_cache.open_cache`; to be called before it compiles.

    Args:
      setting: of trainer.compilation_cache.
      writes: whether this process writes.
    """
    from jaxrl_llm.compilation_cache import open_cache

    open_cache(setting, lambda text: say(str(text), sys.stderr), writes=writes)


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The configuration, and the flags: `workdir` (filled in if not given) and what the command added.

    Raises:
      UserError: for an argument without dashes, an unknown flag or key, or a configuration with errors.
    """
    args, rest = parser.parse_known_args(list(argv))
    overrides, problems = [], []
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--config.") and equals:
            overrides.append(f"{flag.removeprefix('--config.')}={value}")
        elif flag.startswith("--config."):
            problems.append(f"{argument} has no value: write {argument}=VALUE")
        elif argument.startswith("config."):
            problems.append(f"{argument} has no dashes: write --{argument}")
        elif argument.startswith("-"):
            known = [option for action in parser._actions for option in action.option_strings]
            problems.append(f"{argument}: no such flag; {_meant(flag, known)}")
        else:
            problems.append(f"{argument!r} stands alone: flags are written --flag=value")
    if problems:
        raise UserError("\n  ".join(["wrong arguments:", *problems, parser.format_usage().strip()]))
    config = load_config(args.config, overrides)
    if getattr(args, "workdir", "") is None and (args.distributed or args.coordinator):
        raise UserError("--workdir: must be given where there are several processes, the same folder to each")
    if getattr(args, "workdir", "") is None:
        args.workdir = os.path.join("runs", f"{config.logging.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return config, args


def _meant(flag: str, known: Sequence[str]) -> str:
    """What an unknown flag may have been: a nearly right one, or a knob without its --config.

    >>> _meant("--rollout.n", ["--config"]), _meant("--steps", ["--config"])
    ('did you mean --config.rollout.n?', 'did you mean --config.trainer.steps?')
    """
    close = nearest(flag, known)
    if close.startswith("did you mean '--config"):
        return close
    name = flag.lstrip("-")
    found = re.fullmatch(r"did you mean '([\w.]+)'\?", suggest(Config, name))
    knob = name if name in knobs(Config) else found[1] if found else ""
    return f"did you mean --config.{knob}?" if knob else close


def _assign(raw: ConfigDict, key: str, value: Any) -> None:
    """Sets a dotted key, known or not: what is wrong with it is found with everything else."""
    section, *rest = key.split(".", 1)
    if not rest:
        raw[section] = value
        return
    if not isinstance(inner := raw.get(section), ConfigDict):
        inner = raw[section] = ConfigDict(type_safe=False)
    _assign(inner, rest[0], value)


def _read_file(path: Path) -> ConfigDict:
    if not path.is_file():
        why = "a folder, expected a recipe (.py) or a run's config.json" if path.is_dir() else "no such file"
        raise UserError("; ".join(filter(None, [f"--config={path}: {why}", nearest_path(path)])))
    if path.suffix == ".json":
        try:
            return ConfigDict(with_new_knobs(json.loads(path.read_text())), type_safe=False)
        except ValueError as error:
            raise UserError(f"{path}: not JSON: {error}") from error
    _make_importable(path)
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(get_config := getattr(module, "get_config", None)):
            raise UserError(f"{path}: has no function get_config()")
        raw = get_config()
    except UserError:
        raise
    except Exception as error:  # a recipe is the user's code: say where it broke
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    if not isinstance(raw, ConfigDict):
        raise UserError(f"{path}: get_config() must return an ml_collections.ConfigDict, found {type(raw).__name__}")
    return raw


def _make_importable(path: Path) -> None:
    """Lets a recipe say `from configs import base` wherever it lies, and name functions of its own by dotted path."""
    folder = path.resolve().parent
    own = [str(folder.parent)] if folder.name == "configs" else []
    for place in [*own, str(Path(__file__).resolve().parents[1])]:
        if place not in sys.path:
            sys.path.append(place)
