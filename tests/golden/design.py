"""Where this project answers otherwise on purpose: recognized from a case's `quirk` and inputs, never from its name.

A rule looks at a case and says what of it is not compared, and checks our own rule there. What no rule excuses is
compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.algorithms.advantages import ESTIMATORS
from tests.golden.cases import Adapter, Case, Outcome, Outputs, Verdict, compute, difference

WHITENED_OVER_BATCH = ("reinforce_plus_plus_baseline", "gdpo")
ROW_METRICS = re.compile(r"ppl|seq|current_kl|coef_after")
ROW_METRICS_BY_ROW = re.compile(r"is\.(ratio_fraction|max|min|batch_norm)|rs\.\w+_fraction")


@dataclass(frozen=True)
class Excuse:
    """What of a case is not compared, why, and what holds instead."""

    why: str
    compared: np.ndarray | None = None  # bool [B] or [B, R], the entries still compared; None for all
    skipped: frozenset[str] = frozenset()  # outputs or scalars not compared
    scale: float = 1.0  # expected advantages / ours, on the entries compared
    check: Callable[[Outputs], str] = lambda found: ""  # what of our own rule does not hold, in words


def judge(case: Case, adapter: Adapter) -> Outcome:
    """Runs one case and compares it with what is expected of it."""
    try:
        found = compute(case, adapter)
    except (ValueError, NotImplementedError) as error:
        if case.raises:
            return Outcome(case, Verdict.PASSED)
        return Outcome(case, Verdict.FAILED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(case, Verdict.FAILED, f"{type(error).__name__}: {error}")
    if not case.raises and not (text := difference(case, found)):
        return Outcome(case, Verdict.PASSED)
    excuses = list(_instead_of_raising(case, adapter) if case.raises else _excuses(case, adapter, found))
    if not excuses:
        return Outcome(case, Verdict.FAILED, f"{case.raises} was not raised" if case.raises else text)
    text = "; ".join(filter(None, [_compare_rest(case, found, excuses), *(e.check(found) for e in excuses)]))
    if text:
        return Outcome(case, Verdict.FAILED, text)
    return Outcome(case, Verdict.BY_DESIGN, "; ".join(e.why for e in excuses))


def _compare_rest(case: Case, found: Outputs, excuses: list[Excuse]) -> str:
    compared = None
    for excuse in excuses:
        if excuse.compared is not None:
            part = excuse.compared if excuse.compared.ndim == 2 else excuse.compared[:, None]
            compared = part if compared is None else compared & part
    scale = float(np.prod([e.scale for e in excuses]))
    scaled = {k: v * scale if k in ("advantages", "returns") else v for k, v in found.items()}
    return difference(case, scaled, compared, frozenset().union(*(e.skipped for e in excuses)))


def _excuses(case: Case, adapter: Adapter, found: Outputs) -> Iterator[Excuse]:
    for rule in (_outside_the_mask, _group_rows, _empty_rows_in_metrics, _empty_denominator, _rounded_logits):
        yield from rule(case, adapter)
    yield from _rounded_differences(case, adapter, found)


def _instead_of_raising(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """Where they refuse values that a jitted function cannot refuse, and that mean "nothing to learn from"."""
    if case.fn == "grpo_passk" and (lonely := _group_size(case) == 1).any():
        reward = _valid(case) & ~lonely
        yield Excuse("a group of one gives 0", check=_all_of(_zero(lonely), _same_without(case, adapter, reward)))
    if case.fn in ("gae", "reinforce_plus_plus") and _mask(case).sum() < 2:
        yield Excuse("whitening fewer than two tokens gives 0", check=_zero(np.ones(len(_mask(case)), bool)))
    if case.fn == "rollout_correction" and (case.kwargs.get("mask_all_zero") or not _mask(case).any()):
        yield Excuse("an empty denominator gives 0", check=_finite)


def _outside_the_mask(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """Advantages, returns and whitened values are 0 outside the mask."""
    if case.fn not in ESTIMATORS and case.fn != "masked_stats":
        return
    mask = _mask(case)
    if any((value[~mask] != 0).any() for value in case.outputs.values() if value.shape == mask.shape):

        def check(found: Outputs) -> str:
            spilled = [k for k, v in found.items() if v.shape == mask.shape and (v[~mask] != 0).any()]
            return f"{spilled} are not 0 outside the mask" if spilled else ""

        yield Excuse("0 outside the mask", compared=mask, check=check)


def _group_rows(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """Rows without tokens are in no statistic, rewards outside the mask count for nothing, a group of one and a group
    of equal rewards give exactly 0."""
    name = case.fn.removesuffix("_vectorized")
    if name not in ESTIMATORS or not ESTIMATORS[name].group:
        return
    mask, size = _mask(case), _group_size(case)
    valid = _valid(case)
    lonely, flat = valid & (size < 2), _flat_groups(case)
    leaking = np.zeros(len(mask), bool)
    if "rewards" in case.inputs and "baseline" not in name.replace("plus_baseline", ""):
        leaking = (np.where(mask, 0, case.inputs["rewards"]) != 0).any(-1)
    token_baseline = name.endswith("token_baseline")
    touched = lonely | _siblings(case, ~valid)
    touched |= _siblings(case, leaking) if not token_baseline else False
    touched |= flat & (_rounds_differently(case) | token_baseline)
    if not touched.any():
        return
    why = {
        "a row without tokens is in no statistic": not valid.all(),
        "a reward outside the mask counts for nothing": leaking.any() and not token_baseline,
        "a group of one gives 0": lonely.any(),
        "equal rewards give 0": (touched & flat & ~lonely).any(),
    }
    whitened = name in WHITENED_OVER_BATCH
    yield Excuse(
        "; ".join(text for text, holds in why.items() if holds),
        compared=np.zeros(len(mask), bool) if whitened else ~touched,
        scale=_gpg_scale(case) if name == "gpg" else 1.0,
        check=_all_of(_zero(~valid | lonely | (flat & (not whitened))), _same_without(case, adapter, valid)),
    )


def _empty_rows_in_metrics(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """Means over rows are over the rows that have tokens."""
    if "mask" not in case.inputs or (valid := _valid(case)).all() or "scalars" not in case.outputs:
        return
    if case.fn not in ("rollout_correction", "apply_kl_penalty", "policy_loss"):
        return
    settings = case.kwargs | case.kwargs.get("rollout_correction", {})
    by_row = settings.get("rollout_is") == "sequence" or "seq_" in (settings.get("rollout_rs") or "")
    skipped = {n for n in case.scalar_names if ROW_METRICS.search(n) or (by_row and ROW_METRICS_BY_ROW.search(n))}
    if skipped:
        check = _same_without(case, adapter, valid)
        yield Excuse("a row without tokens is in no statistic", skipped=frozenset(skipped), check=check)


def _empty_denominator(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """0 / 0 is 0."""
    if not case.quirk.startswith(("0/0", "all weights zeroed")):
        return
    lost = {name: np.isnan(value) for name, value in case.outputs.items() if np.isnan(value).any()}
    skipped = {case.scalar_names[i] for i in np.flatnonzero(lost.pop("scalars", []))} | set(lost)

    def check(found: Outputs) -> str:
        wrong = [name for name, where in lost.items() if (found[name][where] != 0).any()]
        return f"{wrong} are not 0 where the denominator is" if wrong else ""

    yield Excuse("an empty denominator gives 0", skipped=frozenset(skipped), check=_all_of(check, _finite))


def _rounded_logits(case: Case, adapter: Adapter) -> Iterator[Excuse]:
    """In float32 they divide large logits by the temperature, and take the entropy as logsumexp(x) − Σ π x: both lose
    digits that ours, which subtracts the maximum first, keeps."""
    if case.fn not in ("entropy_logprob", "entropy_loss") or case.dtype != "float32":
        return
    largest = np.abs(case.inputs["logits"]).max() / case.kwargs.get("temperature", 1.0)
    lost = 8 * np.finfo(np.float32).eps * largest
    names = list(case.outputs)

    def check(found: Outputs) -> str:
        far = [name for name in names if not np.allclose(found[name], case.outputs[name], rtol=1e-4, atol=lost)]
        exact = _exact(case, adapter)
        wrong = [name for name in names if not np.allclose(found[name], exact[name], **case.tolerance)]
        return " ".join([f"{far} differ by more than rounding"] * bool(far) + [f"{wrong} are inexact"] * bool(wrong))

    yield Excuse("the digits of large logits are kept", skipped=frozenset(names), check=check)


def _rounded_differences(case: Case, adapter: Adapter, found: Outputs) -> Iterator[Excuse]:
    """Their float32 differences of large returns lose the digits that cancel; ours are taken from the group's mean."""
    if case.fn not in ESTIMATORS or case.dtype != "float32" or "index" not in case.inputs or not found:
        return
    expected = case.outputs["advantages"]
    sizes = np.abs(case.inputs.get("rewards", np.zeros_like(expected)))
    largest = np.array([sizes[_siblings(case, row)].max() for row in np.eye(len(expected), dtype=bool)])
    apart = np.abs(found["advantages"] - expected)
    lost = (apart > 1e-4 * np.abs(expected)) & (apart <= 4 * np.finfo(np.float32).eps * largest[:, None])

    def check(found: Outputs) -> str:
        exact = _exact(case, adapter)["advantages"]
        return "" if np.allclose(found["advantages"][lost], exact[lost], **case.tolerance) else "advantages are inexact"

    if lost.any():
        yield Excuse("differences of large returns are exact", compared=~lost, check=check)


def _exact(case: Case, adapter: Adapter) -> Outputs:
    """The answer in float64 to the inputs as the case's dtype holds them."""
    inputs = {k: v.astype(case.dtype) if v.dtype.kind == "f" else v for k, v in case.inputs.items()}
    return compute(replace(case, inputs=inputs, dtype="float64"), adapter)


def _mask(case: Case) -> np.ndarray:
    return case.inputs["mask"] > 0


def _valid(case: Case) -> np.ndarray:
    """Rows with any token."""
    return np.asarray(_mask(case).any(-1))


def _group_size(case: Case) -> np.ndarray:
    """Rows with tokens in each row's group."""
    index, valid = case.inputs["index"], _valid(case)
    return (valid[None, :] & (index[:, None] == index[None, :])).sum(-1)


def _siblings(case: Case, rows: np.ndarray) -> np.ndarray:
    """Rows whose group has one of `rows`."""
    return np.isin(case.inputs["index"], case.inputs["index"][rows])


def _scores(case: Case) -> np.ndarray:
    """[B, K], in the case's dtype."""
    if "components" in case.inputs:
        return case.inputs["components"].T.astype(case.dtype)
    return np.where(_mask(case), case.inputs["rewards"], 0).astype(case.dtype).sum(-1, keepdims=True)


def _flat_groups(case: Case) -> np.ndarray:
    """Rows with tokens whose siblings' scores all equal theirs."""
    valid, scores = _valid(case), _scores(case)
    same = (scores[:, None, :] == scores[None, :, :]).all(-1)
    siblings = case.inputs["index"][:, None] == case.inputs["index"][None, :]
    return valid & (same | ~siblings | ~valid[None, :]).all(-1)


def _rounds_differently(case: Case) -> np.ndarray:
    """Rows of groups whose mean, in float32 or in the case's dtype, is not quite every score."""
    index, valid = case.inputs["index"], _valid(case)
    out = np.zeros(len(index), bool)
    for group in np.unique(index):
        rows = valid & (index == group)
        scores = _scores(case)[rows]
        for dtype in (case.dtype, "float32"):
            mean = scores.astype(dtype).mean(0, dtype=dtype) if rows.any() else 0
            out[rows] |= bool((scores - mean != 0).any())
    return out


def _gpg_scale(case: Case) -> float:
    """Their rows over rewarded rows count rows without tokens and rewards outside the mask."""
    mask, rewards = _mask(case), case.inputs["rewards"]
    theirs = len(mask) / max(1, np.count_nonzero(rewards.sum(-1)))
    return theirs / (mask.any(-1).sum() / max(1, np.count_nonzero(np.where(mask, rewards, 0).sum(-1))))


def _zero(rows: np.ndarray) -> Callable[[Outputs], str]:
    def check(found: Outputs) -> str:
        return f"advantages of rows {np.flatnonzero(rows)} are not 0" if (found["advantages"][rows] != 0).any() else ""

    return check


def _finite(found: Outputs) -> str:
    bad = [name for name, value in found.items() if not np.isfinite(value).all()]
    return f"{bad} are not finite" if bad else ""


def _same_without(case: Case, adapter: Adapter, rows: np.ndarray) -> Callable[[Outputs], str]:
    """The rows kept get the same answer if the others, and rewards outside the mask, are not there at all."""

    def keep(name: str, value: np.ndarray) -> np.ndarray:
        if name == "components":
            return value[:, rows]
        value = np.where(_mask(case), value, 0) if name == "rewards" else value
        return value[rows]

    def check(found: Outputs) -> str:
        if not rows.any():
            return ""
        # In float64, whatever the case's dtype: the rule is the same, and so are the compiled programs.
        found = found if case.dtype == "float64" else _exact(case, adapter)
        inputs = {name: keep(name, value) for name, value in case.inputs.items()}
        for name, alone in _exact(replace(case, inputs=inputs), adapter).items():
            mine = found[name] if found[name].shape == alone.shape else found[name][rows]
            if not np.allclose(mine, alone, equal_nan=True, rtol=1e-6, atol=1e-8):
                return f"{name} depends on rows {np.flatnonzero(~rows)} or on rewards outside the mask"
        return ""

    return check


def _all_of(*checks: Callable[[Outputs], str]) -> Callable[[Outputs], str]:
    return lambda found: "; ".join(filter(None, (check(found) for check in checks)))
