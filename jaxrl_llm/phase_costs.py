"""The work of each phase on one device, on paper: FLOPs, traffic with its memory, and what it exchanges with others.
Letters as in costs.py."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrl_llm.config import chosen_estimator, need_reference
from jaxrl_llm.costs import (
    Job,
    Lines,
    Mesh,
    activation_bytes,
    cache_bytes,
    expert_bytes,
    expert_flops,
    expert_rows,
    forward_flops,
    head_flops,
    held_bytes,
    layer_bytes,
    logits_chunk,
    passing_bytes,
    recomputed_flops,
    router_bytes,
    state_bytes,
    stream_parts,
    table_bytes,
    view_bytes,
)
from jaxrl_llm.hlo import wire_bytes
from jaxrl_llm.steps.phases import need_old_log_probs
from jaxrl_llm.steps.sampling import BLOCK


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One kind of collective of a phase."""

    kind: str  # as in hlo.KINDS
    axes: str  # "fsdp", or "data+fsdp"
    bytes: float  # of the whole array, once
    times: int  # a phase; of decoding, a token
    what: str
    per_token: bool = False

    def wire(self, mesh: Mesh) -> float:
        """Bytes that a device sends, once; see `hlo.wire_bytes`."""
        return wire_bytes(self.kind, self.bytes, mesh.along(self.axes))


@dataclasses.dataclass(frozen=True)
class Work:
    """A phase's work on one device."""

    flops: float  # of matrix products
    traffic: float  # bytes to and from the device's memory
    exchanges: tuple[Exchange, ...] = ()
    temp: float = 0.0  # bytes beside the state


def phases(job: Job, mesh: Mesh) -> dict[str, Work]:
    """Phase -> its work on one device; `gen` as `prefill` and `decode`, which samples R tokens of every row."""
    config = job.config
    estimator, _ = chosen_estimator(config)
    score = Lines.of(job, job.rows(mesh), config.trainer.score_micro_batch_size)
    found = {"update_weights": update_weights(job, mesh), "prefill": prefill(job, mesh), "decode": decode(job, mesh)}
    if need_old_log_probs(config, estimator) and not config.algorithm.rollout_correction.bypass:
        found["old_log_prob"] = scoring(job, mesh, score, head=True)
    if need_reference(config):
        found["ref"] = scoring(job, mesh, score, head=True)
    if job.critic is not None:
        found["values"] = scoring(job, mesh, score, head=False)
        found["update_critic"] = update(job, mesh, critic=True)
    found["update_actor"] = update(job, mesh, critic=False)
    return found


def _forward_exchanges(job: Job, mesh: Mesh, tokens: int, passes: int, per_token: bool = False) -> list[Exchange]:
    """fsdp gathers each layer's kernels in every pass. tensor sums up what attention and MLP give, and the embedding
    looked up in a table cut along V: tokens · D each."""
    s, c = job.shape, job.compute_bytes
    weights, sums = layer_bytes(job, mesh, c), tokens * s.width * c
    grouped = not expert_rows(job, mesh, tokens)[0]
    experts = _expert_exchanges(job, mesh, tokens, s.num_layers * passes) if grouped else []
    if s.moe and not grouped:  # the router is cut like the experts
        logits = 4.0 * tokens * s.moe.num_experts
        experts = [Exchange("all-reduce", "tensor", logits, s.num_layers * passes, "router", per_token)]
    return [
        Exchange("all-gather", "fsdp", weights, s.num_layers * passes, "kernels", per_token),
        Exchange("all-reduce", "tensor", sums, ((2 - grouped) * s.num_layers + 1) * passes, "activations", per_token),
        *experts,
    ]


def _expert_exchanges(job: Job, mesh: Mesh, tokens: int, times: int) -> list[Exchange]:
    """Where blocks of tokens are spread over all devices: every device has all tokens, their router's logits and the
    experts they chose (two arrays of ids, a count of each expert), and all experts; what they give is summed up."""
    moe = job.shape.moe
    assert moe is not None
    c, everywhere = job.compute_bytes, tokens * mesh.shards
    pairs = everywhere * moe.per_token
    gathered = everywhere * (c * job.shape.width + c * moe.num_experts) + 8 * pairs
    whole = expert_bytes(job, Mesh(), c)
    return [
        Exchange("all-gather", "data+fsdp", gathered, times, "tokens of all"),
        Exchange("all-gather", "tensor", whole, times, "experts"),
        Exchange("all-reduce", "data+fsdp", 4 * (pairs + moe.num_experts), times, "loads of experts"),
        Exchange("all-reduce", "data+fsdp+tensor", c * pairs * job.shape.width, times, "what experts give"),
    ]


def _expert_backward(job: Job, mesh: Mesh, tokens: int, times: int) -> list[Exchange]:
    """The gradients of what experts give, sums of those of tokens and of kernels, and all of the forward pass once more
    where `model.remat` computes it again."""
    moe = job.shape.moe
    assert moe is not None
    c, everywhere = job.compute_bytes, tokens * mesh.shards
    rows = c * everywhere * moe.per_token * job.shape.width
    again = _expert_exchanges(job, mesh, tokens, times) if job.config.model.remat != "none" else []
    summed = c * everywhere * job.shape.width + expert_bytes(job, Mesh(), c)
    return [
        *again,
        Exchange("all-gather", "data+fsdp", rows, times, "gradients of what experts give"),
        Exchange("all-reduce", "data+fsdp+tensor", summed, times, "gradients of experts"),
    ]


def _stream(job: Job, mesh: Mesh, tokens: int, times: int, what: str) -> list[Exchange]:
    """With `model.sequence_parallel` what products take is gathered, tokens · D (and what fills the last device's
    share). Their sums are `_forward_exchanges`' still: the CPU's compiler adds them up whole and takes a share, others
    scatter them, and sum and gather then send what the sum alone sends without."""
    if not job.config.model.sequence_parallel:
        return []
    size = tokens * job.shape.width * job.compute_bytes
    return [Exchange("all-gather", "tensor", size, times, what)]


def _present(exchanges: list[Exchange], mesh: Mesh) -> tuple[Exchange, ...]:
    """Those that exchange something, along the axes that have several devices."""
    named = [
        dataclasses.replace(x, axes="+".join(axis for axis in x.axes.split("+") if mesh.along(axis) > 1))
        for x in exchanges
    ]
    return tuple(x for x in named if x.axes and x.times)


def update_weights(job: Job, mesh: Mesh) -> Work:
    """The sampler's view: parameters are read, cast and written; with `rollout.gather_params` fsdp gathers them all."""
    each, s, c = [], job.shape, job.compute_bytes
    if job.config.rollout.gather_params:
        tables = 1 if s.tie_embeddings else 2
        each = [
            Exchange("all-gather", "fsdp", layer_bytes(job, mesh, c), s.num_layers, "kernels"),
            Exchange("all-gather", "fsdp", table_bytes(job, mesh, c), tables, "tables"),
        ]
    return Work(0.0, held_bytes(job.whole, mesh) + view_bytes(job, mesh), _present(each, mesh))


def _sampling_exchanges(job: Job, mesh: Mesh, tokens: int, passes: int, per_token: bool = False) -> list[Exchange]:
    """As `_forward_exchanges`, but for kernels that are whole already."""
    each = _forward_exchanges(job, mesh, tokens, passes, per_token)
    return each[1:] if job.config.rollout.gather_params else each  # fsdp's gathers come first


def prefill(job: Job, mesh: Mesh) -> Work:
    """The prompts, once for their n responses, and each row's first token: `forward_flops` of G·P tokens, `head_flops`
    of B."""
    r, s = job.config.rollout, job.shape
    prompts = job.config.data.train_batch_size // mesh.shards
    tokens = prompts * r.prompt_length
    each = _sampling_exchanges(job, mesh, tokens // r.parts, r.parts)
    if not r.gather_params:
        table = table_bytes(job, mesh, job.compute_bytes)
        each.append(Exchange("all-gather", "fsdp", table, (1 if s.tie_embeddings else 2) * r.parts, "tables"))
    weights = held_bytes(job.whole, mesh, job.compute_bytes, gathered=True)
    traffic = r.parts * weights + 10.0 * tokens * s.width * job.compute_bytes * s.num_layers
    flops = forward_flops(job, mesh, tokens, tokens * r.prompt_length) + head_flops(job, mesh, job.rows(mesh))
    each += _draw(job, mesh, r.parts)
    lines = Lines(prompts // r.parts, tokens // r.parts, tokens // r.parts * r.prompt_length, r.parts)
    temp = 2 * cache_bytes(job, mesh)[0] + passing_bytes(job, mesh, lines, head=False, parts=1)
    return Work(flops, traffic, _present(each, mesh), temp)


def decode(job: Job, mesh: Mesh) -> Work:
    """R − 1 tokens of each row after its first, R the longest response's number: every one reads all weights and the
    whole cache, and computes attention over its P + R slots. What `rollout.cascade` saves of that depends on the
    responses, and is not counted.

    With the layers scanned (`model.scan_layers`), fsdp gathers the kernels once a token; unrolled, the compiler takes
    that out of the loop, and the whole view lies on every device, as with `rollout.gather_params`. tensor adds the
    draw: sums of blocks of the vocabulary, a block, and some numbers for each row.
    """
    r, s, c = job.config.rollout, job.shape, job.compute_bytes
    rows, steps = job.rows(mesh) // r.parts, r.response_length - 1
    pairs = rows * (r.prompt_length + r.response_length)
    flops = forward_flops(job, mesh, rows, pairs) + head_flops(job, mesh, rows)
    weights, cache = held_bytes(job.whole, mesh, c, gathered=True), sum(cache_bytes(job, mesh))
    each = _sampling_exchanges(job, mesh, rows, 1, per_token=True)
    if not job.config.model.scan_layers and not r.gather_params:
        once = dataclasses.replace(each[0], times=each[0].times * r.parts, per_token=False)
        each[0] = once
    each += _draw(job, mesh, 1, per_token=True)
    count = steps * r.parts
    gathered = table_bytes(job, mesh, c) if s.tie_embeddings else 0  # the head, turned around
    if mesh.fsdp > 1 and not r.gather_params:
        tables = (2 if s.tie_embeddings else 3) * table_bytes(job, mesh, c)
        gathered = tables + layer_bytes(job, mesh, c) * (2 if job.config.model.scan_layers else s.num_layers)
    # The cache, a layer of it apart, that layer's scores, and the logits.
    temp = cache * (1 + 1 / s.num_layers) + gathered + 12.0 * rows * s.vocab_size / mesh.tensor
    temp += 8.0 * pairs * s.num_heads / mesh.tensor
    return Work(count * flops, count * (weights + cache), _present(each, mesh), temp)


def _draw(job: Job, mesh: Mesh, times: int, per_token: bool = False) -> list[Exchange]:
    """Of a token of each row: the sums of blocks of the vocabulary, a block, and some numbers."""
    rows, blocks = job.rows(mesh) // job.config.rollout.parts, -(-job.shape.vocab_size // BLOCK)
    return [
        Exchange("all-gather", "tensor", 4 * rows * blocks, times, "block sums", per_token),
        Exchange("all-reduce", "tensor", 4 * rows * (BLOCK + 6), times, "draw", per_token),
    ]


def scoring(job: Job, mesh: Mesh, lines: Lines, head: bool) -> Work:
    """A pass without gradients: `forward_flops`, and `head_flops` of R tokens a row."""
    s, c, width = job.shape, job.compute_bytes, job.config.rollout.response_length
    chunks, at_once = logits_chunk(job, mesh, lines)
    flops = forward_flops(job, mesh, lines.tokens, lines.pairs) + head * head_flops(job, mesh, at_once * chunks)
    each = _forward_exchanges(job, mesh, lines.tokens, lines.passes)
    each += _stream(job, mesh, lines.tokens, (2 * s.num_layers + 1) * lines.passes, "residual stream")
    tables = 1 + (head and not (s.tie_embeddings and chunks == 1))
    each.append(Exchange("all-gather", "fsdp", table_bytes(job, mesh, c), tables, "tables"))
    if head:
        each.append(_numbers(lines, width))
    weights = held_bytes(job.whole, mesh, c, gathered=True)
    temp = passing_bytes(job, mesh, lines, head=head, parts=stream_parts(job, mesh))
    traffic = lines.passes * (weights + 20.0 * lines.tokens * s.width * c * s.num_layers)
    return Work(lines.passes * flops, traffic, _present(each, mesh), temp)


def _numbers(lines: Lines, width: int, count: int = 3) -> Exchange:
    """Of each response token the largest logit, the sum and the label's, of distributions cut along V."""
    return Exchange("all-reduce", "tensor", 4 * lines.rows * width, count * lines.passes, "log-probs")


def update(job: Job, mesh: Mesh, critic: bool) -> Work:
    """All of a step's updates of a role: three forward passes' FLOPs and what is recomputed, the head four times where
    there are several chunks of logits (each is computed again in the backward pass), and the optimizer's reading and
    writing.

    fsdp: kernels are gathered in the forward and in the backward pass, the head in every chunk of logits of the latter.
    Gradients are reduced in every micro-batch, the head's in every chunk: first over fsdp (an all-reduce on a CPU;
    compilers for accelerators may make it a reduce-scatter of half the traffic), then a part of each over data; those
    of looked-up rows over both, whole. tensor: five sums a layer of the backward pass (q, k, v; gate, up), one more for
    what `full` recomputes.
    """
    config, s, c = job.config, job.shape, job.compute_bytes
    role = config.critic if critic else config.actor
    width, layers = config.rollout.response_length, s.num_layers
    lines = Lines.of(
        job,
        role.mini_batch_size * config.rollout.n // mesh.shards,
        role.micro_batch_size,
        role.epochs * (config.data.train_batch_size // role.mini_batch_size),
    )
    updates = role.epochs * (config.data.train_batch_size // role.mini_batch_size)
    chunks, at_once = logits_chunk(job, mesh, lines)
    experts = expert_flops(job, mesh, lines.tokens)
    flops = 3 * forward_flops(job, mesh, lines.tokens, lines.pairs) + recomputed_flops(job, mesh, lines)
    flops += layers * (experts.backward - 2 * experts.forward)
    if config.model.remat != "none":  # one of the router's two products on the way back is then cut over tensor
        flops -= layers * 2 * lines.tokens * router_bytes(job, 1) * (1 - 1 / mesh.tensor)
    flops += 0 if critic else (3 + (chunks > 1)) * head_flops(job, mesh, at_once * chunks)
    trained, whole = (job.critic, job.critic_whole) if critic else (job.trained, job.whole)
    frozen = trained is not whole
    each = _forward_exchanges(job, mesh, lines.tokens, lines.passes)
    kernels, table = layer_bytes(job, mesh, c), table_bytes(job, mesh, c)
    passes, again = lines.passes, job.config.model.remat == "full"
    grouped = not expert_rows(job, mesh, lines.tokens)[0]
    sums = 5 + again - (2 + again) * grouped  # the experts' own are summed up otherwise
    backward = Exchange("all-reduce", "tensor", lines.tokens * s.width * c, sums * layers * passes, "gradients")
    if grouped:
        each += _expert_backward(job, mesh, lines.tokens, layers * passes)
    each += [Exchange("all-gather", "fsdp", kernels, layers * passes, "kernels, backward"), backward]
    each += _stream(job, mesh, lines.tokens, (2 * layers + 1) * passes, "residual stream")
    each += _stream(job, mesh, lines.tokens, (2 * layers + 1) * passes, "its gradient")
    if config.model.remat != "none":
        each += _stream(job, mesh, lines.tokens, 2 * layers * passes, "residual stream, recomputed")
    each.append(Exchange("all-gather", "fsdp", table, updates, "table"))
    if not frozen:
        cut = kernels - (expert_bytes(job, mesh, c) + router_bytes(job, c) if grouped else 0)
        each += [
            Exchange("all-reduce", "fsdp", cut, layers * passes, "gradients of kernels"),
            Exchange("all-reduce", "data", cut / mesh.fsdp, layers * passes, "gradients of kernels"),
            Exchange("all-reduce", "data+fsdp", table_bytes(job, mesh, jnp.dtype(config.model.param_dtype).itemsize),
                     passes, "gradient of looked-up rows"),
        ]  # fmt: skip
    # The mini-batch's prompts are picked from all shards: its evidence, ids, masks and numbers, on every device.
    evidence = role.mini_batch_size * (5 * config.rollout.prompt_length + 18 * config.rollout.n * width)
    each.append(Exchange("all-reduce", "data+fsdp", evidence, updates, "evidence"))
    if not critic:
        if mesh.fsdp > 1 and at_once * mesh.fsdp < s.width:
            # Few tokens: their logits' gradients are then gathered instead of the table, and hidden states cut anew.
            gathered = 4.0 * at_once * mesh.fsdp * s.vocab_size / mesh.tensor
            each.append(Exchange("all-gather", "fsdp", gathered, chunks * passes, "gradients of a chunk's logits"))
            each.append(Exchange("all-to-all", "fsdp", lines.rows * (width - 1) * s.width * c, passes, "hidden states"))
        head = 0 if s.tie_embeddings and chunks == 1 else updates
        each += [
            Exchange("all-gather", "fsdp", table, head + chunks * passes, "head"),
            Exchange("all-reduce", "tensor", 4 * lines.rows * width * s.width, passes, "gradient of hidden states"),
            _numbers(lines, width, 6),
        ]
        if not frozen:
            each += [
                Exchange("all-reduce", "fsdp", table, chunks * passes, "gradient of the head"),
                Exchange("all-reduce", "data", table / mesh.fsdp, chunks * passes, "gradient of the head"),
            ]
    weights = held_bytes(whole, mesh, c, gathered=True)
    traffic = passes * (3.0 * weights + 60.0 * lines.tokens * s.width * c * layers)
    optimizer = held_bytes(trained, mesh)
    traffic += updates * 8.0 * optimizer  # parameters, two moments in and out; gradients out and in
    # Gradients, and while they are summed up over micro-batches in float32 those of the newest one. The optimizer then
    # holds three times the gradients.
    many = passes > updates
    gradients = held_bytes(trained, mesh, 4 if many else 0) + (optimizer if many else 0)
    temp = max(gradients + activation_bytes(job, mesh, lines), 3.0 * optimizer)
    return Work(passes * flops, traffic, _present(each, mesh), temp)


def peak_bytes(job: Job, mesh: Mesh) -> dict[str, float]:
    """Phase -> the bytes that a device holds in it: the state, the sampler's view while sampling, and the phase's
    own."""
    state, view = sum(state_bytes(job, mesh).values()), view_bytes(job, mesh)
    beside = {"update_weights": view, "prefill": view, "decode": view}
    return {name: state + beside.get(name, 0) + work.temp for name, work in phases(job, mesh).items()}
