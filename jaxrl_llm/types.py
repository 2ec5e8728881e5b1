"""The containers that flow through a step. Shapes are stated here and only here.

Letters: G prompts, n responses each, B = G·n rows (row = prompt · n + sample), P prompt width (left-padded),
R response width, L layers, KV key/value heads, H head size, D model width, V vocabulary, K reward functions.

Every per-token quantity of a response lives in one frame, ``[B, R]``: index t belongs to response token t. Masks say
where things are; token values never do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = jax.Array
Params = Any  # nested dicts of arrays, the layers stacked on a leading axis

FINISH_LENGTH, FINISH_STOP = 2, 1

# Which phase writes which evidence (DESIGN 2). `Batch.write` and `Batch.require` read this table and nothing else does.
WRITTEN_BY: dict[str, str] = {
    **dict.fromkeys(("prompts", "prompt_mask", "prompt_valid", "record_arrays"), "data"),
    **dict.fromkeys(
        ("uid", "responses", "response_mask", "response_length", "rollout_log_probs", "finish_reason"), "gen"
    ),
    **dict.fromkeys(("scores", "scores_mask", "row_valid", "token_level_scores", "reward_baselines"), "reward"),
    **dict.fromkeys(("old_log_probs", "entropys", "sum_pi_squared"), "old_log_prob"),
    "ref_log_prob": "ref",
    "values": "values",
    **dict.fromkeys(("token_level_rewards", "rollout_is_weights", "loss_mask", "advantages", "returns"), "adv"),
}
PER_PROMPT = frozenset({"prompts", "prompt_mask", "prompt_valid", "record_arrays"})


class MissingEvidence(ValueError):
    """A phase asked for evidence that no phase has written yet."""


class EvidenceExists(ValueError):
    """A phase tried to write evidence a second time, or evidence that another phase owns."""


class Prompts(struct.PyTreeNode):
    """What the data phase hands to the rollout. The records themselves stay on the host, joined by uid."""

    prompts: Array  # int32 [G, P], left-padded
    prompt_mask: Array  # bool [G, P], True on the prompt's own tokens
    uid: Array  # int32 [G], never repeats in a run
    prompt_valid: Array  # bool [G], False on filler prompts that only complete a shape
    max_new_tokens: Array | None = None  # int32 [G], at most R; None means R for all
    record_arrays: Mapping[str, Array] = struct.field(default_factory=dict)  # [G, …] each, for JAX rewards


class Batch(struct.PyTreeNode):
    """One immutable batch that gains evidence phase by phase; what is not there yet is None."""

    prompts: Array  # int32 [G, P], left-padded
    prompt_mask: Array  # bool [G, P]
    prompt_valid: Array  # bool [G], False on filler prompts
    record_arrays: Mapping[str, Array]  # [G, …] each
    # gen
    uid: Array  # int32 [B], n times each
    responses: Array  # int32 [B, R]
    response_mask: Array  # bool [B, R], the response's own tokens, EOS included; never changes afterwards
    response_length: Array  # int32 [B], tokens in the response frame, tool output included
    rollout_log_probs: Array | None  # float32 [B, R], of the distribution actually sampled; 0 outside the mask
    finish_reason: Array  # int32 [B], 1 stop, 2 length
    # reward
    scores: Array | None = None  # float32 [B, K]; 0 where scores_mask is not set
    scores_mask: Array | None = None  # bool [B, K], whether the k-th reward function scores the row (routing)
    row_valid: Array | None = None  # bool [B], False where the reward failed and on filler rows
    token_level_scores: Array | None = None  # float32 [B, R]
    reward_baselines: Array | None = None  # float32 [B], score of the greedy response (ReMax)
    # old_log_prob
    old_log_probs: Array | None = None  # float32 [B, R]
    entropys: Array | None = None  # float32 [B, R], nats
    sum_pi_squared: Array | None = None  # float32 [B, R], Σ_v π(v)²
    # ref, values
    ref_log_prob: Array | None = None  # float32 [B, R]
    values: Array | None = None  # float32 [B, R], values[t] from the position that predicts token t
    # adv
    token_level_rewards: Array | None = None  # float32 [B, R]
    rollout_is_weights: Array | None = None  # float32 [B, R]
    loss_mask: Array | None = None  # bool [B, R], response_mask & row_valid, less truncated rows and rejected tokens
    advantages: Array | None = None  # float32 [B, R]
    returns: Array | None = None  # float32 [B, R]

    @property
    def num_prompts(self) -> int:
        return self.prompts.shape[0]

    @property
    def num_rows(self) -> int:
        return self.responses.shape[0]

    @property
    def n(self) -> int:
        """Responses per prompt."""
        return self.num_rows // self.num_prompts

    @property
    def response_width(self) -> int:
        return self.responses.shape[1]

    def require(self, *names: str, phase: str) -> None:
        """Raises `MissingEvidence` naming the first absent field, the phase that needs it and the one that writes
        it."""
        for name in names:
            if getattr(self, name) is None:
                raise MissingEvidence(
                    f"phase {phase!r} needs {name!r}, which phase {WRITTEN_BY[name]!r} writes; that phase has not run"
                )

    def write(self, phase: str, **evidence: Array | None) -> Batch:
        """The batch with the evidence of one phase added.

        Raises:
          EvidenceExists: a field is already written, or belongs to another phase.
          AssertionError: an array's leading axes are not this batch's.
        """
        for name, value in evidence.items():
            owner = WRITTEN_BY.get(name)
            if owner != phase:
                raise EvidenceExists(f"phase {phase!r} may not write {name!r}; it belongs to phase {owner!r}")
            if getattr(self, name) is not None:
                raise EvidenceExists(f"phase {phase!r} would write {name!r} a second time; evidence is written once")
            if value is None:
                continue
            if name in ("scores", "scores_mask"):
                chex.assert_rank(value, 2)
                chex.assert_axis_dimension(value, 0, self.num_rows)
            elif name in ("row_valid", "reward_baselines"):
                chex.assert_shape(value, (self.num_rows,))
            else:
                chex.assert_shape(value, self.responses.shape)
        return self.replace(**evidence)

    def select(self, prompt_indices: Array) -> Batch:
        """The batch of the prompts at `prompt_indices` [g], each with all of its n rows."""
        n, (g,) = self.n, prompt_indices.shape

        def rows(x: Array) -> Array:
            grouped = x.reshape(self.num_prompts, n, *x.shape[1:])
            return grouped[prompt_indices].reshape(g * n, *x.shape[1:])

        return self._map_fields(per_prompt=lambda x: x[prompt_indices], per_row=rows)

    def regroup(self, n: int) -> Batch:
        """The same rows with n responses to a prompt, prompts repeated; n must divide this batch's n."""
        times = self.n // n
        chex.assert_equal(times * n, self.n)

        def repeat(x: Array) -> Array:
            return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(-1, *x.shape[1:])

        return self if times == 1 else self._map_fields(per_prompt=repeat, per_row=lambda x: x)

    def split(self, parts: int) -> Batch:
        """Leaves with a leading axis of `parts` batches: part j has the prompts j, j + parts, …, so that each part
        takes some of every shard's. `join_parts` undoes it."""
        per_part, n = self.num_prompts // parts, self.n
        chex.assert_equal(per_part * parts, self.num_prompts)

        def prompts(x: Array) -> Array:
            return x.reshape(per_part, parts, *x.shape[1:]).swapaxes(0, 1)

        def rows(x: Array) -> Array:
            return prompts(x.reshape(-1, n, *x.shape[1:])).reshape(parts, per_part * n, *x.shape[1:])

        return self._map_fields(per_prompt=prompts, per_row=rows)

    def join_parts(self, tree: Any) -> Any:
        """Leaves [parts, B / parts, …], computed from `split(parts)` of this batch, as [B, …] in its rows' order."""

        def join(x: Array) -> Array:
            parts, rows = x.shape[:2]
            grouped = x.reshape(parts, rows // self.n, self.n, *x.shape[2:]).swapaxes(0, 1)
            return grouped.reshape(parts * rows, *x.shape[2:])

        return jax.tree.map(join, tree)

    def _map_fields(self, per_prompt: Callable[[Array], Array], per_row: Callable[[Array], Array]) -> Batch:
        return Batch(
            **{
                f.name: jax.tree.map(per_prompt if f.name in PER_PROMPT else per_row, getattr(self, f.name))
                for f in dataclasses.fields(self)
            }
        )


def check_batch(batch: Batch, *, n: int, vocab_size: int) -> None:
    """Checks the values of a freshly sampled batch on the host.

    Raises:
      ValueError: naming the field and the first row that breaks a rule: dtypes and shapes, every uid n times in
        consecutive rows, response_mask zero after the row's length, token ids inside [0, vocab_size).
    """
    host = {
        f.name: np.asarray(value)
        for f in dataclasses.fields(batch)
        if (value := getattr(batch, f.name)) is not None and f.name != "record_arrays"
    }
    rows, width = host["responses"].shape
    prompts = host["prompts"].shape[0]
    expected = {
        "prompts": (np.int32, host["prompts"].shape),
        "prompt_mask": (np.bool_, host["prompts"].shape),
        "prompt_valid": (np.bool_, (prompts,)),
        "uid": (np.int32, (rows,)),
        "responses": (np.int32, (rows, width)),
        "response_mask": (np.bool_, (rows, width)),
        "response_length": (np.int32, (rows,)),
        "finish_reason": (np.int32, (rows,)),
    }
    for name, (dtype, shape) in expected.items():
        found = host[name]
        if found.dtype != dtype or found.shape != shape:
            raise ValueError(
                f"batch.{name}: expected {np.dtype(dtype).name}{list(shape)}, "
                f"found {found.dtype.name}{list(found.shape)}"
            )
    if rows != prompts * n:
        raise ValueError(f"batch: {prompts} prompts x n={n} make {prompts * n} rows, found {rows}")
    uid = host["uid"].reshape(prompts, n)
    if (uid != uid[:, :1]).any() or len(np.unique(uid[:, 0])) != prompts:
        raise ValueError(f"batch.uid: each of {prompts} uids must stand in {n} consecutive rows, found {host['uid']}")
    after = np.arange(width)[None, :] >= host["response_length"][:, None]
    _reject(host["response_mask"] & after, "response_mask", "is set after the end of the response")
    for name in ("prompts", "responses"):
        _reject((host[name] < 0) | (host[name] >= vocab_size), name, f"is outside the vocabulary [0, {vocab_size})")
    # Left-padded means: once a prompt has begun it does not stop before the last column.
    _reject(host["prompt_mask"][:, :-1] & ~host["prompt_mask"][:, 1:], "prompt_mask", "is not left-padded")
    _reject(~host["prompt_mask"][:, -1:], "prompt_mask", "has an empty prompt")


def _reject(bad: np.ndarray, name: str, what: str) -> None:
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(f"batch.{name}: row {row}, column {column} {what}")


class Cache(Protocol):
    """What a model keeps of the tokens of B rows while they are sampled: keys and values (models/cache.py), or what
    stands for them. The prompts' part is there once per prompt, shared by its n rows."""

    @property
    def start(self) -> Array: ...  # int32 [B], the position of each row's first token of its own

    @property
    def length(self) -> Array: ...  # int32 [B], tokens of its own

    def fork(self, n: int, width: int) -> Self:
        """A cache of n rows per row of this one, which becomes their shared prompt; room for `width` tokens each."""
        ...

    def grow(self, width: int) -> Self:
        """The same with room for `width` tokens a row."""
        ...

    def in_step(self) -> Self:
        """The same, with the promise that its rows have equal lengths, take one token at a time, and that a row that
        is passed over once gets no more."""
        ...

    def out_of_step(self) -> Self:
        """The same without that promise."""
        ...

    def take(self, rows: Array) -> Self:
        """The cache of some rows, int32 [S, b]: of each of S equal parts of the rows the same number."""
        ...

    def put(self, rows: Array, part: Self) -> Self:
        """The cache with what `part`, once `take(rows)` of it, has become."""
        ...


class DecodeState(struct.PyTreeNode):
    """Where each row of a rollout stands."""

    hidden: Array  # compute dtype [B, D], of the last token in the cache
    key: Array  # typed PRNG key [B], folded with the token index for each draw
    responses: Array  # int32 [B, R]
    response_mask: Array  # bool [B, R]
    rollout_log_probs: Array  # float32 [B, R]
    length: Array  # int32 [B], tokens in the response frame
    max_new_tokens: Array  # int32 [B], at most R
    stop_state: Array  # int32 [B], state of the stop-string automaton
    finish_reason: Array  # int32 [B], 0 while active

    @property
    def done(self) -> Array:
        """bool [B]"""
        return self.finish_reason > 0


class TrainState(struct.PyTreeNode):
    """One trained model: actor or critic."""

    params: Params
    opt_state: Any
    updates: Array  # int32 [], optimizer updates applied
    skipped: Array  # int32 [], consecutive updates skipped for a non-finite loss or gradient


class RunState(struct.PyTreeNode):
    """Everything a step reads and returns; what a checkpoint holds, but for `base`, beside the data cursor."""

    actor: TrainState  # of all its parameters, or of a LoRA overlay on `base`
    critic: TrainState | None  # of all its parameters, or of a value head on `base`
    reference: Params | None  # None where there is none, or where it is `base`
    kl_coef: Array  # float32 [], the KL coefficient in the reward (adaptive ones move)
    step: Array  # int32 [], steps taken
    base: Params | None = None  # the actor's folder, frozen: shared by an overlay, a frozen trunk, the reference
    # In a checkpoint alone, where responses are sampled a step ahead: of the next step's the evidence that each phase
    # (gen, gen_max) has written, by field.
    ahead: Mapping[str, Mapping[str, Array]] | None = None


@dataclasses.dataclass(frozen=True)
class Param:
    """What a model declares of one leaf; abstract shapes, shardings and initial values are maps over these."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]  # logical axis names, one per dimension (sharding.py maps them to the mesh)
    init: Callable[[Array, tuple[int, ...], Any], Array]  # (key, shape, dtype) -> value


class Packed(NamedTuple):
    """A line of a prompt and the responses to it, one right after the other in slots that they share."""

    prompt_width: int  # P
    n: int  # responses
    reach: int  # tokens of a response at most, R


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model as pure functions: the only thing that steps know of one.

    forward(params, tokens, positions, segment_ids, *, prefix_ids=None, blocks=None, cache=None) -> (hidden, cache)
      tokens, positions, segment_ids: int32 [B, T]. Segment 0 is padding. A token sees the tokens of its own segment at
      positions up to its own, and those of segment `prefix_ids` (int32 [B, T]; 0 for none) likewise.
      With blocks = (P, n), T is P tokens of a prompt, then n responses of equal width: each sees the prompt and itself,
      and segment_ids is a 0/1 mask; n = 0 for one text, padded at its ends. With blocks = Packed(P, n, R), T is P
      tokens of a prompt (segment 1), then slots: those of the i-th response (segment i + 1) are at most R in a row,
      each sees the prompt and its own response, and slots that are left (segment 0) come last. The same could be said
      with segments and prefixes, but here what is unseen is not computed. With a cache, segment_ids is a 0/1 mask: real
      tokens are written to the cache's slot `position - prompt_length` of their row and see the row's prompt and slots.
      hidden: compute dtype [B, T, D], normalized.
    heads["logits"](params, hidden [..., D]) -> float32 [..., V];  heads["value"](params, hidden) -> float32 [...] of a
    critic, heads["score"] likewise of a reward model
    """

    declare: Callable[[], Any]  # () -> tree of Param
    forward: Callable[..., tuple[Array, Any]]
    heads: Mapping[str, Callable[[Params, Array], Array]]
    init_cache: Callable[[int, int], Any]  # (rows, width) -> empty `Cache` without prompts
    vocab_size: int  # rows of the embedding
