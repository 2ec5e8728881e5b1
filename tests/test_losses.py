"""Losses: numpy's answers, finite differences, and the properties that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, Norm, aggregate
from jaxrl_llm.algorithms.losses import POLICY_LOSSES, PolicyLoss, top_entropy_mask, vanilla

variants: Any = chex.variants  # pyright cannot see through its decorators
SHAPE = (4, 6)
KEY = jax.random.key(0)
SPLITTABLE = [name for name, loss in POLICY_LOSSES.items() if not loss.needs_whole_minibatch]
BYPASS = {"loss_type": "reinforce", "rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}
Inputs = tuple[Any, Any, Any, Any]  # new, old, advantages, mask


def inputs(seed: int = 0, spread: float = 0.3, dtype: str = "float32") -> Inputs:
    rng = np.random.default_rng(seed)
    old = np.log(rng.uniform(0.05, 0.9, SHAPE))
    new = np.minimum(old + rng.normal(0, spread, SHAPE), -1e-3)
    mask = np.arange(SHAPE[1])[None, :] < np.array([6, 3, 0, 4])[:, None]
    mask[0, 2] = False  # tool output
    return new.astype(dtype), old.astype(dtype), rng.normal(size=SHAPE).astype(dtype), mask


def rows_of(x: Inputs, rows: list[int]) -> Inputs:
    new, old, advantages, mask = (v[rows] for v in x)
    return new, old, advantages, mask


def options_of(name: str, **changed: Any) -> dict[str, Any]:
    options = {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.3} if name == "clip_cov" else {}
    options |= BYPASS if name == "bypass_mode" else {}
    return options | changed


def run(name: str, x: Inputs, norm: Norm | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Loss, gradient with respect to the new log-probs, metrics."""
    norm = Norm.of(jnp.asarray(x[3])) if norm is None else norm
    (loss, metrics), grad = jitted(name, tuple(sorted(options_of(name, **options).items())))(*x, norm)
    return loss, np.asarray(grad), metrics


@cache
def jitted(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    def loss(new: Any, old: Any, advantages: Any, mask: Any, norm: Norm) -> Any:
        return POLICY_LOSSES[name](new, old, advantages, mask, norm, key=KEY, **dict(options))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


# What each loss says of its tokens, in numpy. `base` is where the parameters stand: what a loss treats as constant is
# taken there, so that the loss as a function of `new` has the gradient that it claims.


def ratio(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(new - old, -20, 20))


def clipped(new: np.ndarray, old: np.ndarray, a: np.ndarray, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    r = ratio(new, old)
    return np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))


def numpy_vanilla(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    losses = clipped(new, old, a)
    return np.where(a < 0, np.minimum(losses, -3 * a), losses)


def numpy_gspo(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    mean = ((base - old) * mask).sum(-1, keepdims=True) / np.maximum(mask.sum(-1, keepdims=True), 1)
    return clipped(mean + new - base, np.zeros(SHAPE), a, 3e-4, 4e-4)


def numpy_geo_mean(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    count = np.maximum(mask.sum(-1, keepdims=True), 1)
    d, sign = new - old, np.sign(a)
    d = sign * np.minimum(sign * d, sign * np.clip(d, -0.4, 0.4))
    mean, a_mean = (np.where(mask, v, 0).sum(-1, keepdims=True) / count for v in (d, a))
    return np.broadcast_to(-a_mean * np.exp(mean), SHAPE)


def numpy_sapo(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * (4 / tau) / (1 + np.exp(-tau * (ratio(new, old) - 1)))


def numpy_cispo(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    return -np.clip(ratio(base, old), 0.8, 1.2) * a * new


def numpy_gpg(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    return -a * new


def numpy_dppo_tv(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    moved = np.exp(base) - np.exp(old)
    return np.where(np.where(a > 0, moved <= 0.15, moved >= -0.15), -a * np.minimum(ratio(base, old), 20) * new, 0)


def numpy_dppo_kl(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    p, q = np.exp(old), np.exp(base)
    kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    away = np.where(a > 0, q > p, q < p)
    return np.where(away & (kl > 0.05), 0, -a * np.minimum(ratio(base, old), 20) * new)


def numpy_dro(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    return -a * new + 0.15 * (new - old) ** 2


def numpy_bypass(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    k1 = old - base
    kept = (k1 >= np.log(0.7)) & (k1 <= np.log(1.5))
    return np.where(kept, -a * new * np.minimum(ratio(base, old), 2), 0)


def numpy_covariance(base: Any, a: Any, mask: Any) -> Any:
    return (a - a[mask].mean()) * (base - base[mask].mean())


def numpy_clip_cov(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    eligible = (numpy_covariance(base, a, mask) > 0) & (clipped(base, old, a) == -a * ratio(base, old))
    return np.where(eligible, 0, clipped(new, old, a))


def numpy_kl_cov(base: Any, new: Any, old: Any, a: Any, mask: Any) -> Any:
    covariance = np.where(mask, numpy_covariance(base, a, mask), -np.inf)
    top = covariance >= np.sort(covariance[mask])[::-1][max(1, int(0.25 * mask.sum())) - 1]
    return -a * np.exp(new - old) + np.where(top, np.abs(new - old), 0)


REFERENCES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "vanilla": (numpy_vanilla, {}),
    "gspo": (numpy_gspo, {}),
    "geo_mean": (numpy_geo_mean, {}),
    "sapo": (numpy_sapo, {}),
    "cispo": (numpy_cispo, {}),
    "gpg": (numpy_gpg, {}),
    "dppo_tv": (numpy_dppo_tv, {}),
    "dppo_kl": (numpy_dppo_kl, {}),
    "dro": (numpy_dro, {}),
    "bypass_mode": (numpy_bypass, {}),
    "kl_cov": (numpy_kl_cov, {"kl_cov_ratio": 0.25}),
    # All that are eligible are drawn, so that there is no chance in it.
    "clip_cov": (numpy_clip_cov, {"clip_cov_ratio": 1.0, "clip_cov_ub": 1e9}),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_value_and_gradient_are_numpys(name: str) -> None:
    """The gradient by finite differences, with what the loss holds constant held at the point."""
    reference, options = REFERENCES[name]
    new, old, a, mask = x = inputs(dtype="float64")
    a = a if name != "geo_mean" else a.mean(-1, keepdims=True) * np.ones(SHAPE)
    x = (new, old, a, mask)

    def token_mean(moved: np.ndarray) -> float:
        return float(np.where(mask, reference(new, moved, old, a, mask), 0).sum() / mask.sum())

    with jax.enable_x64(True):
        loss, grad, _ = run(name, x, aggregation="token-mean", **options)
    np.testing.assert_allclose(loss, token_mean(new), rtol=1e-9)
    step = 1e-6
    for at in np.ndindex(*SHAPE):
        direction = np.zeros(SHAPE)
        direction[at] = step
        slope = (token_mean(new + direction) - token_mean(new - direction)) / (2 * step)
        np.testing.assert_allclose(grad[at], slope, rtol=1e-5, atol=1e-8, err_msg=f"{name} at {at}")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(name: str) -> None:
    """−A / N on every token; nothing is clipped and nothing has moved."""
    _, old, a, mask = inputs()
    a = np.broadcast_to(a[:, :1], SHAPE)  # one advantage a row: losses of rows know no other
    changed = {"clip_cov": {"clip_cov_lb": 1e8, "clip_cov_ub": 1e9}, "bypass_mode": {"rollout_rs": "none"}}.get(
        name, {}
    )
    _, grad, metrics = run(name, (old, old, a, mask), aggregation="token-mean", **changed)
    np.testing.assert_allclose(grad, np.where(mask, -a, 0) / mask.sum(), rtol=1e-5, atol=1e-7)
    assert all(not np.any(value) for value in metrics.values()), metrics


@pytest.mark.parametrize(
    ("r", "advantage", "flows"),
    [
        (1.1, 1, True), (1.3, 1, False), (0.5, 1, True), (0.5, -1, False), (0.9, -1, True), (1.3, -1, True),
        (2.9, -1, True), (3.1, -1, False),
    ],
)  # fmt: skip
def test_the_clip_cuts_the_gradient(r: float, advantage: float, flows: bool) -> None:
    """In the direction that would gain beyond the bounds, and where A < 0 beyond the dual clip, there is none."""
    old, mask = jnp.full((1, 1), -2.0), jnp.ones((1, 1), bool)

    def loss(new: Any) -> Any:
        return vanilla(new, old, jnp.full((1, 1), float(advantage)), mask, Norm.of(mask))[0]

    grad = jax.grad(loss)(old + np.log(r))
    np.testing.assert_allclose(grad, [[-advantage * r if flows else 0.0]], rtol=1e-5)


def test_clip_fractions_count_what_the_clips_change() -> None:
    new, old = jnp.log(jnp.array([[1.3, 0.5, 1.3, 4.0, 1.0]])), jnp.zeros((1, 5))
    advantages, mask = jnp.array([[1.0, -1.0, -1.0, -1.0, 1.0]]), jnp.ones((1, 5), bool)
    _, metrics = vanilla(new, old, advantages, mask, Norm.of(mask))
    assert float(metrics["pg_clipfrac"]) == pytest.approx(2 / 5)
    assert float(metrics["pg_clipfrac_lower"]) == pytest.approx(1 / 5)
    assert float(metrics["ppo_kl"]) == pytest.approx(-float(new.mean()))


def test_the_two_sided_clip_is_trls() -> None:
    new, old, a, mask = inputs(spread=1.5)
    loss, grad, _ = run("vanilla", (new, old, a, mask), delta=1.5, clip_ratio_c=1e9)
    r = ratio(new, old)
    expected = -np.minimum(np.minimum(r, 1.5) * a, np.clip(r, 0.8, 1.2) * a)
    np.testing.assert_allclose(loss, expected[mask].mean(), rtol=1e-5)
    assert not np.any(grad[mask & (r > 1.5)])


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, POLICY_LOSSES[name].options["aggregation"]) for name in SPLITTABLE),
        *(("vanilla", a) for a in AGGREGATIONS),
    ],
)
def test_parts_of_a_mini_batch_add_up(name: str, aggregation: str) -> None:
    """Loss, gradient and metrics, whatever the split: rows without tokens and filler rows included."""
    x = inputs()
    norm = Norm.of(jnp.asarray(x[3]))
    loss, grad, metrics = run(name, x, norm, aggregation=aggregation)
    filler = rows_of(x, [0, 1, 2, 3, 0])
    filler[3][4] = False
    for split in ([[2, 3], [0, 1]], [[3, 4], [1, 0], [4, 2]]):
        parts = [run(name, rows_of(filler, rows), norm, aggregation=aggregation) for rows in split]
        gathered = np.zeros((5, SHAPE[1]), np.float32)
        for rows, part in zip(split, parts, strict=True):
            gathered[rows] += part[1]
        np.testing.assert_allclose(sum(p[0] for p in parts), loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gathered[:4], grad, rtol=1e-5, atol=1e-7)
        for key, value in metrics.items():
            np.testing.assert_allclose(sum(p[2][key] for p in parts), value, rtol=1e-5, atol=1e-6, err_msg=key)


@settings(deadline=None, max_examples=15)
@given(
    mask=hnp.arrays(np.bool_, SHAPE),
    hostile=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    seed=st.integers(0, 1000),
)
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(mask: Any, hostile: float, seed: int) -> None:
    new, old, a, _ = inputs(seed)
    dirty = tuple(np.where(mask, v, hostile).astype(np.float32) for v in (new, old, a))
    weights = np.where(mask, np.float32(1.5), np.float32(hostile))
    for name in POLICY_LOSSES:
        with_weights = {} if name == "bypass_mode" else {"rollout_is_weights": "given"}
        loss = weighted(name, bool(with_weights))
        clean = loss(new, old, a, mask, np.full(SHAPE, np.float32(1.5)))
        found = loss(*dirty, mask, weights)
        chex.assert_trees_all_equal(clean, found, custom_message=name)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found)), name
        assert not np.any(np.asarray(found[1])[~mask]), name


@cache
def weighted(name: str, takes_weights: bool) -> Any:
    def loss(new: Any, old: Any, advantages: Any, mask: Any, weights: Any) -> Any:
        options = options_of(name) | ({"rollout_is_weights": weights} if takes_weights else {})
        return POLICY_LOSSES[name](new, old, advantages, mask, Norm.of(mask), key=KEY, **options)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name not in ("bypass_mode", "geo_mean")])
def test_importance_weights_multiply_each_tokens_loss(name: str) -> None:
    x = inputs()
    weights = np.zeros(SHAPE, np.float32)
    weights[0, 1] = 2.0
    only = Norm(jnp.float32(1), jnp.float32(1))
    part = np.zeros(SHAPE, bool)
    part[0, 1] = True
    grad = weighted(name, True)(*x, weights)[1]
    expected = run(name, x, aggregation="token-sum")[1]
    assert not np.any(np.asarray(grad)[~part]) and only.tokens == 1
    share = {"seq-mean-token-mean": 1 / (x[3][0].sum() * x[3].any(-1).sum()), "token-mean": 1 / x[3].sum()}
    factor = share[POLICY_LOSSES[name].options["aggregation"]]
    np.testing.assert_allclose(grad[0, 1], 2 * expected[0, 1] * factor, rtol=1e-5, atol=1e-8)


def test_geo_mean_weighs_a_row_by_the_geometric_mean_of_its_weights() -> None:
    x = inputs()
    weights = np.random.default_rng(3).uniform(0.5, 2, SHAPE).astype(np.float32)
    plain, found = run("geo_mean", x)[1], np.asarray(weighted("geo_mean", True)(*x, weights)[1])
    for row in (0, 1, 3):
        factor = np.exp(np.log(weights[row][x[3][row]]).mean())
        np.testing.assert_allclose(found[row], plain[row] * factor, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_float64_is_kept_and_an_empty_mini_batch_is_0(name: str) -> None:
    with jax.enable_x64(True):
        new, old, a, mask = inputs(dtype="float64")
        loss, grad, metrics = run(name, (new, old, a, np.zeros_like(mask)))
        assert loss.dtype == grad.dtype == np.float64
        assert not np.any(loss) and not np.any(grad) and not any(np.any(value) for value in metrics.values())


def test_clip_cov_draws_as_many_as_it_says_and_by_its_key() -> None:
    new, old, a, mask = inputs(spread=0.01)

    @jax.jit
    def gradient(key: Any) -> Any:
        def loss(log_probs: Any) -> Any:
            fn = partial(POLICY_LOSSES["clip_cov"], clip_cov_lb=0.0, clip_cov_ub=1e9, clip_cov_ratio=0.25)
            return fn(log_probs, old, a, mask, Norm.of(mask), key=key)[0]

        return jax.grad(loss)(jnp.asarray(new))

    cut = [mask & (np.asarray(gradient(jax.random.key(k))) == 0) for k in range(20)]
    assert {int(c.sum()) for c in cut} == {int(0.25 * mask.sum())}
    covariance = numpy_covariance(new, a, mask)
    assert all((covariance[c] > 0).all() for c in cut)
    assert len({c.tobytes() for c in cut}) > 1
    np.testing.assert_array_equal(cut[0], mask & (np.asarray(gradient(jax.random.key(0))) == 0))


@settings(deadline=None, max_examples=25)
@given(
    entropys=hnp.arrays(np.float32, SHAPE, elements=st.floats(0, 10, width=32)),
    mask=hnp.arrays(np.bool_, SHAPE),
    quantile=st.sampled_from([0.1, 0.2, 0.5, 0.8, 1.0]),
)
def test_the_top_entropy_mask_is_trls(entropys: Any, mask: Any, quantile: float) -> None:
    found = np.asarray(TOP_ENTROPY(np.where(mask, entropys, np.nan), mask, quantile))
    if not mask.any():
        assert not found.any()
        return
    threshold = np.quantile(entropys[mask].astype(np.float64), 1 - quantile)
    clear = np.abs(entropys - threshold) > 1e-4  # at the threshold rounding decides
    np.testing.assert_array_equal((found == (mask & (entropys >= threshold)))[clear], True)
    assert not found[~mask].any() and found.sum() >= 1


TOP_ENTROPY = jax.jit(top_entropy_mask)


def test_the_registry_says_what_a_trainer_must_know() -> None:
    assert {name for name, loss in POLICY_LOSSES.items() if loss.needs_whole_minibatch} == {"clip_cov", "kl_cov"}
    assert {name for name, loss in POLICY_LOSSES.items() if loss.draws} == {"clip_cov"}
    assert all({"aggregation", "scale_factor"} <= set(loss.options) for loss in POLICY_LOSSES.values())
    assert not any({"key", "rollout_is_weights"} & set(loss.options) for loss in POLICY_LOSSES.values())


def test_a_function_of_ones_own_is_a_policy_loss() -> None:
    def own(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any, norm: Norm, *, aggregation: str) -> Any:
        return aggregate(-advantages * log_probs, mask, aggregation, norm), {}

    loss = PolicyLoss.of(own)
    x = inputs()
    assert not loss.draws and set(loss.options) == {"aggregation"} and not loss.needs_whole_minibatch
    own.needs_whole_minibatch = True  # pyright: ignore[reportFunctionMemberAccess]
    assert PolicyLoss.of(own).needs_whole_minibatch
    found, _ = loss(*x, Norm.of(x[3]), key=KEY, aggregation="token-sum")
    np.testing.assert_allclose(found, run("gpg", inputs(), aggregation="token-sum")[0], rtol=1e-6)


def test_bypass_mode_is_checked() -> None:
    x = inputs()
    with pytest.raises(ValueError, match="'reinforced' is unknown; did you mean 'reinforce'"):
        POLICY_LOSSES["bypass_mode"](*x, Norm.of(x[3]), loss_type="reinforced")
    with pytest.raises(ValueError, match="'bypass_mode' takes no rollout_is_weights"):
        POLICY_LOSSES["bypass_mode"](*x, Norm.of(x[3]), rollout_is_weights=x[0])
