"""What a step has computed, from the lengths of its rows: FLOPs, tokens, and the slots of padding beside them.

FLOPs are the model's: what its matrix products need for the real tokens, not what padding or recomputing adds. A prompt
is counted once for its responses, as it is computed, and a response's last token, which predicts nothing, not at all;
of attention the pairs of a query and a key that it may see. Everything is worked out on the host from counts that it
has anyway: no phase waits for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.config import Config, need_critic
from jaxrl_llm.costs import Job, Mesh, expert_bytes, forward_flops, head_flops, layer_bytes, leaves
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.models import hf
from jaxrl_llm.steps.packing import needed_width
from jaxrl_llm.steps.rollout import Cascade
from jaxrl_llm.steps.training import widths

ONE = Mesh()
# Phase -> what follows perf/mfu/ in the name of its utilisation: verl's names, and the phase's own where it has none.
UTILISATION = {
    "update_actor": "actor",
    "update_critic": "critic",
    "old_log_prob": "actor_infer",
    "values": "critic_infer",
    "ref": "ref",
    "gen": "gen",
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """Of one phase in one step."""

    flops: float
    tokens: int  # real ones that went through the model
    slots: int  # tokens that were computed, padding included; 0 where it is not known


@dataclasses.dataclass(frozen=True)
class Accounts:
    """What the phases of a run's steps compute."""

    config: Config
    actor: Job
    critic: Job | None
    cascade: Cascade  # in which shapes is sampled
    scores: bool = False  # whether the actor is a reward model, which reads responses to their ends and has no logits

    @classmethod
    def of(cls, config: Config, folder: Path, cascade: Cascade, *, scores: bool = False) -> Accounts:
        """
        Args:
          folder: of the actor.
          cascade: in which shapes the run's rollouts decode.
          scores: whether it is a reward model, to be trained.
        """
        shape = hf.read_shape(folder)
        own = hf.read_shape(hf.find_folder(config.critic.path)) if config.critic.path else shape
        critic = Job.of(config, own) if need_critic(config) else None
        return cls(config, Job.of(config, shape), critic, cascade, scores)

    def count(self, lengths: Lengths, generated: Sequence[Lengths] = ()) -> dict[str, Counted]:
        """Phase -> what it computes of a step's batch, if it runs at all.

        Args:
          lengths: of the batch that is scored and learned from.
          generated: of each batch that was sampled in the step; several where prompts were replaced, the next step's
            where responses are sampled a step ahead.
        """
        actor, critic, config = self.actor, self.critic, self.config
        passed = _tokens(lengths, self.scores)
        micro = config.trainer.score_micro_batch_size
        slots = self._slots(lengths, micro)
        reference = _forward(actor, lengths) + _head(actor, lengths)
        scored = {"old_log_prob": reference + _overlay(actor, lengths), "ref": reference}
        if critic:
            scored["values"] = _forward(critic, lengths)
        found = {phase: Counted(flops, passed, slots) for phase, flops in scored.items()}
        for phase, job, role in (("update_actor", actor, config.actor), ("update_critic", critic, config.critic)):
            if job is None:
                continue
            of_critic = phase == "update_critic"
            head = not (of_critic or self.scores)
            flops = role.epochs * _update(job, lengths, head=head, critic=of_critic, whole=self.scores)
            slots = role.epochs * self._slots(lengths, role.micro_batch_size)
            found[phase] = Counted(flops, role.epochs * passed, slots)
        if generated:
            flops = sum(_forward(actor, x) + _head(actor, x) for x in generated)
            found["gen"] = Counted(flops, sum(map(_tokens, generated)), sum(map(self._sampled_slots, generated)))
        return found

    def _slots(self, lengths: Lengths, micro: int) -> int:
        """Lines of a prompt and the responses that share it, packed if so configured; micro-batches that part a group
        compute it again."""
        r, rows = self.config.rollout, len(lengths.response)
        group = math.gcd(lengths.n, micro or lengths.n)
        width = group * (r.response_length if self.scores else max(r.response_length - 1, 1))
        needed = needed_width(lengths.response, group)
        width = next((packed for packed in widths(self.config, group) if needed <= packed), width)
        return rows // group * (r.prompt_length + width)

    def _sampled_slots(self, lengths: Lengths) -> int:
        """The prompts' slots, and of each part what `decoded_slots` says. Of a conversation's turns it is not known how
        long each was."""
        r = self.config.rollout
        if r.multi_turn.environment:
            return 0
        parts = np.split(lengths.response, r.parts)
        decoded = sum(decoded_slots(part, self.cascade, r.response_length) for part in parts)
        return len(lengths.prompt) * r.prompt_length + decoded


def decoded_slots(response: np.ndarray, cascade: Cascade, width: int) -> int:
    """Rows that are computed, token by token, as `decode` goes through a cascade's shapes.

    Args:
      response: int [B], the lengths that the rows come to.
      width: R

    >>> three = np.array([4, 3, 1, 1])
    >>> [decoded_slots(three, Cascade(width=0, halvings=halvings, min_rows=1), 8) for halvings in (0, 1, 2)]
    [12, 6, 5]
    """
    # Of the shard where most rows go on behind token t.
    going = [int((response.reshape(cascade.shards, -1) > t + 1).sum(1).max()) for t in range(width + 1)]
    sizes, t, slots = [*cascade.sizes(len(response)), 0], 0, 0
    for room in cascade.widths(width):
        for size, half in itertools.pairwise(sizes):
            while t < room and going[t] > half // cascade.shards:
                t, slots = t + 1, slots + size
    return slots


def accounting_metrics(
    counted: Mapping[str, Counted], timing: Mapping[str, float], *, seconds: float, peak: float | None, n_devices: int
) -> dict[str, float]:
    """`perf/real_token_ratio/PHASE`: real tokens over those computed. `perf/model_tflops/PHASE`: 10^12 FLOPs of all
    devices. `perf/mfu/…`: those of a second over what all devices could do. Of the step, MaxText's
    `perf/per_device_tflops` and `perf/per_device_tflops_per_sec`.

    Args:
      counted: of `Accounts.count`; phases that are not in `timing` have not run.
      timing: seconds by phase.
      seconds: of the step, without evaluation and checkpoints.
      peak: FLOP/s of one device; None: not known.

    >>> counted = {"update_actor": Counted(flops=4e12, tokens=50, slots=200)}
    >>> found = accounting_metrics(counted, {"update_actor": 2.0}, seconds=4.0, peak=8e12, n_devices=1)
    >>> found["perf/real_token_ratio/update_actor"], found["perf/mfu/actor"], found["perf/per_device_tflops_per_sec"]
    (0.25, 0.25, 1.0)
    """
    metrics, total = {}, 0.0
    for phase, of in counted.items():
        if not timing.get(phase):
            continue
        if of.slots:
            metrics[f"perf/real_token_ratio/{phase}"] = of.tokens / of.slots
        total += of.flops
        metrics[f"perf/model_tflops/{phase}"] = of.flops / 1e12
        if peak:
            metrics[f"perf/mfu/{UTILISATION[phase]}"] = of.flops / timing[phase] / (peak * n_devices)
    if total:
        metrics["perf/per_device_tflops"] = total / 1e12 / n_devices
        if seconds > 0:
            metrics["perf/per_device_tflops_per_sec"] = total / 1e12 / n_devices / seconds
    return metrics


def _inputs(lengths: Lengths, whole: bool) -> np.ndarray:
    """Tokens of each response that are read."""
    return lengths.response if whole else np.maximum(lengths.response - 1, 0)


def _tokens(lengths: Lengths, whole: bool = False) -> int:
    return int(lengths.prompt.sum() + _inputs(lengths, whole).sum())


def _pairs(lengths: Lengths, window: int, whole: bool) -> int:
    """Queries and the keys that each may see, itself included; `window`: how many at most, 0: all."""

    def upto(position: np.ndarray) -> np.ndarray:
        full = np.minimum(position, window) if window else position
        return full * (full + 1) // 2 + (position - full) * window

    start = np.repeat(lengths.prompt, lengths.n)
    return int(upto(lengths.prompt).sum() + (upto(start + _inputs(lengths, whole)) - upto(start)).sum())


def _attention(job: Job, lengths: Lengths, whole: bool = False) -> float:
    """Of all layers, each with its own window: 4 · pairs · H."""
    windows = job.shape.windows or (0,) * job.shape.num_layers
    pairs = sum(windows.count(window) * _pairs(lengths, window, whole) for window in set(windows))
    return forward_flops(job, ONE, 0, pairs / job.shape.num_layers)


def _products(job: Job, lengths: Lengths, whole: bool = False) -> float:
    """Of a token's kernels, of experts those that it goes to."""
    s, kernels = job.shape, layer_bytes(job, ONE, 1) - expert_bytes(job, ONE, 1)
    if s.moe:
        kernels += s.moe.per_token * 3 * s.width * s.moe.width
    return 2.0 * _tokens(lengths, whole) * s.num_layers * kernels


def _forward(job: Job, lengths: Lengths, whole: bool = False) -> float:
    return _products(job, lengths, whole) + _attention(job, lengths, whole)


def _overlay(job: Job, lengths: Lengths, whole: bool = False) -> float:
    """What LoRA adds to the kernels' products: 2 · tokens · its parameters."""
    if not job.config.model.lora_rank:
        return 0.0
    return 2.0 * _tokens(lengths, whole) * sum(math.prod(x.shape) for x in leaves(job.trained["layers"]))


def _head(job: Job, lengths: Lengths) -> float:
    """Logits of the sampled tokens alone."""
    return head_flops(job, ONE, int(lengths.sampled.sum()))


def _update(job: Job, lengths: Lengths, *, head: bool, critic: bool, whole: bool) -> float:
    """A forward and a backward pass, which is twice the forward's: the gradient of each product's inputs and that of
    its parameters. Frozen parameters have no such gradient, and where nothing beneath the head is trained there is no
    backward pass."""
    logits = _head(job, lengths) if head else 0.0
    if critic:
        trunk = job.critic is job.critic_whole
        return (3 if trunk else 1) * _forward(job, lengths, whole)
    frozen = 2 if job.config.model.lora_rank else 3
    others = _attention(job, lengths, whole) + _overlay(job, lengths, whole)
    return frozen * (_products(job, lengths, whole) + logits) + 3 * others
