"""Configuration: every error is found before a model is loaded, all at once, by key."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs import base
from jaxrl_llm import config as config_lib
from jaxrl_llm.algorithms.losses import POLICY_LOSSES
from jaxrl_llm.command_line import load_config
from jaxrl_llm.config_values import flatten, knobs
from jaxrl_llm.errors import UserError

RECIPE = """
from configs import base

def get_config():
    config = base.get_config()
    config.model.path = "some/model"
    config.data.train = "train.jsonl"
    config.reward.functions = ("number",)
    return config
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def errors_of(recipe: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def test_base_holds_every_knob_and_no_other():
    plain = base.get_config().to_dict()

    def keys(values: dict[str, Any], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in values.items():
            found |= keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
        return found

    assert keys(plain) == set(knobs(config_lib.Config))


def test_base_alone_lacks_only_what_has_no_default():
    with pytest.raises(UserError) as caught:
        config_lib.from_config_dict(base.get_config())
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(" = ")[0].strip() for line in lines] == ["config.model.path", "config.data.train"]


def test_every_knob_of_base_has_a_comment():
    lines = Path(base.__file__).read_text().splitlines()
    knob = re.compile(r'\s+"\w+": ')
    section = re.compile(r'\s+"\w+": (\{|_?\w+\(.*\),)$')
    bare = [
        line.strip()
        for above, line in itertools.pairwise(lines)
        if knob.match(line) and "#" not in line and not section.match(line) and not above.strip().startswith("#")
    ]
    assert bare == []


def test_overrides_are_typed_by_the_knob(recipe: Path):
    config = load_config(
        recipe,
        [
            "actor.clip_ratio=0.1",
            "optimizer.lr=1",
            "rollout.stop=('a', '\\n')",
            "rollout.stop_token_ids=[1, 2]",
            "data.eval=held_out.jsonl",
            "data.shuffle=false",
            "data.template_kwargs={'a': [1, 2]}",
            "data.system_prompt=3",
        ],
    )
    assert config.actor.clip_ratio == 0.1
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.rollout.stop == ("a", "\n")
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.data.eval == ("held_out.jsonl",)
    assert config.data.shuffle is False
    assert config.data.template_kwargs == {"a": (1, 2)}
    assert config.data.system_prompt == "3"


@pytest.mark.parametrize(("text", "value"), [("0.5_2", "0.5_2"), ("2", 2.0), ("0.5", 0.5), ("0.3_3.0", "0.3_3.0")])
def test_bounds_are_a_number_or_a_text(recipe: Path, text: str, value: float | str):
    config = load_config(recipe, [f"algorithm.rollout_correction.rollout_is_threshold={text}"])
    assert config.algorithm.rollout_correction.rollout_is_threshold == value


def test_overrides_as_values(recipe: Path):
    assert load_config(recipe, {"trainer.steps": 40}).trainer.steps == 40
    with pytest.raises(UserError, match=r"trainer\.steps: must be a whole number; found '40' \(str\)"):
        load_config(recipe, {"trainer.steps": "40"})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.tempurature=1", "config.rollout.tempurature: no such key; did you mean 'rollout.temperature'?"),
        ("trainer.top_p=1", "config.trainer.top_p: no such key; did you mean 'rollout.top_p'?"),
        ("rollouts.n=1", "config.rollouts: no such key; did you mean 'rollout'?"),
        ("rollout.stop_token_ids=0.8", "must be a tuple such as (1, 2); found 0.8 (float)"),
        ("reward.weights=0.8", "must be a tuple such as (0.5, 0.5); found 0.8 (float)"),
        ("rollout.n=True", "must be a whole number; found 'True' (str)"),
        ("rollout.n=2.0", "must be a whole number; found 2.0 (float)"),
        ("algorithm.lam=True", "must be a number; found 'True' (str)"),
        ("optimizer.lr=nan", "must be a number; found 'nan' (str)"),
        ("optimizer.lr=1e999", "must be finite, found inf"),
        ("data.shuffle=1", "must be True or False; found '1' (str)"),
        ("actor.clip_ratio=-0.1", "config.actor.clip_ratio: must be at least 0, found -0.1"),
        ("actor.epochs=0", "config.actor.epochs: must be at least 1, found 0"),
        ("rollout.temperature=0", "config.rollout.temperature: must be above 0, found 0"),
        ("rollout.top_p=1.5", "config.rollout.top_p: must be in (0, 1], found 1.5"),
        ("rollout.top_p=0", "config.rollout.top_p: must be in (0, 1], found 0"),
        ("rollout.response_length=0", "config.rollout.response_length: must be at least 1, found 0"),
        ("actor.loss_agg_mode=token_mean", "must be one of token-mean, token-sum"),
        ("rollout.n=1", "config.algorithm.estimator = 'grpo', config.rollout.n = 1: a group estimator"),
        ("algorithm.estimator=grop", "config.algorithm.estimator = 'grop': no such name; did you mean 'grpo'?"),
        ("algorithm.estimator=nowhere:f", "there is no module 'nowhere'"),
        ("algorithm.estimator=math:sine", "no 'sine' in math; did you mean 'sin'?"),
        ("algorithm.estimator=math:pi", "is not a callable"),
        (
            "reward.functions=numbr",
            "did you mean 'number'?",
        ),
        ("algorithm.rollout_correction.rollout_is_threshold=2_1", "rollout_is_threshold"),
        ("algorithm.rollout_correction.rollout_rs=token_k4", "did you mean 'token_k"),
        ("algorithm.estimator_kwargs={'eps': 1}", "no option 'eps'; did you mean 'epsilon'?"),
        ("actor.policy_loss=vanila", "did you mean 'vanilla'?"),
        ("actor.loss_kwargs={'clip': 1}", "no option 'clip'"),
        ("actor.mini_batch_size=3", "config.actor.mini_batch_size = 3, config.data.train_batch_size = 8"),
        ("actor.micro_batch_size=5", "must divide the 64 rows"),
        ("critic.warmup_steps=2", "there is no critic to warm up"),
        ("rollout.min_new_tokens=513", "no response can be that long"),
        ("trainer.steps=0", "config.trainer.steps = 0, config.trainer.epochs = 0: one of them must be above 0"),
        ("eval.interval=5", "evaluation needs a source of held-out prompts"),
        ("eval.n=4", "greedy responses are all the same"),
        ("data.weights=(1, 2)", "one weight per source"),
        ("data.on_bad_record=drop", "must be one of error, skip; found 'drop'"),
        ("data.train=a=b.jsonl", "'a=b.jsonl': only the sources of data.eval have names; leave a= out"),
        ("data.eval=('a=b.jsonl', 'a=c.jsonl')", "two sets are named 'a': 'a=b.jsonl' and 'a=c.jsonl'"),
        (
            "data.eval=my set=b.jsonl",
            "'my set' is no name of a set (letters, digits, _, . and -); did you mean 'my_set'?",
        ),
        ("mesh.fsdp=-1", "at most one axis"),
        ("mesh.fsdp=0", "must be at least 1, or -1"),
        (
            "rollout=None",
            "has 1 error(s):\n  config.rollout: expected a section with keys, found 'None'",
        ),
        ("model.dtype=bf16", "must be one of float32, bfloat16; found 'bf16'"),
    ],
)
def test_what_is_refused(recipe: Path, override: str, expected: str):
    assert expected in errors_of(recipe, override)


def test_a_decay_includes_its_warm_up(recipe: Path):
    load_config(recipe, ["optimizer.decay_steps=0", "optimizer.warmup_steps=3"])
    assert "must be longer" in errors_of(recipe, "critic.optimizer.decay_steps=3", "critic.optimizer.warmup_steps=3")


def test_all_errors_are_listed_at_once(recipe: Path):
    text = errors_of(
        recipe, "rollout.top_p=2", "actor.clip_ratio=-1", "rollout.n=1", "seeed=3", "actor.mini_batch_size=3"
    )
    lines = text.splitlines()
    assert lines[0] == "the configuration has 5 error(s):"
    assert len(lines) == 6  # clip_ratio_low and _high follow clip_ratio and are not blamed


def test_rules_that_read_a_wrong_value_are_silent(recipe: Path):
    assert errors_of(recipe, "rollout.n=0").splitlines()[1:] == ["  config.rollout.n: must be at least 1, found 0"]


def test_values_that_follow_from_others(recipe: Path):
    actor = load_config(recipe, ["actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4", "data.train_batch_size=16"]).actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.mini_batch_size) == (0.3, 0.4, 16)
    assert actor.loss_scale_factor == 512.0


def test_roles(recipe: Path):
    def roles(*overrides: str) -> tuple[bool, bool]:
        config = load_config(recipe, overrides)
        return config_lib.need_critic(config), config_lib.need_reference(config)

    assert roles() == (False, False)
    assert roles("algorithm.estimator=gae") == (True, False)
    assert roles("critic.enable=yes") == (True, False)
    assert roles("algorithm.use_kl_in_reward=true") == (False, True)
    assert roles("actor.use_kl_loss=true") == (False, True)
    assert "needs a critic" in errors_of(recipe, "algorithm.estimator=gae", "critic.enable=no")


def test_a_reference_that_is_moved_must_be_there(recipe: Path):
    load_config(recipe, ["reference.sync_steps=4", "reference.sync_alpha=0.6", "actor.use_kl_loss=true"])
    found = errors_of(recipe, "reference.sync_steps=4")
    assert "config.reference.sync_steps = 4" in found and "there is no reference to move" in found
    assert "it never is; set sync_steps" in errors_of(recipe, "reference.sync_alpha=0.6", "actor.use_kl_loss=true")
    assert "config.reference.sync_alpha: must be in (0, 1], found 0" in errors_of(recipe, "reference.sync_alpha=0")


def test_notices(recipe: Path):
    assert config_lib.notices(load_config(recipe)) == []
    found = config_lib.notices(
        load_config(recipe, ["actor.use_kl_loss=true", "actor.kl_loss_type=k1", "algorithm.use_kl_in_reward=true"])
    )
    assert ["zero in expectation" in found[0], "charged twice" in found[1]] == [True, True]
    truncated = ["rollout.top_p=0.9", "rollout.min_new_tokens=2"]
    (found,) = config_lib.notices(load_config(recipe, truncated))
    assert found.startswith("config.rollout.top_p, config.rollout.min_new_tokens: the sampler leaves out")
    corrected = [*truncated, "algorithm.rollout_correction.rollout_is=token"]
    assert config_lib.notices(load_config(recipe, corrected)) == []
    assert "rounded away" in config_lib.notices(load_config(recipe, ["model.param_dtype=bfloat16"]))[0]
    watched = ["reward.functions=('number',)", "reward.weights=(0.0,)"]
    assert "all scores are 0" in config_lib.notices(load_config(recipe, watched))[0]
    assert config_lib.notices(load_config(recipe, [*watched, "reward.model.path=a"])) == []
    unread = config_lib.notices(load_config(recipe, ["critic.path=a/b", "reference.path=c/d"]))
    assert [text.partition(":")[0] for text in unread] == [
        "config.critic.path = 'a/b' is not read", "config.reference.path = 'c/d' is not read"
    ]  # fmt: skip


def test_unset_knobs_leave_each_function_its_own(recipe: Path):
    for loss in POLICY_LOSSES:
        _, options = config_lib.chosen_policy_loss(load_config(recipe, [f"actor.policy_loss={loss}"]))
        assert options == {"scale_factor": 512.0}
    for estimator in ("rloo", "grpo_passk", "optimal_token_baseline", "gdpo"):
        _, options = config_lib.chosen_estimator(load_config(recipe, [f"algorithm.estimator={estimator}"]))
        assert options == {}
    gspo = load_config(recipe, ["actor.policy_loss=gspo"])
    assert config_lib.loss_aggregation(gspo) == "seq-mean-token-mean"
    assert config_lib.loss_aggregation(load_config(recipe)) == "token-mean"
    mode = "actor.loss_agg_mode=token-sum"
    assert config_lib.loss_aggregation(load_config(recipe, ["actor.policy_loss=gspo", mode])) == "token-sum"


def test_a_knob_that_the_chosen_function_does_not_have_is_refused(recipe: Path):
    text = errors_of(recipe, "actor.policy_loss=sapo", "actor.clip_ratio=0.1", "actor.clip_ratio_c=4")
    assert text.count("this loss has no such bound") == 3
    assert "no epsilon" in errors_of(recipe, "algorithm.estimator=rloo", "algorithm.epsilon=0.1")


def test_gdpo_weighs_its_rewards_as_configured(recipe: Path):
    gdpo = ["algorithm.estimator=gdpo", "reward.functions=('number', 'exact')", "reward.weights=(1.0, 0.5)"]
    _, options = config_lib.chosen_estimator(load_config(recipe, gdpo))
    assert options == {"weights": (1.0, 0.5)}
    assert "set actor.use_kl_loss instead" in errors_of(recipe, *gdpo, "algorithm.use_kl_in_reward=true")


def test_optional_numbers(recipe: Path):
    assert load_config(recipe, ["actor.clip_ratio_c=None"]).actor.clip_ratio_c is None
    assert load_config(recipe, ["actor.clip_ratio_c=4"]).actor.clip_ratio_c == 4.0
    assert "must be above 1, found 0.5; or None" in errors_of(recipe, "actor.clip_ratio_c=0.5")
    assert "must be a number; found 'x' (str); or None" in errors_of(recipe, "actor.clip_ratio_c=x")
    assert load_config(recipe, ["actor.loss_agg_mode=None"]).actor.loss_agg_mode is None


def test_a_key_inside_a_dict_is_read_as_python_writes_it(recipe: Path):
    config = load_config(recipe, ["data.template_kwargs.enable_thinking=False", "data.template_kwargs.style=plain"])
    assert config.data.template_kwargs == {"enable_thinking": False, "style": "plain"}


def test_overrides_of_a_written_configuration_move_what_follows(recipe: Path, tmp_path: Path):
    written = tmp_path / "config.json"
    written.write_text(config_lib.to_json(load_config(recipe, ["actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4"])))
    config = load_config(written, ["actor.clip_ratio=0.1", "data.train_batch_size=16", "rollout.response_length=64"])
    actor = config.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.4)  # the latter was given, and is kept
    assert (actor.mini_batch_size, config.critic.mini_batch_size, actor.loss_scale_factor) == (16, 16, 64.0)


def test_another_length_is_refused_where_a_schedule_decays_over_the_run(recipe: Path):
    for given in (["optimizer.schedule=linear"], ["algorithm.estimator=gae", "critic.optimizer.schedule=cosine"]):
        old, new = load_config(recipe, given), load_config(recipe, [*given, "trainer.steps=7"])
        allowed, refused = config_lib.resume_differences(old, new)
        assert not allowed
        assert "decays over the run" in refused[0]
    given = ["optimizer.schedule=linear", "optimizer.decay_steps=50"]
    old, new = load_config(recipe, given), load_config(recipe, [*given, "trainer.steps=7"])
    assert config_lib.resume_differences(old, new)[1] == []


def test_chosen_functions_take_their_options_from_the_config(recipe: Path):
    config = load_config(recipe, ["algorithm.scale=none", "algorithm.estimator_kwargs={'epsilon': 0.5}"])
    estimator, options = config_lib.chosen_estimator(config)
    assert estimator.fn.__name__ == "grpo"
    assert options == {"scale": "none", "epsilon": 0.5}
    _, options = config_lib.chosen_policy_loss(load_config(recipe, ["actor.clip_ratio_high=0.28"]))
    assert options == {"clip_ratio_high": 0.28, "scale_factor": 512.0}


def test_estimator_of_ones_own(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_estimator.py").write_text(
        "def double(rewards, mask, *, factor=2.0):\n    return rewards, rewards\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(recipe, ["algorithm.estimator=my_estimator:double", "rollout.n=1"])
    estimator, options = config_lib.chosen_estimator(config)
    assert (dict(estimator.options), options) == ({"factor": 2.0}, {})


@pytest.mark.parametrize(
    ("overrides", "devices", "expected"),
    [
        ([], 8, {"data": 8, "fsdp": 1, "tensor": 1}),
        (["mesh.fsdp=2", "mesh.tensor=2"], 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        (["mesh.data=1"], 8, "must multiply to the number of devices, 8"),
        (["mesh.tensor=3"], 8, "must multiply to the number of devices, 8"),
        (["data.train_batch_size=6"], 4, "config.data.train_batch_size: prompts a step"),
        (["actor.micro_batch_size=32"], 4, "must be a multiple of 128, found 64"),
        (["trainer.score_micro_batch_size=16"], 8, "config.trainer.score_micro_batch_size"),
        (["actor.policy_loss=clip_cov", "actor.micro_batch_size=8"], 4, "selects over the whole mini-batch"),
        (["actor.policy_loss=clip_cov", "actor.micro_batch_size=16"], 4, {"data": 4, "fsdp": 1, "tensor": 1}),
    ],
)
def test_devices(recipe: Path, overrides: list[str], devices: int, expected: Any):
    config = load_config(recipe, overrides)
    if isinstance(expected, dict):
        assert config_lib.check_devices(config, devices) == expected
    else:
        with pytest.raises(UserError, match=expected):
            config_lib.check_devices(config, devices)


def test_json_round_trip(recipe: Path, tmp_path: Path):
    config = load_config(recipe, ["rollout.stop=('a', 'b')", "data.source_kwargs={'x': (1, (2, 'y')), 'z': None}"])
    assert config_lib.from_json(config_lib.to_json(config)) == config
    written = tmp_path / "config.json"
    written.write_text(config_lib.to_json(config))
    assert load_config(written) == config


def test_a_run_from_before_a_knob_came_has_its_default(recipe: Path, tmp_path: Path):
    config = load_config(recipe, {"actor.clip_ratio": 0.1})
    plain = json.loads(config_lib.to_json(config))
    del (
        plain["data"]["on_bad_record"],
        plain["model"]["lora_rank"],
        plain["critic"]["optimizer"]["b1"],
        plain["logging"],
    )
    plain["actor"]["loss_kwargs"] = {}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    for found in (config_lib.from_json(json.dumps(plain)), load_config(tmp_path / "config.json")):
        assert dataclasses.replace(found, logging=config.logging) == config
    plain["actor"]["clip_ration"] = 0.1
    with pytest.raises(UserError, match="config.actor.clip_ration: no such key"):
        config_lib.from_json(json.dumps(plain))


def test_kwargs_must_survive_a_json_file(recipe: Path):
    with pytest.raises(UserError, match=r"config\.data\.source_kwargs: may hold numbers"):
        load_config(recipe, {"data.source_kwargs": {"f": print}})


def test_resume(recipe: Path):
    old = load_config(recipe)
    new = load_config(recipe, ["trainer.steps=7", "eval.n=1", "logging.progress=none", "actor.clip_ratio=0.1"])
    allowed, refused = config_lib.resume_differences(old, new)
    assert allowed == [
        "config.trainer.steps: was 100, now 7",
        "config.logging.progress: was 'auto', now 'none'",
    ]
    assert [line.split(":")[0] for line in refused] == [
        "config.actor.clip_ratio",
        "config.actor.clip_ratio_low",
        "config.actor.clip_ratio_high",
    ]
    assert config_lib.resume_differences(old, old) == ([], [])


def test_resumable_keys_exist():
    assert all(any(key.startswith(allowed) for key in knobs(config_lib.Config)) for allowed in config_lib.RESUMABLE)


def test_config_is_frozen(recipe: Path):
    config = load_config(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert flatten(config)["rollout.n"] == 8
