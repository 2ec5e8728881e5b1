"""Verifiers: right, wrong, tricky and hostile answers."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import BUILT_IN, make_rewards, resolve
from jaxrl_llm.rewards.answers import final_answer, found
from jaxrl_llm.rewards.gold import last_boxed
from jaxrl_llm.rewards.math_guard import refusal
from tests.work import calls_of


def score(name, response, record):
    return resolve(name)("", response, record if isinstance(record, dict) else {"answer": record})["score"]


def table(name, cases):
    wrong = [(case, found) for case in cases if (found := score(name, *case[:2])) != case[2]]
    assert not wrong


# --- where the answer stands


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<answer>12</answer>", "12"), ("<think>8</think><answer> 12 </answer> 13", "12"), ("<answer>12", "12"),
        ("<answer>1</answer><answer>2</answer>", "2"), (r"<answer>so \boxed{12} it is</answer>", "12"),
        (r"\boxed{1}, no: \boxed{2}.", "2"), (r"<think>\boxed{1}</think> 2", "2"), (r"\boxed 7", "7"),
        (r"\fbox{7}", "7"), (r"\boxed{\text{a}^{2}}", r"\text{a}^{2}"), (r"\boxed{12", None), ("#### 12\nok", "12"),
        ("The answer is 12. I checked 3 times.", "12"), ("**Answer:** 3.5", "3.5"), ("Final Answer: $x+1$.", "x+1"),
        (r"The answer is \(\frac{1}{2}\).", r"\frac{1}{2}"), ("The answer is 1. No, the answer is 2.", "2"),
        (r"We get $a$ and so \[x^2\]", "x^2"), ("12", "12"), ("１２", "12"), ("one\ntwo", None), ("", None),
        ("x" * 200, None), (r"\boxed", None), (r"\boxedness 3" + "\n.", None),
    ],
)  # fmt: skip
def test_the_final_answer(response, answer):
    assert final_answer(response) == answer


def test_pred_is_short_and_plain():
    assert found(1, "a\x00\ud800b\n c")["pred"] == "a b c"
    assert len(found(1, "x" * 10**6)["pred"]) == 100
    json.dumps(found(1, "\ud800" * 10)).encode()
    assert last_boxed("\\boxed{" * 10_000) is None


# --- numbers


def test_number_cases():
    table(
        "number",
        [
            ("１２", "12", 1), ("It is −12", "-12", 1), ("1\u202f000", "1000", 1), ("1{,}000", "1000", 1),
            (r"1\,000", "1000", 1), (r"10,\!000", "10000", 1), ("1.000,5", "1000.5", 0), ("-0", "0", 1),
            ("answer: 12 apples and 3 pears", "12", 0), ("12.", "12", 1), ("1 000", "1000", 0), ("0.50", "1/2", 1),
            ("9" * 5000, "9", 0), ("7\x00", "7", 1), ("\ud8007", "7", 1), (r"1\frac{1}{2}", "3/2", 1),
            (r"\boxed{1\tfrac12}", "1.5", 1), (r"\frac{ 3 }{4}", "0.75", 1),
            (r"2.5\frac{1}{2}", "0.5", 1),
        ],
    )  # fmt: skip


def test_gsm8k_cases():
    table(
        "gsm8k",
        [
            ("#### 7", "#### 7", 1), ("#### $7.00", "7", 1), ("####7 apples", "7", 1), ("#### -7", "7", 0),
            ("#### 1,234", "1234", 1), ("It is 7", "7", 1), ("####", "7", 0), ("#### about 8 or 7", "7", 0),
        ],
    )  # fmt: skip
    table("gsm8k(strict=True)", [("It is 7", "7", 0), ("#### 7", "7", 1), ("7\n#### seven", "7", 0)])


def test_the_preds_of_equal_numbers_are_equal():
    for name, spellings in {
        "number": ["0.5", "It is 1/2", r"\frac{1}{2}", ".50"],
        "boxed": [r"\boxed{0.5}", r"\boxed{ \dfrac{1}{2} }", r"\boxed{$1/2$}"],
        "math": [r"\boxed{0.5}", r"\boxed{x = \tfrac{1}{2}}", "The answer is 1/2."],
        "exact": ["0.5", " 0.5 "],
        "choice": ["<answer>0.5</answer>", "The answer is (b)."],
    }.items():
        record = {"answer": "0.5", "choices": ["1", "0.5"]} if name == "choice" else {"answer": "0.5"}
        results = [resolve(name)("", text, record) for text in spellings]
        assert len({result["pred"] for result in results}) == 1, (name, results)
    assert resolve("number")("", "none", {"answer": "7"}) == {"score": 0.0, "pred": None}


# --- math

RIGHT = [
    ("3/4", r"\frac{3}{4}"), (r"\frac{3}{4}", "0.75"), (r"\dfrac34", r"\frac{3}{4}"), ("C", r"\text{(C)}"),
    (r"\text{(C)}", "C"), (r"[0,1)", r"x \in [0, 1)"), (r"x \in [0,1)", "[0, 1)"), (r"3\sqrt{2}", r"3\sqrt{2}"),
    (r"\sqrt{18}", r"3\sqrt{2}"), (r"\frac{\pi}{6}", r"\pi/6"), ("1234", "1,234"), ("1{,}234", "1,234"),
    ("50", r"50\%"), ("0.5", r"50\%"), (r"50\%", "0.5"), ("50%", r"50\%"), ("18.9", r"\$18.90"), ("$18.90", "18.90"),
    ("x = 5", "5"), ("5", "x=5"), (r"5 \text{ cm}", "5"), ("5 cm", "5"), (r"18\text{ cm}^2", "18"),
    (r"\{1, 2\}", r"\{2, 1\}"), ("1, 2", r"\{1,2\}"), ("(1,2)", "(1, 2)"), (r"\left(1, 2\right)", "(1,2)"),
    (r"(-\infty, 3) \cup (5, \infty)", r"(-\infty,3)\cup(5,\infty)"), ("x^2+2x+1", "(x+1)^2"),
    ("y = 3 + 2x", "y=2x+3"), (r"90^\circ", "90"), ("2^{10}", "1024"), (r"\frac{1}{3}", "1/3"),
    ("0.333333", r"\frac13"),
    (r"1\frac{1}{2}", "1.5"), ("x > 5", "5 < x"), (r"\pm 2", "-2, 2"), (r"e^{x^2}", "e^{x^{2}}"), (r"\ln 8", r"3\ln 2"),
    (r"\binom{5}{2}", "10"), ("5!", "120"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("2, -2", "-2, 2"), ("−5", "-5"), ("１２", "12"), ("-0", "0"), ("033", "33"), ("x^{2024}", "x^{2024}"),
    (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k"), (r"\text{ east }", "east"), ("2x+y=3", "y=3-2x"), ("3 : 4", r"\frac{3}{4}"),
    (r"\frac{x+1}{2}", "(x+1)/2"), ("1 000", "1000"), ("p - q", "-q+p"), (r"\tfrac{1}{2}\sqrt{3}", r"\frac{\sqrt3}{2}"),
    (r"6.02 \times 10^{23}", r"6.02\cdot 10^{23}"), (r"2\pi", "2π"), ("2+3i", "3i+2"),
]  # fmt: skip

WRONG = [
    ("4/3", r"\frac{3}{4}"), ("(B)", r"\text{(C)}"), ("[0,1]", "[0,1)"), (r"2\sqrt{3}", r"3\sqrt{2}"), ("7", "8"),
    ("7 or 8", "7"), ("7, 8", "7"), (r"7 \text{ or } 8", "8"), (r"\{7,8\}", "7"), ("x=7, x=8", "7"), ("0.05", r"50\%"),
    ("(2,1)", "(1,2)"), ("x+1", "x+2"), ("y=2x+4", "y=2x+3"), ("x<5", "x>5"), ("-5", "5"), ("1.000,5", "1000.5"),
    (r"\sum_{k=1}^{100} k", "5050"), (r"\int_0^1 2x dx", "1"), (r"\lim_{x\to 0} x", "0"), ("9^{9^9}", "1"),
    (r"10^{10^{10}}", "10"), ("((3!)!)!", "6"), ("99999999!", "1"), ("9" * 400, "9"), ("(" * 50 + "1" + ")" * 50, "1"),
    ("{" * 200, "1"), (r"\frac{" * 100, "1"), ("2^{99999999}", "4"), ("(9^{999})^{999}", "9"), ("", "1"),
    (r"\text{}", "1"),
    (",".join("1" * 100), "1"), (r"\begin{pmatrix}" + "1&" * 100 + r"1\end{pmatrix}", "1"), ("x" * 290, "x"),
    ("(x+1)^{9999}", "x"), ("nan", "1"), (r"\infty", "1"), ("1/0", "1"), (r"\frac{1}{0}", "1"), ("e", "5"),
    ("+".join(["x"] * 140), "x"), ("-" * 200 + "1", "2"), (r"\sqrt{" * 5 + "2" + "}" * 5, "2"), ("\x00", "0"),
    ("z = 5", "y = 5"), (r"\binom{99999999}{4999}", "1"), (r"(99999999)_{3000}", "1"), ("12 apples and 3 pears", "3"),
    (r"\sin(x)+x=\cos(x^3)", "x=1"), ("x^{20}+x^{19}+x^3=1", "x^2=1"), ("x^2 > 20x^{20}+1", "x>3"),
]  # fmt: skip


def test_math_says_right():
    pytest.importorskip("math_verify")
    assert not [(a, g) for a, g in RIGHT if score("math", rf"So it is $\boxed{{{a}}}$.", g) != 1]


def test_math_says_wrong_with_bounded_work():
    pytest.importorskip("math_verify")
    score("math", r"\boxed{x+x}", "2x")  # imports sympy
    for answer, gold in WRONG:
        found, calls = calls_of(score, "math", rf"\boxed{{{answer}}}", gold)
        assert found == 0 and calls < 5_000_000, (answer, gold, found, calls)


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("<answer>12</answer>", "12", 1), ("<think>13</think>12", "12", 1), ("#### 12", "12", 1),
        ("We find x = 3, so the answer is x = 3.", "3", 1), ("Long.\nSo there are 12 of them.\nYes.", "12", 1),
        (r"First \boxed{3}. Wait, no: \boxed{4}.", "4", 1), (r"First \boxed{3}. Wait, no: \boxed{4}.", "3", 0),
        (r"12 but \boxed{}", "12", 0), ("<answer></answer> 12", "12", 0), (r"12 \boxed{1", "12", 0),
        ("I will not say.", "12", 0), (r"The answer is $\frac{1}{2}$.", "0.5", 1), (r"\boxed{204}", "204", 1),
        (r"\boxed{$x=5$}", "5", 1), (r"\boxed{5}", r"Thus $x=\boxed{5}$.", 1),
    ],
)  # fmt: skip
def test_math_finds_the_answer(response, gold, expected):
    assert score("math", response, gold) == expected


def test_equal_numbers_need_no_sympy():
    program = """if True:
        import sys
        from jaxrl_llm.rewards import resolve
        math = resolve("math")
        assert math("", r"\\boxed{\\frac{1}{2}}", {"answer": "0.5"})["score"] == 1
        assert math("", r"\\boxed{x = 7}", {"answer": "8"})["score"] == 0
        sys.exit("sympy" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_missing_library_is_found_when_the_reward_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="reward 'math': the package math-verify is not installed: pip install"):
        resolve("math")


def test_what_the_guard_refuses_it_can_explain():
    for answer, why in [
        ("9^{9^9}", "within an exponent"), ("1" * 101, "digits"), ("x" * 301, "characters"),
        ("((((((((1))))))))", "brackets"),
        (r"\prod_k k", "still to be computed"), ("((3!)!)!", "factorial"), ("x^{100}", "variable"),
        ("2^{99999}", "value"),
    ]:  # fmt: skip
        assert why in (refusal(answer, "1") or "")
    for answer in ["e^{x^2}", "2^{100}", r"\frac{\sqrt{3}}{2}", "5!", r"\binom{10}{3}", "x^2+y^2=25"]:
        assert refusal(answer, "1") is None


# --- choice


@pytest.mark.parametrize(
    "response, expected",
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("B)", "B"), ("**B**", "B"), (r"\boxed{B}", "B"),
        (r"$\boxed{\text{(B)}}$", "B"), (r"\boxed{B. Rome}", "B"), ("<answer>b</answer>", "B"),
        ("<answer>(B)</answer>", "B"), ("<answer>The answer is B</answer>", "B"), ("The answer is B.", "B"),
        ("the correct answer is (B) because A is wrong", "B"), ("Answer: B", "B"), ("**Answer: B**", "B"),
        ("Option B is correct.", "B"), ("So B is the correct one.", "B"), ("(A) is wrong, so (B)", "B"),
        ("A dog is a mammal.\nSo it is B.\nB", "B"), ("I think it is A.\nThe answer is B", "B"), ("Ｂ", "B"),
        ("The answer is A. No, wait. The answer is B.", "B"), ("the answer is: \n\nB", "B"), ("B. Because it is.", "B"),
        ("<think>A</think>B", "B"), ("Answer: $\\text{B}$", "B"), ("The answer is **(B)** Rome", "B"),
        ("The best answer is option B", "B"), ("I choose B", "B"), ("A dog", None), ("Absolutely", None), ("", None),
        ("The answer is a number.", None), ("The answer is A dog", None), ("The answer is not B", None),
        ("The answer is A or B.", None), ("(A) or (B)", None), ("(A), (B)", None), ("A, B", None), ("AB", None),
        ("I", None), ("Z", None), ("Because", None),
        ("The answer is B and C", None), (r"\boxed{A, B}", None), (r"\boxed{}", None), ("B2", None), ("Bad", None),
    ],
)  # fmt: skip
def test_the_choice(response, expected):
    assert resolve("choice(letters='ABCDE')")("", response, {"answer": "B"})["pred"] == expected


def test_choices_in_the_record():
    listed = {"choices": ["Rome", "Paris", "a dog"], "answer": "Paris"}
    for record in (
        listed, {**listed, "answer": "B"}, {**listed, "answer": 1}, {**listed, "answer": "(b)"},
        {"choices": {"text": ["Rome", "Paris"], "label": ["A", "B"]}, "answer": "B"},
        {"choices": {"text": ["Rome", "Paris"], "label": ["1", "2"]}, "answer": "2"},
        {"options": {"A": "Rome", "B": "Paris"}, "answer": "B"}, {"options": ["A) Rome", "B) Paris"], "answer": "B"},
    ):  # fmt: skip
        for text in ("B", "Paris", "<answer>paris</answer>", r"\boxed{\text{Paris}}", "The answer is B. Paris"):
            assert score("choice", text, record) == 1, (record, text)
        for text in ("A", "Rome", r"\boxed{B. Rome}", "Paris or Rome", "E", "The answer is E."):
            assert score("choice", text, record) == 0, (record, text)
    assert score("choice", "<answer>A dog</answer>", {**listed, "answer": "C"}) == 1
    numbers = {"choices": ["3", "0", "1"], "answer": "1"}
    assert (score("choice", "C", numbers), score("choice", "B", numbers)) == (1, 0)
    for record, message in [
        ({"answer": "Z", "choices": ["a", "b"]}, "none of the choices A, B"), ({"choices": ["a"]}, "found: "),
        ({"answer": "A", "choices": "a, b"}, "expected a list"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            score("choice", "A", record)


# --- regex, format, length, JSON


def test_regex():
    assert score("regex(pattern='a.c')", "xxa\ncxx", {}) == 1
    assert score("regex(pattern='a.c', whole=True)", "xabc", {}) == 0
    assert score("regex(pattern='ABC', fold_case=True)", "abc", {}) == 1
    assert score("regex(pattern='a')", "a" * 50_001, {}) == 0
    named = r"regex(pattern='<(?P<answer>[^>]*)>')"
    assert [score(named, text, "7") for text in ("<8> <7.0>", "<7> <8>", "7", "<>")] == [1, 0, 0, 0]
    assert resolve(r"regex(pattern='(?P<answer>x)?b')")("", "b", {"answer": "x"}) == {"score": 0.0, "pred": None}


@pytest.mark.parametrize(
    "name, message",
    [
        ("regex", r"reward 'regex': expected an argument: regex\(pattern='…'\)"),
        ("regex(pattern='(')", "no regular expression"), ("regex(pattern=3)", "no regular expression"),
        ("format(pattern='[')", "reward 'format': pattern"), ("choice(letters='ab')", "expected capital letters"),
        ("length(at_most=-1)", "at_most is -1"),
        ("length(unit='tokens')", "unit is 'tokens'; expected one of characters"),
        ("length(at_least=5, at_most=3)", "at_most is 3"), ("countdown(use='any')", "expected 'all' or 'some'"),
        ("countdown(format_score=1)", "expected a number from 0"), ("json_match(keys='name')", "expected a tuple"),
        ("gsm8k(strct=True)", "did you mean 'strict'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_found_when_the_reward_is_named(name, message):
    with pytest.raises(UserError, match=message):
        make_rewards([name])


def test_length():
    assert [score("length(at_least=2, at_most=3)", "x" * n, {}) for n in range(6)] == [0, 0, 1, 1, 0, 0]
    words = "length(at_most=2, unit='words', margin=2)"
    assert [score(words, "a " * n, {}) for n in range(6)] == [1, 1, 1, 0.5, 0, 0]
    cosine = [score("length(at_most=0, margin=4, shape='cosine')", "x" * n, {}) for n in range(5)]
    assert cosine == pytest.approx([1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0])
    assert resolve("length(unit='lines')")("", "a\n\n b \n", {}) == {"score": 1.0, "length": 2}


JSON_RIGHT = [
    ('{"a": 1, "b": [2]}', 1), ('{"b":[2.0],"a":1.0}', 1), ('```json\n{"a": 1, "b": [2]}\n```', 1),
    (' {"a":1,"b":[2]} ', 1),
    ('Sure!\n```json\n{"a": 0}\n```\nNo:\n```\n{"a": 1, "b": [2]}\n```\nDone.', 1),
    ('<think>{"a": 3}</think>\n<answer>{"a": 1, "b": [2]}</answer>', 1), ('{"a": 1, "b": [2], "c": 3}', 0),
    ('{"a": true, "b": [2]}', 0), ('{"a": "1", "b": [2]}', 0), ('{"a": 1, "b": [2, 2]}', 0), ('{"a": 1}', 0),
    ('{"a": 5, "a": 1, "b": [2]}', 0), ('{"a": NaN, "b": [2]}', 0), ("{'a': 1, 'b': [2]}", 0),
    ('{"a": 1, "b": [2],}', 0),
    ('{"a": 1, "b": [2]} and more', 0), ('{"a": 1, "b": [2]}{"a": 1, "b": [2]}', 0), ("", 0), ("null", 0), ("[", 0),
    ('{"a": 1e999, "b": [2]}', 0), ('{"a": 1, "b": [2]', 0), ('{"a": ' + "9" * 5000 + "}", 0), ("[" * 10_000, 0),
    ("[" * 60 + "]" * 60, 0), ('{"a":' * 100_000, 0), ('"' + "\\" * 40_001, 0), ('\ud800{"a": 1}', 0),
    ("9" * 40_000, 0),
    ('{"a": 1.0000000000001, "b": [2]}', 1), ('{"a": 1.1, "b": [2]}', 0), ('{"a": ' + "9" * 300 + ', "b": [2]}', 0),
]  # fmt: skip


def test_json():
    for gold in ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}, {"b": (2.0,), "a": 1}):
        table("json_match", [(text, {"answer": gold}, right) for text, right in JSON_RIGHT])
    assert score("json_match(subset=True)", '{"a": {"b": 1, "c": 2}, "d": 3}', {"answer": {"a": {"b": 1}}}) == 1
    assert score("json_match(subset=True)", '{"a": {"c": 2}}', {"answer": {"a": {"b": 1}}}) == 0
    assert score("json_match(keys=('a',))", '{"a": null}', {}) == 1
    assert score("json_match(keys=('a',))", '["a"]', {}) == 0
    assert score("json_match(values={'a': None})", '{"b": 1}', {}) == 0
    assert score("json_match", "7.0", 7) == 1
    with pytest.raises(ValueError, match="the record's answer 'seven' is no JSON"):
        score("json_match", "7", "seven")
    with pytest.raises(ValueError, match=r"to compare JSON with \(found: \['question'\]\)"):
        score("json_match", "7", {"question": 1})


# --- all of them

RECORD = {"answer": "7", "choices": ["6", "7"], "nums": [1, 2], "target": 3}
NAMES = {"regex": "regex(pattern='(?P<answer>[0-9]+)x')", "length": "length(unit='words')"}
HOSTILE = [
    "1", "1,", ",111", "1.1", "-", "$", "1/", "1e", "####", "\\frac{", "\\boxed{", "{", "\\text{", "\x00", "\ud800",
    "<answer>",
    "</answer>", "(A) ", "answer is ", "The answer is A or ", '"', "[", '{"a":', "\\", "```json\n", "```\n", "\n",
    " ", "$$ ",
    "\\[", "**", "is the correct", "!", "^{", "(", "=", "½", "１", "</think>", "A", "**A", "\\boxed{x=", "answer: $",
    "2^",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"code"}))
def test_a_hostile_megabyte_is_read_in_linear_time_and_raises_nothing(name):
    """What is quadratic in a megabyte, as a regular expression may be, takes minutes: no busy machine makes 30 s of
    the 0.05 s that these take at most."""
    if name == "math":
        pytest.importorskip("math_verify")
    function = resolve(NAMES.get(name) or name)
    function("", "7x", RECORD)
    for part in HOSTILE:
        for text in (part * (1_000_000 // len(part)), f"<answer>{part * 400}</answer>", f"\\boxed{{{part * 60}}}"):
            start = time.process_time()
            returned = function("", text, RECORD)
            assert time.process_time() - start < 30, text[:100]
            value = returned["score"] if isinstance(returned, dict) else returned
            assert 0 <= value <= 1


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"code", "math", "format"}))
@settings(max_examples=60)
@given(st.text(max_size=200))
def test_no_text_makes_a_verifier_fail(name: str, text: str):
    resolve(NAMES.get(name) or name)("", text, RECORD)


def test_extras_of_verifiers_can_be_sent_and_written():
    rewards = make_rewards(["number", "exact", "length"])
    scores = rewards.score(["p"], ["7"], [{"answer": "7"}])
    assert scores.extras == [{"number/pred": "7", "exact/pred": "7", "length/length": 1}]
    assert pickle.loads(pickle.dumps(scores.extras)) == json.loads(json.dumps(scores.extras)) == scores.extras
