"""A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538; Qwen3, arXiv:2505.09388).

No token is dropped and no expert has a capacity. There is no auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import MoeConfig
from jaxrl_llm.types import Array

# So few tokens read every expert's weights anyway, and are done soonest by all experts at once (decoding).
FEW_TOKENS = 64
LARGEST_BLOCK = 128

Constrain = Callable[[Array, tuple[str | None, ...]], Array]
Activation = Callable[[Array], Array]


def moe(
    config: MoeConfig,
    activation: Activation,
    constrain: Constrain,
    experts: dict[str, Array],
    x: Array,
    router_logits: Array,
) -> Array:
    """Σ over a token's `per_token` likeliest experts e of p_e · down_e(activation(gate_e(x)) · up_e(x)).

    p = softmax(router_logits) in at least float32; if `config.normalized`, divided by its sum over the chosen experts.

    What it costs: `all_experts` computes every expert for every token, `num_experts / per_token` times what is needed.
    `grouped_experts` computes about twice what is needed at most, and hardly more than it where an expert has hundreds
    of tokens; but it copies an expert's weights for each of its blocks, two or three an expert where tokens are fewer.
    Which one is taken depends on shapes alone; both give the same but for rounding.

    Args:
      experts: gate, up [E, D, F], down [E, F, D].
      x: [B, T, D]; router_logits: [B, T, E].
      constrain: (x, logical axes) -> x; see sharding.py.

    Returns:
      [B, T, D] in x's dtype.
    """
    chex.assert_shape(router_logits, (*x.shape[:2], config.num_experts))
    probs = jax.nn.softmax(router_logits.astype(jnp.promote_types(router_logits.dtype, jnp.float32)))
    weights, chosen = jax.lax.top_k(probs, config.per_token)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights.astype(x.dtype)
    experts = {name: kernel.astype(x.dtype) for name, kernel in experts.items()}
    tokens = x.shape[0] * x.shape[1]
    blocks, size = block_shape(tokens * config.per_token, config.num_experts)
    few = tokens <= FEW_TOKENS or tokens * config.num_experts <= blocks * size
    compute = all_experts if few else grouped_experts
    return compute(activation, constrain, experts, x, weights, chosen)


def all_experts(
    activation: Activation, constrain: Constrain, experts: dict[str, Array], x: Array, weights: Array, chosen: Array
) -> Array:
    """Every expert for every token; those not chosen count 0. weights, chosen: [B, T, K]."""
    one_hot = jax.nn.one_hot(chosen, experts["gate"].shape[0], dtype=x.dtype)
    shares = jnp.einsum("btke,btk->bte", one_hot, weights)
    inner = activation(jnp.einsum("btd,edf->btef", x, experts["gate"])) * jnp.einsum("btd,edf->btef", x, experts["up"])
    inner = constrain(inner * shares[..., None], ("batch", None, "expert", None))
    return constrain(jnp.einsum("btef,efd->btd", inner, experts["down"]), ("batch", None, None))


def grouped_experts(
    activation: Activation, constrain: Constrain, experts: dict[str, Array], x: Array, weights: Array, chosen: Array
) -> Array:
    """Every chosen expert for its tokens: sorted by expert, cut into blocks of one expert each, multiplied as a batch.

    On a mesh the blocks are spread over all devices, for which the tokens and the experts' weights are gathered.
    weights, chosen: [B, T, K].
    """
    count, (batch, length, k), width = experts["gate"].shape[0], chosen.shape, x.shape[-1]
    pairs = batch * length * k  # of a token and an expert it chose, in the tokens' order
    blocks, size = block_shape(pairs, count)
    expert = chosen.reshape(pairs)
    order = jnp.argsort(expert)
    load = jnp.zeros(count, jnp.int32).at[expert].add(1)
    last_block = jnp.cumsum(-(-load // size))
    first_row = (last_block - -(-load // size)) * size
    # The pair that comes i-th lies in row rows[i]: behind its expert's first row as it lies behind its first pair.
    rows = jnp.arange(pairs) + (first_row - (jnp.cumsum(load) - load))[expert[order]]
    pair_of = (
        jnp.full(blocks * size, pairs).at[rows].set(order, unique_indices=True)
    )  # `pairs`: no pair, a row of zeros
    row_of = jnp.zeros(pairs, rows.dtype).at[order].set(rows, unique_indices=True)
    expert_of = (jnp.arange(blocks)[:, None] >= last_block[None, :]).sum(1).clip(max=count - 1)

    def per_block(kernel: Array) -> Array:
        return constrain(constrain(kernel, (None, None, None))[expert_of], ("blocks", None, None))

    gate, up, down = (per_block(experts[name]) for name in ("gate", "up", "down"))
    tokens = constrain(x.reshape(batch * length, width), (None, None))
    mine = tokens.at[pair_of // k].get(mode="fill", fill_value=0).reshape(blocks, size, width)
    mine = constrain(mine, ("blocks", None, None))
    inner = activation(jnp.einsum("nsd,ndf->nsf", mine, gate)) * jnp.einsum("nsd,ndf->nsf", mine, up)
    inner = constrain(inner, ("blocks", None, None))
    outer = constrain(jnp.einsum("nsf,nfd->nsd", inner, down), ("blocks", None, None))
    outer = outer.reshape(blocks * size, width)[row_of].reshape(batch, length, k, width)
    return constrain(jnp.einsum("btkd,btk->btd", outer, weights), ("batch", None, None))


def block_shape(pairs: int, experts: int) -> tuple[int, int]:
    """How many blocks there must be for any choice of experts, and how many rows each has.

    >>> block_shape(131_072, 128)
    (1152, 128)
    """
    size = min(2 ** max(pairs // experts, 1).bit_length() // 2, LARGEST_BLOCK)
    blocks = -(-pairs // size) + experts
    # At most an eighth more of them, so that they divide over as many devices as may be.
    unit = 2 ** max(blocks.bit_length() - 4, 0)
    return -(-blocks // unit) * unit, size
