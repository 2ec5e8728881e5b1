"""What is compared: the programs, and the rows of the table that come of what they print."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Program:
    """A command that prints JSON lines. Repeated calls within a process cost less than another process, so small work
    is timed several times in each."""

    where: str  # "ours", or an environment of `ENVIRONMENTS`
    module: str
    options: str
    calls: int = 3  # that are timed in a process

    def command(self, python: str, model: Path) -> list[str]:
        given = self.options.format(model=model).split()
        return [python, "-W", "ignore", "-m", self.module, *given, "--repeats", str(self.calls)]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that a program prints."""

    program: Program
    key: str = "seconds"
    part: str = ""  # of the line whose "part" this is; "": of the only one


@dataclasses.dataclass(frozen=True)
class Row:
    """A quotient of two figures, or a single one, and what is wanted of it."""

    name: str
    work: str
    beside: str
    wanted: float
    top: Figure  # of the peer; of a single figure ours
    bottom: Figure | None = None
    at_most: bool = False

    @property
    def programs(self) -> list[Program]:
        return [figure.program for figure in (self.top, self.bottom) if figure]

    def fine(self, value: float) -> bool:
        return value <= self.wanted if self.at_most else value >= self.wanted


TUNIX = "google-tunix==0.1.7"
TORCH = "torch==2.13.0 trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 jinja2 safetensors"
ENVIRONMENTS = {"tunix": TUNIX.split(), "torch": TORCH.split()}

SAMPLES = {
    "sample": ("5M Llama: 16 prompts of 32, 64 new tokens, T = 1", "--prompts 16", 1.5),
    "top-p": ("the same with top-p 0.95", "--prompts 16 --top-p 0.95", 4.5),
    "room": (
        "the same with room for 1,024 tokens, 64 used",
        "--prompts 16 --response-length 992 --lengths fixed:64",
        4.0,
    ),
    "shared": ("8 prompts of 256 x 8 responses of 64", "--prompts 8 --n 8 --prompt-length 256", 3.0),
    "ragged": (
        "64 responses of ragged length: log-normal, mean 64, limit 256",
        "--prompts 64 --response-length 256 --lengths lognormal:64",
        2.0,
    ),
}
UPDATES = {
    "update": ("update, dense 16 x 96", "--prompts 16", 1.25),
    "update-ragged": (
        "update, ragged as above, 8 x 8, prompts of 128",
        "--prompts 8 --n 8 --prompt-length 128 --response-length 256 --lengths lognormal:64",
        2.5,
    ),
}

# What of ours does less work where there is less to do, and the peer has nothing like it.
OURS = {"update-ragged": " --packed yes"}


def _beside_tunix() -> list[Row]:
    found = []
    for kind, module, rows in (("sample", "rollout", SAMPLES), ("update", "update", UPDATES)):
        beside = "tunix's sampler" if kind == "sample" else "tunix's GRPO step"
        for name, (work, options, wanted) in rows.items():
            peer = Program("tunix", "benchmarks.peers.on_tunix", f"--work {kind} {options}")
            ours = Program("ours", f"benchmarks.{module}", f"--json {options}{OURS.get(name, '')}")
            found.append(Row(name, work, beside, wanted, Figure(peer), Figure(ours)))
    return found


def _smollm2() -> list[Row]:
    shape = "--model {model} --prompt-length 40 --response-length 32 --micro-batch 16"
    grouped = f"{shape} --prompts 8 --n 8"
    transformers, trl = (
        Program("torch", "benchmarks.peers.on_torch", f"--peer {peer} {grouped}", calls=1)
        for peer in ("transformers", "trl")
    )
    step = Program("ours", "benchmarks.step", f"--json {grouped}", calls=1)
    dense, shared = (
        Program("ours", "benchmarks.scoring", f"--json {options} --logprob-chunk 128", calls=1)
        for options in (f"{shape} --prompts 64 --n 1", grouped)
    )
    scoring, iteration = Figure(transformers, part="scoring"), Figure(step, "iter_s")
    generation = Figure(transformers, part="generation"), Figure(step, "phases.gen")
    work = "SmolLM2-135M, 8 x 8, prompts of 40, 32 new tokens: "
    return [
        Row("smollm2-generation", f"{work}generation", "transformers' generate", 2.5, *generation),
        Row("smollm2-scoring", "the same: log-probs, dense", "transformers", 1.1, scoring, Figure(dense)),
        Row("smollm2-scoring-shared", "the same, the prompt shared", "transformers", 2.0, scoring, Figure(shared)),
        Row("smollm2-iteration", "the same: generation and update", "a loop on transformers", 1.8,
            Figure(transformers, part="iteration"), iteration),
        Row("smollm2-iteration-trl", "the same", "TRL's trainer", 2.4, Figure(trl, part="iteration"), iteration),
    ]  # fmt: skip


def _alone() -> list[Row]:
    long = "--json --preset smollm2-135m --prompts 16 --prompt-length 256 --response-length 256 --micro-batch 4"
    head = "--json --part head --preset smollm2-135m --prompts 8 --response-length 1024 --logprob-chunk 256"
    peak = Figure(Program("ours", "benchmarks.update", long, calls=1), "of_peak")
    memory = Figure(Program("ours", "benchmarks.scoring", head, calls=1), "temp_mb")
    found = [
        Row("peak", "SmolLM2-135M, dense update 16 x 512: model FLOPs", "a matrix product's peak", 0.75, peak),
        Row("head", "log-probs of 8 x 1,024 tokens from hidden states, V = 49,152, both ways: temporaries, MB",
            "logits alone: 1,611", 300, memory, at_most=True),
    ]  # fmt: skip
    for name in ("rollout", "scoring", "update"):
        once, twice = (
            Figure(Program("ours", f"benchmarks.{name}", f"--json --prompts {prompts}")) for prompts in (16, 32)
        )
        work = f"5M Llama, {name}: 32 rows"
        found.append(Row(f"twice-{name}", work, "16 rows, in seconds", 2.1, twice, once, at_most=True))
    return found


ROWS = {row.name: row for row in [*_beside_tunix(), *_smollm2(), *_alone()]}
