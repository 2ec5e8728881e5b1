"""Sampling: who draws what, when a response ends, and that the sampler and the scorer agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.transformer import unstack_layers
from jaxrl_llm.steps.rollout import Cascade, StopRules, append, no_stop_rules, rollout
from jaxrl_llm.steps.sampling import BLOCK, Sampling, draw, filter_logits, sample
from jaxrl_llm.steps.scoring import score_tokens
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, Prompts, check_batch
from tests import tiny

N, WIDTH = 4, 8
MODEL, PARAMS, PROMPTS, KEY = tiny.model(), tiny.params(), tiny.prompts(), jax.random.key(7)


@partial(jax.jit, static_argnames=("n", "width", "sampling"))
def _rollout(
    params: Any, prompts: Prompts, key: Any, stops: StopRules, n: int, width: int, sampling: Sampling
) -> Batch:
    return rollout(MODEL, params, prompts, key, n=n, width=width, sampling=sampling, stops=stops)


def roll(
    prompts: Prompts = PROMPTS, *, stops: StopRules | None = None, n: int = N, width: int = WIDTH, key: Any = KEY,
    params: Any = PARAMS, **sampling: Any,
) -> Batch:  # fmt: skip
    stops = no_stop_rules(tiny.VOCAB) if stops is None else stops
    return _rollout(params, prompts, key, stops, n, width, Sampling(**sampling))


def stop_ids(*ids: int, **kwargs: Any) -> StopRules:
    return no_stop_rules(tiny.VOCAB).replace(ids=jnp.array(ids, jnp.int32), **kwargs)


@jax.jit
def plain_logits(batch: Batch) -> Any:
    """Logits [B, R, V] for each response token, from a plain causal pass over whole rows."""
    rows = batch.regroup(1)
    real = jnp.arange(rows.response_width)[None] < rows.response_length[:, None]
    mask = jnp.concatenate([rows.prompt_mask, real], 1)
    tokens = jnp.concatenate([rows.prompts, rows.responses], 1)
    where = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
    hidden, _ = MODEL.forward(PARAMS, tokens, where, mask.astype(jnp.int32))
    return MODEL.heads["logits"](PARAMS, hidden[:, rows.prompts.shape[1] - 1 : -1])


def test_a_batch_is_well_formed() -> None:
    batch = roll()
    check_batch(batch, n=N, vocab_size=tiny.VOCAB)
    assert batch.n == N and batch.responses.shape == (16, WIDTH)
    assert (batch.finish_reason == FINISH_LENGTH).all() and batch.response_mask.all()


def test_log_probs_are_those_of_the_scorer() -> None:
    """What the cached, shared-prompt decoder says of its tokens, the plain forward pass over whole rows says too."""
    batch = roll(temperature=0.7)
    stats = jax.jit(lambda b: score_tokens(MODEL, PARAMS, b, temperature=0.7, chunk_tokens=32))(batch)
    assert batch.rollout_log_probs is not None
    np.testing.assert_allclose(batch.rollout_log_probs, stats.log_probs, atol=2e-5)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_shared_prompt_changes_nothing(n: int) -> None:
    """However many responses share the computation of their prompt: the same log-probs as from a plain causal pass."""
    batch = roll(stops=stop_ids(*range(20)))  # ragged
    stats = jax.jit(lambda b: score_tokens(MODEL, PARAMS, b, temperature=1.0, chunk_tokens=32))(batch.regroup(n))
    rows = batch.regroup(1)
    plain = jnp.take_along_axis(jax.nn.log_softmax(plain_logits(batch)), rows.responses[:, :, None], 2)[:, :, 0]
    np.testing.assert_allclose(stats.log_probs, jnp.where(rows.response_mask, plain, 0), atol=2e-5)


@pytest.mark.parametrize("layers", ["stacked", pytest.param("apart", marks=pytest.mark.long)])
def test_shapes_that_shrink_and_grow_sample_what_one_loop_samples(layers: str) -> None:
    """Caches of 2, 4 and 8 slots; 16 rows, 8 that share their prompts, then 4, 2 and 1 with prompts of their own."""
    params = PARAMS if layers == "stacked" else unstack_layers(PARAMS)
    stops = stop_ids(*range(8))

    def sampled(cascade: Cascade) -> Batch:
        how: dict[str, Any] = {"n": N, "width": WIDTH, "sampling": Sampling(), "stops": stops, "cascade": cascade}
        return jax.jit(partial(rollout, MODEL, **how))(params, PROMPTS, KEY)

    one_loop, many = sampled(Cascade(width=0, halvings=0)), sampled(Cascade(width=2, halvings=4, min_rows=1))
    assert len(np.unique(one_loop.response_length)) > 3
    for name in ("responses", "response_mask", "response_length", "finish_reason"):
        np.testing.assert_array_equal(getattr(one_loop, name), getattr(many, name))
    assert one_loop.rollout_log_probs is not None and many.rollout_log_probs is not None
    np.testing.assert_allclose(one_loop.rollout_log_probs, many.rollout_log_probs, atol=1e-5)


def test_unstacked_layers_sample_the_same() -> None:
    stacked, unstacked = roll(), roll(params=unstack_layers(PARAMS))
    np.testing.assert_array_equal(stacked.responses, unstacked.responses)


def test_rows_of_a_prompt_and_equal_prompts_differ() -> None:
    same = PROMPTS.replace(
        prompts=jnp.broadcast_to(PROMPTS.prompts[:1], PROMPTS.prompts.shape),
        prompt_mask=jnp.broadcast_to(PROMPTS.prompt_mask[:1], PROMPTS.prompt_mask.shape),
    )
    assert len(np.unique(np.asarray(roll(same).responses), axis=0)) == 16


def test_permuting_prompts_permutes_responses_bit_for_bit() -> None:
    order = jnp.array([2, 0, 3, 1])
    straight, permuted = roll(), roll(jax.tree.map(lambda x: x[order], PROMPTS))
    for name in ("responses", "rollout_log_probs", "response_length"):
        np.testing.assert_array_equal(getattr(straight.select(order), name), getattr(permuted, name))


def test_another_key_or_uid_gives_other_responses() -> None:
    straight = np.asarray(roll().responses)
    assert (straight != roll(key=jax.random.key(8)).responses).any()
    assert (straight != roll(PROMPTS.replace(uid=PROMPTS.uid + 1000)).responses).any()


def test_contents_of_prompt_padding_do_not_matter() -> None:
    junk = PROMPTS.replace(prompts=jnp.where(PROMPTS.prompt_mask, PROMPTS.prompts, 63))
    np.testing.assert_array_equal(roll().responses, roll(junk).responses)


def test_greedy_is_the_argmax_of_the_plain_forward_pass() -> None:
    batch = roll(temperature=0.0, n=1)
    np.testing.assert_array_equal(plain_logits(batch).argmax(-1), batch.responses)


def test_temperature_one_samples_whatever_top_p_is() -> None:
    for top_p in (1.0, 0.99):
        assert len(np.unique(np.asarray(roll(temperature=1.0, top_p=top_p).responses), axis=0)) == 16


def test_a_stop_id_ends_a_response_and_belongs_to_it() -> None:
    plain = roll()
    eos = int(plain.responses[0, 3])
    batch = roll(stops=stop_ids(eos, -1))
    for row in range(16):
        free = np.asarray(plain.responses[row])
        at = np.flatnonzero(free == eos)
        length = int(at[0]) + 1 if at.size else WIDTH
        assert batch.response_length[row] == length == batch.response_mask[row].sum()
        np.testing.assert_array_equal(batch.responses[row, :length], free[:length])
        assert batch.rollout_log_probs is not None
        assert (batch.responses[row, length:] == 0).all() and (batch.rollout_log_probs[row, length:] == 0).all()
        assert batch.finish_reason[row] == (FINISH_STOP if at.size else FINISH_LENGTH)


def test_eos_as_the_first_token_is_a_response_of_one_token() -> None:
    first = np.asarray(roll().responses[:, 0])
    batch = roll(stops=stop_ids(*first.tolist()))
    assert (batch.response_length == 1).all() and (batch.finish_reason == FINISH_STOP).all()
    np.testing.assert_array_equal(batch.responses[:, 0], first)


def test_eos_may_be_the_padding_id() -> None:
    """Zero fills what follows a response; as a stop id it ends one all the same."""
    logits_favour_zero = jax.tree.map(lambda x: x, PARAMS)
    logits_favour_zero["embed"] = PARAMS["embed"].at[0].multiply(3.0)
    batch = roll(stops=stop_ids(0), params=logits_favour_zero, width=24)
    ended = np.asarray(batch.finish_reason) == FINISH_STOP
    assert ended.any()
    lengths = np.asarray(batch.response_length)[ended]
    last = np.asarray(batch.responses)[ended, lengths - 1]
    assert (last == 0).all() and (np.asarray(batch.response_mask).sum(1)[ended] == lengths).all()


def test_max_new_tokens_per_prompt_and_an_empty_response() -> None:
    limited = PROMPTS.replace(max_new_tokens=jnp.array([0, 1, 5, 99], jnp.int32))
    batch = roll(limited)
    np.testing.assert_array_equal(batch.response_length, np.repeat([0, 1, 5, WIDTH], N))
    assert (batch.finish_reason == FINISH_LENGTH).all()
    np.testing.assert_array_equal(batch.responses[8:12, :5], roll().responses[8:12, :5])


def test_filler_prompts_sample_nothing() -> None:
    batch = roll(PROMPTS.replace(prompt_valid=jnp.array([True, True, True, False])))
    np.testing.assert_array_equal(batch.response_length, np.repeat([WIDTH, WIDTH, WIDTH, 0], N))


def test_min_new_tokens_holds_the_stop_ids_back() -> None:
    everything = tuple(range(tiny.VOCAB // 2))
    batch = roll(stops=stop_ids(*everything, min_new_tokens=jnp.int32(3)))
    assert (batch.response_length > 3).all()
    assert not np.isin(np.asarray(batch.responses[:, :3]), everything).any()


def test_a_stop_string_is_found_across_token_borders() -> None:
    """An automaton for the id sequence (a, b), as a string over two tokens makes it."""
    plain = np.asarray(roll().responses)
    a, b = plain[0, 2:4]
    table = np.zeros((3, tiny.VOCAB), np.int32)
    table[:2, a] = 1
    table[1, b] = 2
    table[2] = 2
    batch = roll(stops=no_stop_rules(tiny.VOCAB).replace(strings=jnp.asarray(table)))
    assert batch.response_length[0] <= 4 and batch.finish_reason[0] == FINISH_STOP
    for row in range(16):
        hits = [t for t in range(1, WIDTH) if plain[row, t - 1] == a and plain[row, t] == b]
        assert batch.response_length[row] == (hits[0] + 1 if hits else WIDTH)


def test_stop_ids_are_arguments_not_constants() -> None:
    """Other ids of the same number run in the program that is there: the function is not traced again."""
    traced = []

    @jax.jit
    def sampled(stops: StopRules) -> Batch:
        traced.append(1)
        return rollout(MODEL, PARAMS, PROMPTS, KEY, n=1, width=4, sampling=Sampling(), stops=stops)

    plain = np.asarray(sampled(stop_ids(-1, -1)).responses)
    stopped = sampled(stop_ids(*plain[:2, 0].tolist()))
    assert len(traced) == 1
    assert (np.asarray(stopped.response_length)[:2] == 1).all()


def test_appending_in_pieces_equals_appending_at_once() -> None:
    tokens, mask = PROMPTS.prompts, PROMPTS.prompt_mask
    whole, cache = append(MODEL, PARAMS, MODEL.init_cache(4, 6), tokens, mask)
    _, half = append(MODEL, PARAMS, MODEL.init_cache(4, 6), tokens[:, :4], mask[:, :4])
    pieces, half = append(MODEL, PARAMS, half, tokens[:, 4:], mask[:, 4:])
    np.testing.assert_allclose(whole, pieces, atol=1e-5)
    np.testing.assert_array_equal(cache.length, half.length)


# The draw itself


@pytest.mark.parametrize("size", [5, BLOCK, 3 * BLOCK + 17])
def test_draws_follow_softmax(size: int) -> None:
    """Chi-square of 40,000 draws against the softmax, entries of −inf among them, at the 0.1% level."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=size) * 2
    logits[rng.random(size) < 0.2] = -np.inf
    logits[0] = 0
    draws = 40_000
    uniform = jax.random.uniform(jax.random.key(size), (draws,))
    tokens = jax.vmap(lambda u: draw(jnp.asarray(logits, jnp.float32)[None], u[None])[0])(uniform)
    counts = np.bincount(np.asarray(tokens), minlength=size)
    expected = np.exp(logits - logits.max())
    expected *= draws / expected.sum()
    assert counts[np.isinf(logits)].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    kept = wanted > 0
    statistic = ((observed - wanted)[kept] ** 2 / wanted[kept]).sum()
    freedom = kept.sum() - 1
    # Wilson and Hilferty's approximation of the 99.9% quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def test_a_draw_never_leaves_the_support() -> None:
    """At both ends of [0, 1) and with sums that round."""
    logits = jnp.where(jnp.arange(200)[None] % 7 == 3, jnp.linspace(-30.0, 30.0, 200)[None], -jnp.inf)
    for u in (0.0, 1e-30, 0.5, 1 - 2.0**-24):
        token = int(draw(logits, jnp.array([u], jnp.float32))[0])
        assert token % 7 == 3


def test_one_possible_token_is_certain() -> None:
    logits = jnp.full((1, 100), -jnp.inf).at[0, 77].set(-5.0)
    token, log_prob = sample(logits, jnp.array([0.3]), Sampling())
    assert token[0] == 77 and log_prob[0] == 0.0


def test_filters() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))

    def kept(**kwargs: Any) -> list[int]:
        return np.flatnonzero(np.isfinite(np.asarray(filter_logits(logits, Sampling(**kwargs))[0]))).tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=9) == kept() == [0, 1, 2, 3]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=0.5) == [1, 2, 3]
    assert kept(top_k=3, top_p=0.75) == [1, 3]  # of the three that are left, 4/9 + 3/9 reach it


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.95, 0.9999])
def test_a_nucleus_is_that_of_a_full_sort(spread: float, top_p: float) -> None:
    """The fewest likeliest entries that reach top_p, but for one at the border, where sums round differently."""
    logits = spread * jax.random.normal(jax.random.key(3), (8, 3001))
    logits = jnp.where(jnp.arange(3001)[None] % 11 == 5, -jnp.inf, logits)
    kept = np.isfinite(np.asarray(filter_logits(logits, Sampling(top_p=top_p)))).sum(1)
    falling = np.sort(np.asarray(jax.nn.softmax(logits.astype(jnp.float32)), np.float64), 1)[:, ::-1]
    wanted = 1 + (np.cumsum(falling, 1) < top_p * falling.sum(1, keepdims=True)).sum(1)
    reached = np.take_along_axis(np.cumsum(falling, 1), kept[:, None] - 1, 1)[:, 0]
    assert (np.abs(kept - wanted) <= 1).all() or np.abs(reached - top_p).max() < 1e-6
    assert (reached > top_p - 1e-6).all()


def test_equal_entries_are_kept_together() -> None:
    logits = jnp.log(jnp.array([[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]]))
    kept = jnp.isfinite(filter_logits(logits, Sampling(top_p=0.3)))
    np.testing.assert_array_equal(kept[0], [True, True, True, True, False, False])


def test_log_prob_is_of_the_distribution_sampled() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    token, log_prob = sample(logits, jnp.array([0.0]), Sampling(top_k=2))
    assert token[0] == 1
    np.testing.assert_allclose(np.exp(log_prob[0]), 0.4 / 0.7, rtol=1e-6)
