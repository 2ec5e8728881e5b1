"""What a step computes, counted: against sums over every token, pair and kernel."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm import peaks
from jaxrl_llm.accounting import Accounts, decoded_slots
from jaxrl_llm.chips import CHIPS, chip_of
from jaxrl_llm.costs import Job, Mesh, leaves
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.models.architecture import MoeConfig, TransformerConfig
from jaxrl_llm.phase_costs import phases
from jaxrl_llm.steps import rollout as rollout_room
from jaxrl_llm.steps.rollout import Cascade
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.trainer import Run, Stepped
from tests import tiny
from tests.plan_on_devices import LENGTHS, SHAPE, UNTIED
from tests.tiny_runs import Watched

P, R = LENGTHS["rollout__prompt_length"], LENGTHS["rollout__response_length"]
# 2 prompts with 2 responses each; the second response is empty, the third has tool output in it.
CASCADE = Cascade(width=4, halvings=1, min_rows=1)
pytestmark = pytest.mark.usefixtures("compile_once")
ROWS = Lengths(np.array([5, 24]), np.array([12, 0, 7, 1]), np.array([12, 0, 4, 1]))


def accounts(shape: TransformerConfig = SHAPE, **overrides: Any) -> Accounts:
    config = tiny.config(**{**LENGTHS, "data__train_batch_size": 2, **overrides})
    job = Job.of(config, shape)
    return Accounts(config, job, job if job.critic is not None else None, CASCADE)


def counted_one_by_one(shape: TransformerConfig, rows: Lengths) -> tuple[float, float, float]:
    """FLOPs of a forward pass: of kernels, of attention, of the head."""
    job = Job.of(tiny.config(**LENGTHS), shape)
    dense = {name: leaf for name, leaf in job.whole["layers"].items() if name != "experts"}
    kernels = sum(math.prod(x.shape) for x in leaves(dense) if "embed" in x.axes)
    if shape.moe:  # each token goes to some experts alone
        own = sum(math.prod(x.shape) for x in leaves(job.whole["layers"]["experts"]))
        kernels += own * shape.moe.per_token // shape.moe.num_experts
    tokens, pairs = 0, 0
    for row, length in enumerate(rows.response.tolist()):
        prompt = int(rows.prompt[row // rows.n])
        first = 0 if row % rows.n == 0 else prompt  # a prompt once for its responses
        for position in range(first, prompt + max(length - 1, 0)):
            tokens += 1
            for window in shape.windows or (0,) * shape.num_layers:
                pairs += min(position + 1, window or position + 1)
    attention = 2 * 2 * pairs * shape.num_heads * shape.head_dim  # scores, and what they weigh
    return 2.0 * tokens * kernels, attention, 2.0 * int(rows.sampled.sum()) * shape.width * shape.vocab_size


EXPERTS = dataclasses.replace(SHAPE, moe=MoeConfig(4, 2, 16, True))


@pytest.mark.parametrize("shape", [SHAPE, UNTIED, dataclasses.replace(SHAPE, windows=(3, 0)), EXPERTS])
def test_flops_are_those_of_every_token_and_pair(shape: TransformerConfig) -> None:
    kernels, attention, head = counted_one_by_one(shape, ROWS)
    found = accounts(shape, actor__epochs=2).count(ROWS, (ROWS, ROWS))
    forward = kernels + attention
    assert found["old_log_prob"].flops == found["ref"].flops == pytest.approx(forward + head)
    assert found["update_actor"].flops == pytest.approx(2 * 3 * (forward + head))
    assert found["gen"].flops == pytest.approx(2 * (forward + head))
    assert not {"values", "update_critic"} & set(found)


def test_what_is_frozen_has_no_gradient_of_its_own() -> None:
    kernels, attention, head = counted_one_by_one(SHAPE, ROWS)
    lora = accounts(model__lora_rank=4)
    tokens = lora.count(ROWS)["old_log_prob"].tokens
    added = 2.0 * tokens * sum(math.prod(x.shape) for x in leaves(lora.actor.trained))
    found = lora.count(ROWS)
    assert found["old_log_prob"].flops == pytest.approx(kernels + attention + added + head)
    assert found["update_actor"].flops == pytest.approx(2 * (kernels + head) + 3 * (attention + added))
    gae: dict[str, Any] = {"algorithm__estimator": "gae", "critic__epochs": 3}
    forward = kernels + attention
    for freeze, times in ((False, 3), (True, 1)):
        found = accounts(**gae, critic__freeze_trunk=freeze).count(ROWS)
        assert found["values"].flops == pytest.approx(forward)
        assert found["update_critic"].flops == pytest.approx(3 * times * forward)
        assert found["update_actor"].flops == pytest.approx(3 * (forward + head))


def test_full_rows_need_what_is_planned_but_for_the_pairs_that_are_masked() -> None:
    """The products of phase_costs.py, which are those of the compiled programs (test_plan.py)."""
    full = Lengths(np.full(2, P), np.full(4, R), np.full(4, R))
    made = accounts(actor__use_kl_loss=True)
    planned = phases(made.actor, Mesh())["ref"].flops
    found = made.count(full)["ref"]
    real, computed = 2 * P * (P + 1) // 2 + 4 * sum(range(P + 1, P + R)), 2 * (P**2 + 2 * (R - 1) * (P + R - 1))
    per_pair = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim
    assert found.flops == pytest.approx(planned - per_pair * (computed - real))
    assert found.tokens == found.slots == 2 * P + 4 * (R - 1)


def test_padding_is_told() -> None:
    found = accounts(actor__micro_batch_size=1, rollout__parts=2).count(ROWS, (ROWS,))
    tokens = 5 + 24 + 11 + 0 + 6 + 0
    assert (found["old_log_prob"].tokens, found["old_log_prob"].slots) == (tokens, 2 * P + 4 * (R - 1))
    # A micro-batch of one row computes the prompt for that row alone.
    assert (found["update_actor"].tokens, found["update_actor"].slots) == (tokens, 4 * P + 4 * (R - 1))
    # Two parts of two rows: of each the longer one goes on alone from the first token on.
    assert (found["gen"].tokens, found["gen"].slots) == (tokens, 2 * P + 11 + 6)


def test_slots_of_packed_lines_are_those_of_the_narrowest_that_hold_all() -> None:
    packed: dict[str, Any] = {"model__use_remove_padding": True, "model__packed_widths": (0.1, 12 / (2 * R))}
    found = accounts(**packed).count(ROWS)["old_log_prob"]
    assert found.slots == 2 * (P + 12), "12 tokens to the first prompt, 8 to the second"
    packed["model__packed_widths"] = (0.1,)
    assert accounts(**packed).count(ROWS)["old_log_prob"].slots == 2 * P + 4 * (R - 1)


@pytest.mark.parametrize(
    "cascade",
    [Cascade(0, 0), *(pytest.param(c, marks=pytest.mark.long) for c in (Cascade(4, 2, 1), Cascade(2, 3, 1, shards=2)))],
)
def test_slots_of_sampling_are_those_that_are_computed(monkeypatch: pytest.MonkeyPatch, cascade: Cascade) -> None:
    """Against the sampler itself, which counts its rows as it goes."""
    counted: list[int] = []
    model, given = tiny.model(), tiny.prompts(4, 6)
    params = tiny.params()
    inner = rollout_room.append

    def append(model: Any, params: Any, cache: Any, tokens: Any, mask: Any) -> Any:
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda: counted.append(tokens.shape[0]))
        return inner(model, params, cache, tokens, mask)

    monkeypatch.setattr(rollout_room, "append", append)
    stops = dataclasses.replace(rollout_room.no_stop_rules(model.vocab_size), ids=jax.numpy.arange(3))
    how: dict[str, Any] = {"n": 2, "width": 12, "sampling": Sampling(), "cascade": cascade}
    batch = jax.jit(partial(rollout_room.rollout, model, **how))(params, given, jax.random.key(1), stops=stops)
    jax.block_until_ready(batch)
    jax.effects_barrier()
    assert len(set(np.asarray(batch.response_length).tolist())) > 2
    assert decoded_slots(np.asarray(batch.response_length), cascade, 12) == sum(counted) > 0


def test_no_device_is_asked() -> None:
    """What is counted is on the host by then: neither the batch nor the state is looked at."""
    run: Any = object.__new__(Run)
    run._accounts, run._peak, run._timers = accounts(), 1e9, SimpleNamespace(seconds={"gen": 1.0, "step": 2.0})
    run._layout = SimpleNamespace(mesh=SimpleNamespace(size=2))
    nothing: dict[str, Any] = {"metrics": {}, "batch": None, "given": None, "texts": [], "scored": None}
    found = run._accounting(Stepped(**nothing, lengths=ROWS, generated=(ROWS,)), 2.0)
    flops = accounts().count(ROWS, (ROWS,))["gen"].flops
    assert found["perf/mfu/gen"] == pytest.approx(flops / 2e9) and "perf/mfu/actor" not in found


def test_a_run_tells_it(grpo: Watched) -> None:
    for line in grpo.lines()[1:]:
        phases_told = {name.rpartition("/")[2] for name in line if name.startswith("perf/model_tflops/")}
        assert phases_told == {"gen", "old_log_prob", "ref", "update_actor"} & {
            name.removeprefix("timing_s/") for name in line
        }
        total = sum(line[f"perf/model_tflops/{phase}"] for phase in phases_told)
        assert line["perf/per_device_tflops"] == pytest.approx(total)
        assert 0 < line["perf/real_token_ratio/gen"] <= 1 and line["perf/mfu/actor"] > 0
        assert line["perf/tokens_per_sec/gen"] == pytest.approx(1000 / line["timing_per_token_ms/gen"])


def test_lengths_follow_the_prompts() -> None:
    picked = Lengths.join([ROWS, ROWS]).take([3, 0])
    assert picked.prompt.tolist() == [24, 5] and picked.response.tolist() == [7, 1, 12, 0]
    assert picked.sampled.tolist() == [4, 1, 12, 0]


def test_devices_are_known_by_what_jax_calls_them() -> None:
    known = {
        "TPU v5p": "v5p",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA H200": "h200",
    }
    assert {kind: getattr(chip_of(kind), "name", None) for kind in known} == known
    assert not any(map(chip_of, ("cpu", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090", "TPU v4", "")))
    assert CHIPS["h100"] is chip_of("NVIDIA H100 80GB HBM3")


def test_a_peak_is_given_or_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert peaks.peak_flops(0.0, "float32") is None and peaks.peak_flops(2.5, "float32") == 2.5e12
    assert peaks.measured_flops("float32", seconds=0.0) > 1e8
    calls: list[str] = []
    monkeypatch.setattr(peaks, "measured_flops", lambda dtype: calls.append(dtype) or 7e9)
    settings = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path)}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        for _ in range(2):
            peaks._remembered.cache_clear()
            assert peaks.peak_flops(-1.0, "float32") == peaks.peak_flops(-1.0, "bfloat16") == 7e9
        assert calls == ["float32", "bfloat16"] and len(json.loads((tmp_path / peaks.FILE).read_text())) == 2
        for damaged in ("", "[1]", '{"x": "y"}'):
            (tmp_path / peaks.FILE).write_text(damaged)
            peaks._remembered.cache_clear()
            assert peaks.peak_flops(-1.0, "float32") == 7e9
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        peaks._remembered.cache_clear()
