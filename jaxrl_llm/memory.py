"""What to say when memory runs out: where, how large the batch and the programs are, and what makes them smaller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxrl_llm.compiled import Compiled, programs_in_use
from jaxrl_llm.config import Config, need_critic
from jaxrl_llm.run_mark import Killed

# Phase -> the knobs that make its programs smaller, and what to do with them.
SAMPLING = {
    "rollout.parts": "more: the prompts of a step are sampled one part after the other",
    "rollout.response_length": "less: the key-value cache grows with it",
}
SCORING = {
    "trainer.score_micro_batch_size": "rows per device at a time; 0 is all at once",
    "model.logprob_chunk": "less: so many tokens' logits exist at a time",
}
UPDATE = {"model.remat": "'full': the backward pass computes layers again instead of storing them"}
ACTOR = {"actor.micro_batch_size": "rows per device at a time; 0 is the whole mini-batch"}
CRITIC = {"critic.micro_batch_size": "rows per device at a time; 0 is the whole mini-batch"}
EVALUATION = {"eval.batch_size": "fewer prompts at a time", "eval.n": "fewer responses to each"}
KNOBS = {
    "gen": SAMPLING,
    "gen_max": SAMPLING,
    "testing": EVALUATION,
    "old_log_prob": SCORING,
    "ref": SCORING,
    "values": SCORING,
    "update_actor": ACTOR | UPDATE,
    "update_critic": CRITIC | UPDATE,
}
STATE = {
    "model.param_dtype": "'bfloat16': half the parameters and moments",
    "model.lora_rank": "above 0: LoRA, moments of the overlay alone (docs/lora.md)",
    "mesh.fsdp": "more devices: parameters and moments are divided over them",
}


SUSPECT = 0.5  # of the host's memory; who held as much may well have been killed for it: the rest comes in one piece


def explain(config: Config, phase: str, error: BaseException) -> str:
    """An error's text.

    Args:
      phase: that memory ran out in.
    """
    rollout, prompts = config.rollout, config.data.train_batch_size
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    lines = [
        f"out of memory in the phase {phase}: {first:.400}",
        *(f"  {note}" for note in getattr(error, "__notes__", [])),
        f"  a step: {prompts} prompts x {rollout.n} responses = {prompts * rollout.n} rows of "
        f"{rollout.prompt_length} + {rollout.response_length} tokens, on {jax.device_count()} device(s)",
        *_known_programs(),
        "  what makes it smaller (docs/sizing.md):",
    ]
    values, knobs = _values(config), KNOBS.get(phase) or _all_knobs(config)
    lines += [f"    {knob} = {values(knob)!r}; {what}" for knob, what in {**knobs, **STATE}.items()]
    return "\n".join(lines)


def tell_of_killed(config: Config, killed: Killed) -> str:
    """What the next start says of a process that was killed, and may have been for memory."""
    where = f" with step {killed.step} done" if killed.step else ""
    text = f"{killed.process} ended without a word in {killed.phase or 'the run'}{where}"
    whole = host_memory()
    if not killed.held or not whole:
        return text
    text += f"; it had held up to {readable(killed.held)} of {readable(whole)} of memory"
    if killed.held < SUSPECT * whole:
        return text
    knobs = ", ".join([*(KNOBS.get(killed.phase) or _all_knobs(config)), *STATE])
    return f"{text}, and may have been killed for that (docs/reliability.md); what takes less: {knobs}"


def host_memory() -> int:
    """Bytes that this process may hold: the machine's, or less if its control group says so; 0: not known."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return found
    return min(found, int(allowed)) if allowed.isdecimal() else found


def _all_knobs(config: Config) -> dict[str, str]:
    """Of whatever may have been compiled or loaded."""
    return SAMPLING | SCORING | ACTOR | (CRITIC if need_critic(config) else {}) | UPDATE


def _values(config: Config) -> Callable[[str], object]:
    def value(knob: str) -> object:
        section, name = knob.split(".")
        return getattr(getattr(config, section), name)

    return value


def _known_programs() -> list[str]:
    try:
        return list(_table())
    except Exception:  # it takes memory itself
        return ["  (the compiled programs' sizes cannot be told any more)"]


def _table() -> Iterator[str]:
    """Largest first."""
    found = sorted(((size(program), program.name) for program in programs_in_use()), reverse=True)
    if found:
        yield "  the compiled programs on each device (arguments + results of their own + temporaries):"
    for (total, arguments, results, temporaries), name in found:
        parts = " + ".join(map(readable, (arguments, results, temporaries)))
        yield f"    {name}: {readable(total)} ({parts})"


def size(program: Compiled) -> tuple[int, int, int, int]:
    """Bytes on each device: in all, of arguments, of results that do not lie in arguments' place, of temporaries."""
    found = program.executable.memory_analysis()
    if found is None:  # not every backend tells
        return 0, 0, 0, 0
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    parts = (found.argument_size_in_bytes, max(results, 0), found.temp_size_in_bytes)
    return sum(parts), *parts


def memory_metrics() -> dict[str, float]:
    """verl's names, in GiB: the most that the first device of this process has held so far, where it tells (a CPU does
    not); of the host's memory what is in use, by whomever, where the system tells."""
    found, device = {}, jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        found["perf/max_memory_allocated_gb"] = device["peak_bytes_in_use"] / 2**30
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        host = {words[0]: int(words[1]) for words in lines}
        found["perf/cpu_memory_used_gb"] = (host["MemTotal:"] - host["MemAvailable:"]) / 2**20
    return found


def readable(size: int) -> str:
    """
    >>> readable(3 << 20), readable(5 << 29), readable(900)
    ('3.0 MiB', '2.50 GiB', '0.0 MiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
