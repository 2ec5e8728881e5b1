from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import BUILT_IN, batched, jax_reward, make_rewards, resolve
from jaxrl_llm.rewards.gold import gold_answer
from jaxrl_llm.rewards.numbers import last_number
from jaxrl_llm.run_files import to_line


def score(functions, responses=("7",), records=None, **kwargs):
    records = records or [{"answer": "7"}] * len(responses)
    prompts = [f"prompt {i}" for i in range(len(responses))]
    return make_rewards(functions, **kwargs).score(prompts, list(responses), records)


def length(prompt, response, record):
    return len(response)


# --- forms


def test_the_own_form_sees_prompt_response_and_record():
    seen = []

    def spy(prompt, response, record):
        seen.append((prompt, response, record["answer"]))
        return 0.5

    found = score([spy], ["a", "b"], [{"answer": 1}, {"answer": 2}])
    assert seen == [("prompt 0", "a", 1), ("prompt 1", "b", 2)]
    np.testing.assert_array_equal(found.scores, [[0.5], [0.5]])
    assert found.scores.dtype == np.float32 and found.valid.dtype == np.bool_ and found.valid.all()
    assert (found.num_failed, found.failures) == (0, [])


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1), np.bool_(True), Fraction(1)])
def test_every_kind_of_number_is_a_score(value):
    np.testing.assert_array_equal(score([lambda p, r, c: value]).scores, [[1.0]])


def test_the_batched_form_sees_all_rows():
    @batched
    def longest(prompts, responses, records):
        assert len(prompts) == len(records) == len(responses)
        most = max(map(len, responses))
        return np.array([len(response) == most for response in responses])

    np.testing.assert_array_equal(score([longest], ["a", "bbb", "cc"]).scores[:, 0], [0, 1, 0])


def test_verls_form_is_known_by_its_parameters():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(solution_str == ground_truth), "acc": data_source, "index": extra_info["index"]}

    record = {"data_source": "math", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    found = score([compute_score], ["7", "8"], [record] * 2)
    np.testing.assert_array_equal(found.scores[:, 0], [1, 0])
    assert found.extras[0] == {"compute_score/acc": "math", "compute_score/index": 3}

    def without_extra(data_source, solution_str, ground_truth):
        return solution_str == ground_truth

    def in_batches(data_sources, solution_strs, ground_truths, extra_infos):
        return [s == t for s, t in zip(solution_strs, ground_truths, strict=True)]

    found = score([without_extra, in_batches], ["7", "8"], [{"answer": "7"}] * 2)
    np.testing.assert_array_equal(found.scores, [[1, 1], [0, 0]])


def test_the_jax_form_is_left_to_the_steps():
    @jax_reward(target="answer")
    def on_tokens(responses, mask, record_arrays):
        raise AssertionError("not to be called here")

    rewards = make_rewards([length, on_tokens])
    assert rewards.jax_functions == {1: on_tokens}
    found = rewards.score(["p"], ["ab"], [{}])
    np.testing.assert_array_equal(found.scores, [[2.0, 0.0]])
    assert found.valid.all()


def test_other_forms_are_refused():
    async def later(prompt, response, record):
        return 1.0

    for function, message in [
        (lambda completions: 1.0, r"takes \(completions\); expected \(prompt, response, record\)"),
        (later, "async"),
        (3, "is a int, expected a function"),
    ]:
        with pytest.raises(UserError, match=message):
            make_rewards([function])


# --- failures


def failing(kind):
    def broken(prompt, response, record):
        if response == "good":
            return 1.0
        match kind:
            case "raises":
                raise RuntimeError("the reason")
            case "none":
                return None
            case "nan":
                return math.nan
            case "inf":
                return {"score": 1e300, "note": "kept"}
            case "exit":
                sys.exit(1)
            case "recursion":
                return broken(prompt, response, record)

    return broken


@pytest.mark.parametrize("kind", ["raises", "none", "nan", "inf", "exit", "recursion"])
def test_a_row_fails_alone(kind):
    found = score([length, failing(kind)], ["good", "bad", "good"])
    np.testing.assert_array_equal(found.valid, [True, False, True])
    np.testing.assert_array_equal(found.scores[:, 1], [1, 0, 1])
    np.testing.assert_array_equal(found.scores[:, 0], [4, 3, 4])
    assert found.num_failed == len(found.failures) == 1
    assert found.failures[0].startswith("row 1, reward 'broken'") and len(found.failures[0]) < 5000


def test_the_traceback_and_the_extras_of_a_failed_row_are_kept():
    assert 'raise RuntimeError("the reason")' in score([failing("raises")]).failures[0]
    assert score([failing("inf")]).extras == [{"broken/note": "kept"}]


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return {"score": 1.0, "parsed": value}


@pytest.mark.parametrize(
    "returned, kept",
    [({"score": 1.0, "n": 10**400}, True), (nested(50), True), (nested(51), False), (nested(400), False)],
)
def test_extras_that_a_run_could_not_write_fail_their_row(returned, kept):
    """A number that is no float is kept; what is nested so deeply that a recursion would end in it is not."""
    found = make_rewards([lambda prompt, response, record: returned]).score([""], [""], [{}])
    assert found.valid.tolist() == [kept]
    json.loads(to_line(found.extras[0]))
    assert kept or "nested more than 50 deep" in found.failures[0]


def test_a_record_belongs_to_its_row():
    """As in a worker: the rows of a prompt have one record, and a function may do with it what it likes."""

    def taking(prompt, response, record):
        record["deep"]["list"].append(1)
        return float(record.pop("answer")) + len(record["deep"]["list"])

    record = {"answer": "3", "deep": {"list": []}}
    found = make_rewards([taking]).score([""] * 3, [""] * 3, [record] * 3)
    assert found.scores[:, 0].tolist() == [4.0] * 3 and record == {"answer": "3", "deep": {"list": []}}
    every = batched(lambda prompts, responses, records: [taking("", "", dict(r)) for r in records])
    assert make_rewards([every]).score([""] * 2, [""] * 2, [record] * 2).scores[:, 0].tolist() == [4.0, 5.0]
    assert record["deep"] == {"list": []}


def test_a_batched_function_that_raises_fails_every_row():
    @batched
    def broken(prompts, responses, records):
        raise RuntimeError("the reason")

    found = score([broken], ["a", "b"])
    assert not found.valid.any() and "the reason" in found.failures[0]


@pytest.mark.parametrize(
    "returned, message",
    [
        ("1.0", r"reward 'wrong' returned '1.0' \(str\); expected a number"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        (1j, r"\(complex\)"),
        ({"acc": 1.0}, r"a dict without 'score' \(found: acc\)"),
        ({"score": "1"}, r"returned '1' \(str\)"),
    ],
)
def test_what_is_no_score_ends_the_run_and_names_the_function(returned, message):
    def wrong(prompt, response, record):
        return returned

    with pytest.raises(UserError, match=message):
        score([wrong])


def test_a_wrong_type_is_found_before_there_are_responses():
    calls = []

    def fails_on_nothing(prompt, response, record):
        calls.append((prompt, response, record))
        raise ValueError("empty")

    make_rewards([fails_on_nothing, "exact"]).try_out("1+1=", {"answer": "2"})
    assert calls == [("1+1=", "", {"answer": "2"})]
    with pytest.raises(UserError, match="reward '<lambda>' returned 'p'"):
        make_rewards([lambda prompt, response, record: prompt]).try_out("p", {"answer": "2"})


def test_a_wrong_number_of_scores_names_the_function():
    for returned, message in [([1.0], "returned 1 scores for 2 rows"), (1.0, "returned a float; expected a list of 2")]:

        @batched
        def wrong(prompts, responses, records, returned=returned):
            return returned

        with pytest.raises(UserError, match=f"reward 'wrong' {message}"):
            score([wrong], ["a", "b"])


# --- several rewards


def test_rewards_have_names_and_weights_in_order():
    rewards = make_rewards(["number", length, "number", "format(pattern='7')"], weights=[1, 0.5, 2, 0])
    assert rewards.names == ("number", "length", "number#2", "format")
    np.testing.assert_array_equal(rewards.weights, np.array([1, 0.5, 2, 0], np.float32))
    found = rewards.score(["p"], ["7"], [{"answer": "7"}])
    np.testing.assert_array_equal(found.scores, [[1, 1, 1, 1]])  # weights are the advantage phase's business
    np.testing.assert_array_equal(make_rewards([length]).weights, [1.0])


def test_rows_go_to_the_functions_of_their_data_source():
    def source(prompt, response, record):
        assert record.get("data_source") in ("b", "c", None)
        return {"score": 1.0, "here": True}

    rewards = make_rewards([length, source], data_sources=["", "b, c"])
    records = [{"data_source": "a"}, {"data_source": "b"}, {"data_source": "c"}, {}]
    found = rewards.score([""] * 4, ["xx"] * 4, records)
    np.testing.assert_array_equal(found.scores, [[2, np.nan], [2, 1], [2, 1], [2, 1]])
    assert found.valid.all()
    assert [bool(extras) for extras in found.extras] == [False, True, True, True]


def test_a_row_that_no_function_takes_has_failed_and_is_found_beforehand():
    rewards = make_rewards([length], data_sources=["a"])
    found = rewards.score([""], ["xx"], [{"data_source": "z"}])
    assert not found.valid.any() and found.failures == ["row 0: no reward function takes data_source 'z'"]
    rewards.check([{"data_source": "a"}, {}])
    with pytest.raises(UserError, match=r"no function scores 'z' \(known: a\)"):
        rewards.check([{"data_source": "a"}, {"data_source": "z"}])


def test_no_rows_give_no_scores():
    found = make_rewards(["number", length]).score([], [], [])
    assert found.scores.shape == (0, 2) and found.valid.shape == (0,)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(UserError, match="reward.weights: 2 values for 1 functions"):
        make_rewards(["number"], weights=[1, 2])
    with pytest.raises(UserError, match="at least one reward"):
        make_rewards([])


# --- names


def test_functions_are_found_by_dotted_path_and_file(tmp_path):
    assert resolve("math:hypot") is resolve("math.hypot") is math.hypot
    file = tmp_path / "mine.py"
    file.write_text("def f(prompt, response, record, at_least=1):\n    return len(response) >= at_least\n")
    assert resolve(f"{file}:f") is resolve(f"{file}:f")
    rewards = make_rewards([f"{file}:f(at_least=3)"])
    assert rewards.names == ("f",)
    np.testing.assert_array_equal(rewards.score(["", ""], ["ab", "abc"], [{}, {}]).scores[:, 0], [0, 1])


@pytest.mark.parametrize(
    "name, message",
    [
        ("nubmer", "no built-in reward 'nubmer'; did you mean 'number'"),
        ("jaxrl_llm.rewards.numbers:nmber", "did you mean 'number'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("format(patern='a')", "'format' has no argument 'patern'; did you mean 'pattern'"),
        ("here/rewards.py:f", "there is no file"),
    ],
)
def test_an_unknown_name_names_the_nearest(name, message):
    with pytest.raises(UserError, match=message):
        resolve(name)


def test_built_in_functions_can_be_sent_to_another_process():
    for function in BUILT_IN.values():
        assert pickle.loads(pickle.dumps(function)) is function


def test_no_jax_is_imported():
    modules = "jaxrl_llm.rewards, jaxrl_llm.tasks, jaxrl_llm.sources, jaxrl_llm.dotted"
    program = f"import {modules}, sys; print(sorted({{'jax', 'flax', 'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- numbers


@pytest.mark.parametrize(
    "text, value",
    [
        ("The answer is 42.", 42), ("$1,234.50", Fraction("1234.5")), ("18.00", 18), (".5", Fraction(1, 2)),
        ("...7", 7),
        ("-3", -3), ("x=-3", -3), ("−8", -8), ("-$5", -5), ("$-5", -5), (r"\$5", 5), ("5-3", 3), ("5 - 3", 3),
        ("(2)-3", 3),
        ("3/4", Fraction(3, 4)), ("10/2=5", 5), (r"\frac{1}{2}", Fraction(1, 2)), (r"-\frac12 7", 7), ("1/0", None),
        ("1,2,3", 3), ("1,2345", 2345), ("10,000", 10000), ("7, see section 1.2.3", 7), ("5 CO2", 5), ("5km", 5),
        ("3rd", 3),
        ("1e3", 1000), ("7 1e9999", 7), ("50%", 50), ("答案是7。", 7), ("١٢", None), ("", None), ("none", None),
        ("**18**", 18),
        ("4 " + "9" * 301, None), ("9" * 300, 10**300 - 1), ("- 5 apples", 5),
    ],
)  # fmt: skip
def test_the_last_number(text, value):
    assert last_number(text) == value


@settings(deadline=None)
@given(
    st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "{}.0", "so {}.", "= {} apples", "3 or {}", "{}/1"])
)
def test_every_spelling_of_a_number_is_right(value, spelling):
    text = spelling.format(value)
    assert resolve("number")("", text, {"answer": value}) == {"score": 1.0, "pred": str(value)}
    assert resolve("number")("", text, {"answer": value + 1}) == {"score": 0.0, "pred": str(value)}
    assert resolve("gsm8k")("", f"1 {text}\n#### {value:,}\n5", {"answer": f"#### {value}"})["score"] == 1.0


@pytest.mark.parametrize(
    "name, response, gold, expected",
    [
        ("number", "7 or 8", "7", 0), ("number", "8 or 7", "7", 1), ("number", "", "7", 0), ("number", "1/2", "2", 0),
        ("number", r"\frac{1}{2}", "2", 0), ("number", "0.5", "1/2", 1), ("number", "17", "7", 0),
        ("number", "-7", "7", 0),
        ("number", "7.5", "7", 0),
        ("last_integer", "7", "7", 1), ("last_integer", "3+4=7.", "7", 1), ("last_integer", "7 (or 7.5)", "7", 1),
        ("last_integer", "none", "7", 0), ("last_integer", "7 8", "7", 0),
        ("gsm8k", "#### 7\nAnd 8 too.", "5+2=7\n#### 7", 1), ("gsm8k", "It is 7.", "#### 7", 1),
        ("gsm8k", "#### 8\n7", "7", 0),
        ("gsm8k", "7 ####", "7", 0), ("gsm8k", "#### 1\n#### 7", "7", 1), ("gsm8k", "####$1,000.", "#### 1000", 1),
        ("boxed", r"\boxed{7}", "7", 1), ("boxed", r"\boxed{8}, no, \boxed{7.0}", "7", 1), ("boxed", "7", "7", 0),
        ("boxed", r"\boxed{7", "7", 0), ("boxed", r"\boxed{\text{Mr. A}}", "Mr.A", 1),
        ("boxed", r"\boxed{50\%}", "50", 1),
        ("boxed", r"\boxed{x^{2}}", r"so \boxed{x^{2}}", 1), ("boxed", r"\boxed{1{,}000}", "1000", 1),
        ("boxed", r"\boxed{}", "7", 0),
        ("exact", " a  b\n", "a b", 1), ("exact", "a b.", "a b", 0), ("exact", "A b", "a b", 0),
    ],
)  # fmt: skip
def test_verifiers(name, response, gold, expected):
    assert resolve(name)("", response, {"answer": gold})["score"] == expected


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<think>a</think>\n<answer>7</answer>", 1), (" <think></think><answer></answer> ", 1),
        ("<answer>7</answer>", 0),
        ("<think>a</think> so <answer>7</answer>", 0), ("<think>a<think></think><answer>7</answer>", 0),
        ("<answer>7</answer><think>a</think>", 0), ("<think>a</think><answer>7</answer> done", 0), ("", 0),
    ],
)  # fmt: skip
def test_the_format(response, expected):
    assert resolve("format")("", response, {}) == expected


def test_where_the_gold_answer_stands():
    assert gold_answer({"reward_model": {"ground_truth": "a"}, "answer": "b"}) == "a"
    assert gold_answer({"ground_truth": 1.5, "answer": "b"}) == "1.5"
    assert gold_answer({"answer": "x\n#### 1,000 "}) == "1,000"
    assert gold_answer({"answer": r"So $\boxed{\frac{1}{2}}$."}) == r"\frac{1}{2}"
    found = score(["number"], ["7", "7"], [{"question": "?"}, {"answer": "seven"}])
    assert not found.valid.any()
    assert "(found: ['question'])" in found.failures[0] and "'seven' holds no number" in found.failures[1]
