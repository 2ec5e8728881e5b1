"""Memory and time of a step on accelerators that are not there, on paper, and the mesh that would take the least time.

python -m jaxrl_llm.plan --config configs/gsm8k_grpo.py --model 7b --device v5p --chips 32
python -m jaxrl_llm.plan --config configs/gsm8k_grpo.py --model 0.5b,7b --device v5e,h100 --chips 8,64

Several models, devices or numbers of chips make one table, a row each. costs.py and phase_costs.py have the formulas,
chips.py the data sheets, docs/scaling.md what was checked against compiled programs and what is an assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import costs
from jaxrl_llm.chips import MODELS, Chip, find_chip
from jaxrl_llm.command_line import make_parser, parse_args
from jaxrl_llm.config import Config, check_devices
from jaxrl_llm.costs import Job, Mesh
from jaxrl_llm.errors import UserError, exit_code, leave, naming, nearest, put
from jaxrl_llm.models import hf
from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.phase_costs import Work, peak_bytes, phases

GB = 1e9
ROOM = 0.92  # of a device's memory that may be planned with: the rest is the runtime's, and fragments


@dataclasses.dataclass(frozen=True)
class Shares:
    """How much of what a data sheet promises is assumed to be reached."""

    flops: float = 0.4  # in scoring and updates, of bfloat16's peak
    bandwidth: float = 0.7
    link: float = 0.6


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one phase, if each of the three were alone."""

    compute: float
    memory: float
    exchange: float

    @property
    def total(self) -> float:
        """Arithmetic hides the memory's traffic, or the other way round; exchanges are assumed to hide nothing."""
        return max(self.compute, self.memory) + self.exchange

    @property
    def bound(self) -> str:
        """What takes the longest."""
        sizes = {"compute": self.compute, "memory": self.memory, "exchange": self.exchange}
        return max(sizes, key=lambda name: sizes[name])


@dataclasses.dataclass(frozen=True)
class Plan:
    """One model, config and mesh on chips of one kind."""

    job: Job
    chip: Chip
    mesh: Mesh
    times: dict[str, Time]
    works: dict[str, Work]
    peaks: dict[str, float]  # bytes

    @property
    def seconds(self) -> float:
        return sum(time.total for time in self.times.values())

    @property
    def peak(self) -> tuple[str, float]:
        """The phase with the most memory, and its bytes."""
        return max(self.peaks.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        return self.peak[1] <= ROOM * self.chip.memory * GB


def phase_time(work: Work, chip: Chip, mesh: Mesh, shares: Shares, response_length: int, parts: int) -> Time:
    """FLOPs / (peak · share), bytes / (bandwidth · share), and Σ sent bytes / (speed of the ring · share), where what
    is exchanged each token counts `response_length` · `parts` times."""
    stride = {"tensor": 1, "fsdp": mesh.tensor, "data": mesh.tensor * mesh.fsdp, "data+fsdp": mesh.tensor}
    exchange = 0.0
    for x in work.exchanges:
        inner = stride.get(x.axes, 1)
        times = x.times * (response_length * parts if x.per_token else 1)
        speed = chip.speed(inner, mesh.along(x.axes))
        exchange += times * x.wire(mesh) / (speed * GB * shares.link) if speed else math.inf
    compute = work.flops / (chip.tflops * 1e12 * shares.flops)
    return Time(compute, work.traffic / (chip.bandwidth * GB * shares.bandwidth), exchange)


def make_plan(job: Job, chip: Chip, mesh: Mesh, shares: Shares) -> Plan:
    """What a step would cost on this mesh."""
    works, rollout = phases(job, mesh), job.config.rollout
    lengths = rollout.response_length, rollout.parts
    times = {name: phase_time(work, chip, mesh, shares, *lengths) for name, work in works.items()}
    return Plan(job, chip, mesh, times, works, peak_bytes(job, mesh))


def meshes(job: Job, chips: int) -> Iterator[Mesh]:
    """Every data × fsdp × tensor of so many chips that cuts heads, widths and batches evenly. Axes of which the config
    wants more than one device have as many as it wants.

    Raises:
      UserError: there is none; says why the most obvious one is none.
    """
    s, found, why = job.shape, 0, ""
    asked = {axis: size for axis, size in dataclasses.asdict(job.config.mesh).items() if size > 1}
    for tensor in (t for t in range(1, chips + 1) if chips % t == 0):
        inner = s.mlp_width if s.moe is None else s.moe.num_experts
        if any(size % tensor for size in (s.num_kv_heads, s.num_heads, inner, s.vocab_size)):
            continue
        for fsdp in (f for f in range(1, chips // tensor + 1) if chips // tensor % f == 0 and s.width % f == 0):
            mesh = Mesh(chips // tensor // fsdp, fsdp, tensor)
            if any(getattr(mesh, axis) != size for axis, size in asked.items()):
                continue
            axes = dataclasses.replace(job.config.mesh, **dataclasses.asdict(mesh))
            try:
                check_devices(dataclasses.replace(job.config, mesh=axes), chips)
            except UserError as error:
                why = why or str(error)
                continue
            found += 1
            yield mesh
    if not found:
        wanted = "".join(f" has config.mesh.{axis} = {size} and" for axis, size in asked.items())
        instance = f"; for instance {why}" if why else ""
        raise UserError(f"--chips {chips}: no mesh of so many{wanted} divides the model and the batch{instance}")


def search(job: Job, chip: Chip, chips: int, shares: Shares) -> list[Plan]:
    """Plans of every mesh, those that fit first, then by time; of those that do not fit, by memory."""
    if chips > chip.pod and not chip.network:
        raise UserError(
            f"--chips {chips}: {chip.name} has {chip.pod} in a pod, and what lies between pods is not known; expected "
            f"at most {chip.pod}, or numbers as --device with a network"
        )
    plans = [make_plan(job, chip, mesh, shares) for mesh in meshes(job, chips)]
    return sorted(plans, key=lambda p: (not p.fits, p.seconds if p.fits else p.peak[1]))


# What people see


def parameters(job: Job) -> int:
    """Elements of all of the actor's parameters."""
    return sum(math.prod(leaf.shape) for leaf in costs.leaves(job.whole))


def table(plan: Plan, others: Sequence[Plan], name: str) -> str:
    """A plan as text, and the next best meshes."""
    job, mesh, chip, r = plan.job, plan.mesh, plan.chip, plan.job.config.rollout
    groups = job.config.data.train_batch_size
    prompts, responses = costs.cache_bytes(job, mesh)
    held = costs.state_bytes(job, mesh) | {"sampler's view": costs.view_bytes(job, mesh)}
    held |= {"cache: prompts": prompts, "cache: responses": responses}
    lines = [
        f"{name}: {parameters(job) / 1e9:.2f}e9 parameters, {groups} prompts x {r.n} responses, "
        f"{r.prompt_length} + {r.response_length} tokens",
        f"{mesh.devices} x {chip.name}: {chip.tflops:g} TFLOP/s, {chip.memory:g} GB at {chip.bandwidth:g} GB/s, links "
        f"{chip.link:g} GB/s",
        f"mesh: --config.mesh.data={mesh.data} --config.mesh.fsdp={mesh.fsdp} --config.mesh.tensor={mesh.tensor}",
        "",
        "  GB of one device",
        *(f"  {what:<22}{size / GB:>9.2f}" for what, size in held.items()),
        "",
        f"  {'phase':<16}{'seconds':>9}{'compute':>9}{'memory':>9}{'exchange':>10}{'peak GB':>9}  bound by",
    ]
    for phase, time in plan.times.items():
        figures = f"{time.total:>9.2f}{time.compute:>9.2f}{time.memory:>9.2f}{time.exchange:>10.2f}"
        lines.append(f"  {phase:<16}{figures}{plan.peaks[phase] / GB:>9.2f}  {time.bound}")
    where, peak = plan.peak
    tokens = groups * r.n * r.response_length
    lines += [
        "",
        f"  a step: {plan.seconds:.1f} s, at most {tokens / plan.seconds:,.0f} response tokens a second",
        f"  peak: {peak / GB:.1f} GB in {where}, {peak / GB / chip.memory:.0%} of a device"
        + ("" if plan.fits else f": DOES NOT FIT. {advice(plan)}"),
    ]
    if others:
        lines.append("  other meshes (data, fsdp, tensor: seconds, peak GB):")
        for p in others:
            sizes = f"{p.mesh.data}, {p.mesh.fsdp}, {p.mesh.tensor}"
            note = "" if p.fits else ", does not fit"
            lines.append(f"    {sizes}: {p.seconds:.1f}, {p.peak[1] / GB:.1f}{note}")
    return "\n".join(lines)


def advice(plan: Plan) -> str:
    """What would need less memory where a plan has its peak."""
    config, state = plan.job.config, sum(costs.state_bytes(plan.job, plan.mesh).values())
    if state > ROOM * plan.chip.memory * GB:
        return "More chips (the state alone is too large), model.param_dtype=bfloat16, or model.lora_rank"
    if plan.peak[0] in ("update_weights", "prefill", "decode"):
        return "More chips, rollout.gather_params=False, rollout.parts, or shorter lengths"
    first = [] if config.model.remat == "full" else ["model.remat=full"]
    return f"{', '.join([*first, 'a smaller actor.micro_batch_size'])}, or more chips"


COLUMNS = (
    "model", "chips", "mesh d, f, t", "state GB", "peak GB (phase)", "rollout s", "scoring s", "updates s", "step s",
    "largest part",
)  # fmt: skip


def row(name: str, plan: Plan) -> list[str]:
    """One line of `COLUMNS`."""

    def seconds(*starts: str) -> float:
        return sum(time.total for phase, time in plan.times.items() if phase.startswith(starts))

    where, peak = plan.peak
    slowest = max(plan.times, key=lambda phase: plan.times[phase].total)
    mesh = f"{plan.mesh.data}, {plan.mesh.fsdp}, {plan.mesh.tensor}"
    head = [name, f"{plan.mesh.devices} {plan.chip.name}", mesh]
    state = sum(costs.state_bytes(plan.job, plan.mesh).values()) / GB
    if not plan.fits:
        return [*head, f"{state:.1f}", f"{peak / GB:.0f} ({where}): does not fit", "", "", "", "", ""]
    times = [
        seconds("update_weights", "prefill", "decode"),
        seconds("old", "ref", "values"),
        seconds("update_actor", "update_critic"),
        plan.seconds,
    ]
    largest = f"{slowest}, {plan.times[slowest].bound}"
    return [*head, f"{state:.1f}", f"{peak / GB:.1f} ({where})", *(f"{time:.1f}" for time in times), largest]


def as_json(name: str, plan: Plan) -> str:
    """A plan as one line of JSON: bytes, FLOPs and seconds."""
    each = {
        phase: {
            **dataclasses.asdict(plan.times[phase]),
            "seconds": plan.times[phase].total,
            "bound": plan.times[phase].bound,
            "flops": work.flops,
            "traffic_bytes": work.traffic,
            "peak_bytes": plan.peaks[phase],
            "exchanges": [dataclasses.asdict(x) for x in work.exchanges],
        }
        for phase, work in plan.works.items()
    }
    found = {
        "model": name,
        "parameters": parameters(plan.job),
        "chip": dataclasses.asdict(plan.chip),
        "mesh": dataclasses.asdict(plan.mesh),
        "state_bytes": costs.state_bytes(plan.job, plan.mesh),
        "view_bytes": costs.view_bytes(plan.job, plan.mesh),
        "cache_bytes": sum(costs.cache_bytes(plan.job, plan.mesh)),
        "fits": plan.fits,
        "seconds": plan.seconds,
        "phases": each,
    }
    return json.dumps(found)


# The command


def find_shape(text: str, config: Config) -> tuple[str, TransformerConfig]:
    """The name and shape of a model of MODELS, of a folder or of a config.json; "" is the config's.

    Raises:
      UserError: no such model.
    """
    if text in MODELS:
        return text, transformer_config(MODELS[text])
    path = Path(text).expanduser()
    if text and path.name != "config.json" and not path.is_dir():
        raise UserError(f"--model {text}: expected a folder, a config.json or a size; {nearest(text, MODELS)}")
    with naming("--model" if text else "config.model.path (or give --model)"):
        folder = path.parent if path.name == "config.json" else hf.find_folder(text or config.model.path)
        return text or config.model.path, hf.read_shape(folder)


def make_args() -> argparse.ArgumentParser:
    parser = make_parser("plan", "Memory and time of a step on accelerators, on paper.", workdir=False)
    parser.add_argument("--model", default="", help=f"{', '.join(MODELS)}, a folder or config.json (default: config's)")
    parser.add_argument("--device", default="v5e", help="of chips.py, or TFLOP/s,GB,GB/s,link GB/s[,pod,network GB/s]")
    parser.add_argument("--chips", default="8", help="how many, or several numbers: 8,32")
    parser.add_argument("--flops", type=float, default=Shares.flops, help="share of the peak that is reached")
    parser.add_argument("--bandwidth", type=float, default=Shares.bandwidth, help="likewise of the memory's bandwidth")
    parser.add_argument("--link", type=float, default=Shares.link, help="likewise of the links'")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each plan")
    return parser


def whole_numbers(text: str) -> list[int]:
    """
    Raises:
      UserError: not whole numbers of at least 1.
    """
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise UserError(f"--chips {text}: expected a whole number of at least 1, or several, as in 8,32")
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""

    def body() -> None:
        config, args = parse_args(make_args(), sys.argv[1:] if argv is None else argv)
        shares = Shares(args.flops, args.bandwidth, args.link)
        for flag, share in dataclasses.asdict(shares).items():
            if not 0 < share <= 1:
                raise UserError(f"--{flag} {share:g}: expected a share above 0 and at most 1")
        numeric = args.device[:1].isdigit()
        chips = [find_chip(name) for name in ([args.device] if numeric else args.device.split(","))]
        counts, shapes = whole_numbers(args.chips), [find_shape(text, config) for text in args.model.split(",")]
        found: list[tuple[str, list[Plan]]] = []
        for name, shape in shapes:
            job = Job.of(config, shape)
            found += [(name, search(job, chip, count, shares)) for chip in chips for count in counts]
        if args.json:
            put("\n".join(as_json(name, plans[0]) for name, plans in found))
        elif len(found) == 1:
            name, plans = found[0]
            put(table(plans[0], plans[1:4], name))
        else:
            rows: list[Any] = [COLUMNS, ["---"] * len(COLUMNS), *(row(name, plans[0]) for name, plans in found)]
            put("\n".join(f"| {' | '.join(cells)} |" for cells in rows))

    return exit_code(body)


if __name__ == "__main__":
    leave(main())
