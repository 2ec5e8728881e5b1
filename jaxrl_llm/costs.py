"""What a step costs one device, on paper: bytes held and FLOPs, as functions of the model's shape, the config and the
mesh; phase_costs.py adds what is exchanged, phase by phase. tests/test_plan.py holds both against compiled programs.

Letters: L layers, D width, V vocabulary, F the MLP's width, H heads · head size, KV likewise of keys; G prompts, n
responses each, P and R widths; t the size of the mesh axis `tensor`; c bytes of the compute dtype. Parameters are
counted from the declarations (models/declare.py), cut as sharding.py cuts them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, need_base, need_critic, need_reference
from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.models.attention import cuts
from jaxrl_llm.models.moe import FEW_TOKENS, block_shape
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sharding import RULES
from jaxrl_llm.steps.training import declare_frozen, overlay
from jaxrl_llm.types import Param


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh's axes."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Parts into which the rows are cut."""
        return self.data * self.fsdp

    @property
    def devices(self) -> int:
        return self.shards * self.tensor

    def along(self, axes: str) -> int:
        """
        >>> Mesh(data=2, fsdp=4).along("data+fsdp")
        8
        """
        return math.prod(getattr(self, axis) for axis in axes.split("+"))


@dataclasses.dataclass(frozen=True)
class Job:
    """A config and a model's shape, and what is declared of its roles."""

    config: Config
    shape: TransformerConfig
    trained: Any  # trees of Param: of the actor what is trained
    whole: Any  # all of the actor's parameters
    base: Any  # what is frozen beneath, or None
    critic: Any  # of the critic what is trained, or None
    critic_whole: Any

    @classmethod
    def of(cls, config: Config, shape: TransformerConfig) -> Job:
        """What `config` makes of a model of this shape."""
        m = config.model
        kept = jnp.dtype(m.dtype if m.lora_rank else m.param_dtype)
        actor = make_transformer(shape, param_dtype=kept)
        critic = None
        if need_critic(config):
            critic = make_transformer(shape, param_dtype=jnp.dtype(m.param_dtype), value_head=True).declare()
        whole = actor.declare()
        return cls(
            config=config,
            shape=shape,
            trained=overlay(config, whole) if m.lora_rank else whole,
            whole=whole,
            base=declare_frozen(config, actor) if need_base(config) else None,
            critic={"value_head": critic["value_head"]} if critic and config.critic.freeze_trunk else critic,
            critic_whole=critic,
        )

    @property
    def compute_bytes(self) -> int:
        return jnp.dtype(self.config.model.dtype).itemsize

    def rows(self, mesh: Mesh) -> int:
        """Rows of a whole batch on one device."""
        return self.config.data.train_batch_size * self.config.rollout.n // mesh.shards


def leaves(declaration: Any) -> list[Param]:
    return jax.tree.leaves(declaration, is_leaf=lambda x: isinstance(x, Param))


def leaf_parts(leaf: Param, mesh: Mesh, gathered: bool = False) -> int:
    """Into how many parts the mesh cuts a leaf; `gathered`: once fsdp has been undone."""
    rules = [RULES.get(axis) if axis else None for axis in leaf.axes]
    return math.prod(mesh.along(r) for r in rules if isinstance(r, str) and not (gathered and r == "fsdp"))


def held_bytes(declaration: Any, mesh: Mesh, itemsize: int = 0, gathered: bool = False) -> int:
    """Bytes of declared parameters on one device: Σ size · itemsize / parts.

    Args:
      itemsize: of an element; 0 is the leaf's own.
      gathered: as they are once fsdp has been undone.
    """
    return sum(
        math.prod(x.shape) * (itemsize or jnp.dtype(x.dtype).itemsize) // leaf_parts(x, mesh, gathered)
        for x in leaves(declaration)
    )


def layer_bytes(job: Job, mesh: Mesh, itemsize: int) -> int:
    """W: what fsdp gathers of one layer, its kernels, whole over fsdp and cut over tensor."""
    cut = [x for x in leaves(job.whole["layers"]) if "embed" in x.axes]
    return held_bytes(cut, mesh, itemsize, gathered=True) // job.shape.num_layers


def expert_bytes(job: Job, mesh: Mesh, itemsize: int) -> int:
    """Of W, what a layer's experts are; cut over tensor by expert."""
    if job.shape.moe is None:
        return 0
    return held_bytes(job.whole["layers"]["experts"], mesh, itemsize, gathered=True) // job.shape.num_layers


def router_bytes(job: Job, itemsize: int) -> int:
    """Of W, what a layer's router is, whole."""
    return job.shape.width * job.shape.moe.num_experts * itemsize if job.shape.moe else 0


def table_bytes(job: Job, mesh: Mesh, itemsize: int) -> int:
    """T = V/t · D: the embedding, or the head, whole over fsdp."""
    return job.shape.vocab_size * job.shape.width * itemsize // mesh.tensor


# Memory


def state_bytes(job: Job, mesh: Mesh) -> dict[str, int]:
    """What lies on a device from the first step to the last: parameters, two moments of each (and the optimizer's two
    counters of 4 bytes), of the critic likewise, the reference, the frozen base. (Four or six more numbers, of 4 bytes
    each, are left out.)"""
    found = {
        "actor: parameters": held_bytes(job.trained, mesh),
        "actor: moments": 2 * held_bytes(job.trained, mesh) + 8,
    }
    if job.critic is not None:
        found |= {
            "critic: parameters": held_bytes(job.critic, mesh),
            "critic: moments": 2 * held_bytes(job.critic, mesh) + 8,
        }
    apart = job.config.reference.path or job.config.reference.sync_steps or job.base is None
    if need_reference(job.config) and apart:
        found["reference"] = held_bytes(job.whole, mesh)
    if job.base is not None:
        found["frozen base"] = held_bytes(job.base, mesh)
    return found


def view_bytes(job: Job, mesh: Mesh) -> int:
    """The sampler's parameters, in the compute dtype; whole over fsdp with `rollout.gather_params`."""
    return held_bytes(job.whole, mesh, job.compute_bytes, gathered=job.config.rollout.gather_params)


def cache_bytes(job: Job, mesh: Mesh) -> tuple[int, int]:
    """(prompts, responses): 2 · L · KV heads · head size · c for each of G·P slots, once for the n responses to a
    prompt, and of G·n·R; cut over all axes (rows over data and fsdp, heads over tensor), `rollout.parts` at a time."""
    r, s = job.config.rollout, job.shape
    groups = job.config.data.train_batch_size // r.parts
    slot = 2 * s.num_layers * s.num_kv_heads * s.head_dim * job.compute_bytes
    prompts, responses = groups * r.prompt_length, groups * r.n * r.response_length
    return slot * prompts // mesh.devices, slot * responses // mesh.devices


@dataclasses.dataclass(frozen=True)
class Lines:
    """Rows of one forward pass on a device, as lines of a prompt and responses that share it."""

    rows: int
    tokens: int  # a prompt's P and R − 1 of each response: the last one predicts nothing
    pairs: int  # of queries and keys whose scores are computed, masked ones too
    passes: int  # of them a phase (micro-batches)

    @classmethod
    def of(cls, job: Job, rows: int, at_once: int, repeats: int = 1) -> Lines:
        r = job.config.rollout
        at_once = at_once or rows
        group, own = math.gcd(r.n, at_once), max(r.response_length - 1, 1)
        lines = at_once // group
        within = {length: sum((end - start) * end for start, end in cuts(length)) for length in (r.prompt_length, own)}
        pairs = lines * (within[r.prompt_length] + group * (own * r.prompt_length + within[own]))
        return cls(at_once, lines * (r.prompt_length + group * own), pairs, repeats * rows // at_once)


def stream_parts(job: Job, mesh: Mesh) -> int:
    """Into how many parts the tokens of the residual stream are cut in scoring and updates, so that D' = D / parts."""
    return mesh.tensor if job.config.model.sequence_parallel else 1


def passing_bytes(job: Job, mesh: Mesh, lines: Lines, *, head: bool, parts: int) -> float:
    """What a forward pass that nobody differentiates holds at its highest: the larger of c · tokens · D / parts and a
    layer, c · tokens · (2 D + max(H + 2 KV, 2 F) / t) and 4 + c bytes for each of heads/t · pairs beside two gathered
    layers, and of c · tokens · D and a chunk of logits, two float32 arrays of V/t a token, beside the gathered table.
    """
    s, c, t = job.shape, job.compute_bytes, mesh.tensor
    heads, kv, hidden = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, c * lines.tokens * s.width
    layer = hidden / parts + 2 * hidden + c * lines.tokens * max(heads + 2 * kv, 2 * mlp_width(s)) / t
    layer += 0.5 * sum(expert_activations(job, mesh, lines.tokens))
    layer += (4 + c) * lines.pairs * s.num_heads / t
    chunk = hidden + 8.0 * head * logits_chunk(job, mesh, lines)[1] * s.vocab_size / t
    if mesh.fsdp > 1:
        dense = layer_bytes(job, mesh, c) - expert_bytes(job, mesh, c)  # experts are counted already
        layer, chunk = layer + 2 * dense, chunk + table_bytes(job, mesh, c)
    return max(layer, chunk)


def activation_bytes(job: Job, mesh: Mesh, lines: Lines) -> float:
    """What a backward pass over `lines` holds at its highest, beside parameters and gradients.

    Kept of each layer, with A = (H + KV + F) / t: remat `none` c · tokens · (2 D' + 2.5 A) and 12 + c bytes for each of
    heads/t · pairs; `dots` c · tokens · (2 D' + D + (H + 2 KV + 2 F) / t), the products that are no attention; `full`
    c · tokens · D'. Beside that one layer on its way back, c · tokens · (4 D' + 3 A) and 12 + c bytes for each of
    heads/t · pairs, or the head's hidden states and their gradient, (4 + c) · tokens · D. And a chunk of logits, three
    float32 arrays of V/t a token; three tables (a tied head turned around, the head's gradient and a chunk's share in
    it); where fsdp gathers, two layers more. The factors are those that the CPU's compiler was measured to come to.
    """
    s, c, t = job.shape, job.compute_bytes, mesh.tensor
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    d = s.width / stream_parts(job, mesh)
    across, scores = (heads + kv + mlp_width(s)) / t, (12 + c) * lines.pairs * s.num_heads / t
    kept = {
        "none": c * lines.tokens * (2 * d + 2.5 * across) + scores,
        "dots": c * lines.tokens * (2 * d + s.width + (heads + 2 * kv + 2 * mlp_width(s)) / t),
        "full": c * lines.tokens * d,
    }[job.config.model.remat]
    layer = max(c * lines.tokens * (4 * d + 3 * across) + scores, (4 + c) * lines.tokens * s.width)
    own, gathered_experts = expert_activations(job, mesh, lines.tokens)
    layer += 1.5 * (own + gathered_experts)
    kept += own if job.config.model.remat == "none" else 0
    gathered = 2 * (layer_bytes(job, mesh, c) - expert_bytes(job, mesh, c)) if mesh.fsdp > 1 else 0
    chunk = 12 * logits_chunk(job, mesh, lines)[1] * s.vocab_size / t
    return s.num_layers * kept + layer + chunk + 3 * table_bytes(job, mesh, c) + gathered


def logits_chunk(job: Job, mesh: Mesh, lines: Lines) -> tuple[int, int]:
    """(chunks, tokens of one on a device) in which logits are computed."""
    width = job.config.rollout.response_length
    chunk = min(max(1, job.config.model.logprob_chunk * mesh.shards // (lines.rows * mesh.shards)), width)
    return -(-width // chunk), chunk * lines.rows


# FLOPs


def forward_flops(job: Job, mesh: Mesh, tokens: float, pairs: float) -> float:
    """2 · tokens · (a layer's kernels) / t + 4 · pairs · H / t, in every layer, and what its experts compute."""
    s = job.shape
    kernels = layer_bytes(job, mesh, 1) - expert_bytes(job, mesh, 1)
    if s.moe is not None and expert_rows(job, mesh, tokens)[0]:
        kernels -= router_bytes(job, 1) * (1 - 1 / mesh.tensor)  # cut like the experts then
    layer = 2 * tokens * kernels + 4 * pairs * s.num_heads * s.head_dim / mesh.tensor
    return s.num_layers * (layer + expert_flops(job, mesh, tokens).forward)


def mlp_width(shape: TransformerConfig) -> int:
    """F, but for a mixture of experts 0: `expert_activations` has them."""
    return 0 if shape.moe else shape.mlp_width


def expert_activations(job: Job, mesh: Mesh, tokens: float) -> tuple[float, float]:
    """Bytes of a layer's experts in a pass forward: c · rows · (2 D + 3 F), a copy of an expert for each block, and
    what k experts give each token of all; and c · (3 · E · D · F + all tokens · D), which is gathered."""
    if (moe := job.shape.moe) is None:
        return 0.0, 0.0
    c, d, f = job.compute_bytes, job.shape.width, moe.width
    few, rows = expert_rows(job, mesh, tokens)
    if few:
        return c * rows * 3 * f, 0.0
    everywhere = tokens * mesh.shards
    size = block_shape(int(everywhere) * moe.per_token, moe.num_experts)[1]
    own = rows * (2 * d + 3 * f) + rows / size * 3 * d * f + everywhere * moe.per_token * d
    return c * own, c * (3 * moe.num_experts * d * f + everywhere * d)


@dataclasses.dataclass(frozen=True)
class ExpertFlops:
    """Of a layer's experts on one device, in one pass forward."""

    forward: float = 0.0
    backward: float = 0.0
    last: float = 0.0  # of them those of the last product, whose result no gradient needs
    batched: float = 0.0  # and those of products that `dots` computes again


def expert_rows(job: Job, mesh: Mesh, tokens: float) -> tuple[bool, float]:
    """Whether every expert computes every token (models/moe.py: few tokens), and for how many rows an expert's three
    products are computed on one device: all tokens by the experts that lie there, or blocks of sorted tokens, which
    are spread over all devices where those divide their number.

    Args:
      tokens: of one pass, on a device.
    """
    moe, everywhere = job.shape.moe, int(tokens * mesh.shards)
    if moe is None or not everywhere:
        return True, 0.0
    blocks, size = block_shape(everywhere * moe.per_token, moe.num_experts)
    if everywhere <= FEW_TOKENS or everywhere * moe.num_experts <= blocks * size:
        return True, tokens * moe.num_experts / mesh.tensor
    return False, blocks * size / (1 if blocks % mesh.devices else mesh.devices)


def expert_flops(job: Job, mesh: Mesh, tokens: float) -> ExpertFlops:
    """6 · rows · D · F, and for each token 2 · k · E of shares (few tokens) or 2 · k · D of what k experts give."""
    if (moe := job.shape.moe) is None or not tokens:
        return ExpertFlops()
    few, rows = expert_rows(job, mesh, tokens)
    product = 2 * rows * job.shape.width * moe.width
    shares = 2 * tokens * moe.per_token * (moe.num_experts / mesh.tensor if few else job.shape.width)
    if few:
        return ExpertFlops(3 * product + shares, 6 * product + shares, product, shares)
    return ExpertFlops(3 * product + shares, 6 * product + shares, shares, 3 * product)


def head_flops(job: Job, mesh: Mesh, tokens: float) -> float:
    """2 · tokens · D · V / t: one product with the head."""
    return 2.0 * tokens * table_bytes(job, mesh, 1)


def recomputed_flops(job: Job, mesh: Mesh, lines: Lines) -> float:
    """Of the backward pass, by `model.remat`: `full` the forward pass but the last product of each layer, whose result
    no gradient needs; `dots` the attention."""
    s, experts = job.shape, expert_flops(job, mesh, lines.tokens)
    if s.moe is not None:
        found = {
            "none": 0.0,
            "dots": forward_flops(job, mesh, 0, lines.pairs) + s.num_layers * experts.batched,
            "full": forward_flops(job, mesh, lines.tokens, lines.pairs) - s.num_layers * experts.last,
        }
        return found[job.config.model.remat]
    if job.config.model.remat == "full":
        last = 2 * lines.tokens * s.num_layers * s.mlp_width * s.width / mesh.tensor
        return forward_flops(job, mesh, lines.tokens, lines.pairs) - last
    return forward_flops(job, mesh, 0, lines.pairs) if job.config.model.remat == "dots" else 0.0
