"""The arithmetic evaluator, and the verifier of countdown that reads by it."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards.arithmetic import BadExpression, evaluate
from tests.test_verifiers import score, table
from tests.work import calls_of


def tree(draw, depth):
    """A random expression as text, and its value; None where it divides by 0."""
    if depth == 0 or draw.random() < 0.2:
        value = draw.choice([Fraction(draw.randint(0, 99)), Fraction(draw.randint(0, 999), 10)])
        return (str(value) if value.denominator == 1 else f"{float(value):.1f}"), value
    if draw.random() < 0.15:
        text, value = tree(draw, depth - 1)
        return f"-({text})", None if value is None else -value
    (left, a), (right, b) = tree(draw, depth - 1), tree(draw, depth - 1)
    sign = draw.choice("+-*/×÷−")
    text = f"({left}){draw.choice(['', ' '])}{sign} ({right})"
    if a is None or b is None or (sign in "/÷" and not b):
        return text, None
    if sign in "*×":
        return text, a * b
    return text, a / b if sign in "/÷" else a + b if sign == "+" else a - b


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_the_evaluator_agrees_with_fractions(seed):
    text, value = tree(random.Random(seed), 5)
    if value is None:
        with pytest.raises(BadExpression, match="division by 0|characters"):
            evaluate(text)
    elif len(text) <= 1_000:
        assert evaluate(text) == value


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 50)), min_size=1, max_size=12))
def test_signs_without_brackets_bind_as_in_python(terms):
    text = "7" + "".join(f"{sign}{number}" for sign, number in terms)
    exact = eval("Fraction(7)" + "".join(f"{sign}Fraction({number})" for sign, number in terms))
    assert evaluate(text) == exact


@settings(max_examples=500)
@given(
    st.text(alphabet=st.sampled_from("0123456789.,+-*/^()[]{} ×÷−\n\x00\ud800a²١e_"), max_size=60)
    | st.text(max_size=30)
)
def test_the_evaluator_raises_nothing_but_its_own_error(text):
    try:
        value = evaluate(text)
    except BadExpression:
        return
    assert isinstance(value, Fraction)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1+2*3", 7), ("(1+2)*3", 9), ("2^3^2", 512), ("-2^2", -4), ("2^-1", Fraction(1, 2)), ("--5", 5), ("2*-3", -6),
        ("1,234.5", Fraction("1234.5")), (".5", Fraction(1, 2)), ("5.", 5), ("[{1+1}*2]", 4), ("2**3", 8), ("0^0", 1),
        ("(-1)^999999999", -1), ("1^" + "9" * 99, 1), ("2^3999", 2**3999), (" 1 +\n1 ", 2), ("(((1)))", 1),
    ],
)  # fmt: skip
def test_arithmetic(text, value):
    assert evaluate(text) == value


HOSTILE_ARITHMETIC = [
    "", " ", "1 2", "2(3)", "1+", "*1", "(1", "1)", "()", "1/0", "0^-1", "2^0.5", "9^9^9", "10^9999", "1.2.3", "1,2",
    "1e5",
    "0x10", "1_0", "__import__('os')", "a", "1//2", "5%2",
    "9" * 101, "(" * 500 + "1" + ")" * 400, "-" * 999, "1" * 1001,
    "(((9^99)^9)^9)^9", "*".join(["9" * 99] * 10) + "^9", "١+١", "²", "1;2", "2^" * 400 + "2", "1-" * 499, "=", "\x00",
    "(1/3)^9999",
]  # fmt: skip


def refused(text):
    with pytest.raises(BadExpression):
        evaluate(text)


def test_what_is_no_arithmetic_is_refused_with_little_work():
    for text in HOSTILE_ARITHMETIC:
        assert calls_of(refused, text)[1] < 100_000, text


def test_countdown():
    record = {"nums": [19, 36, 55, 7], "target": 65}
    table(
        "countdown",
        [
            ("<answer>55 + 36 - 7 - 19</answer>", record, 1), ("<answer>55 + 36 - 7 - 19 = 65</answer>", record, 1),
            ("<think>19</think>\n<answer> (55+36) − (7+19) </answer>", record, 1), ("I try.\n55+36-7-19", record, 1),
            (r"\boxed{55 + 36 - 7 - 19}", record, 1), ("<answer>65</answer>", record, 0),
            ("<answer></answer>", record, 0),
            ("<answer>55+36-7-19=66</answer>", record, 0), ("<answer>55+36-26</answer>", record, 0), ("", record, 0),
            ("<answer>55+36-7-19+7-7</answer>", record, 0), ("<answer>19+36+55+7</answer>", record, 0),
            ("<answer>65 = 65 = 65</answer>", record, 0), ("<answer>print(65)</answer>", record, 0),
            ("<answer>55+36-7-19+0*1</answer>", record, 0), ("<answer>(55+36-7-19)^1</answer>", record, 0),
            (r"<answer>6 \times 4</answer>", {"numbers": [4, 6], "target": 24}, 1),
            (r"<answer>\frac{48}{2}</answer>", {"numbers": [2, 48], "target": "24"}, 1),
            ("<answer>4*6</answer>", {"reward_model": {"ground_truth": {"numbers": [4, 6], "target": 24}}}, 1),
            ("<answer>4+4</answer>", {"nums": [4, 6], "target": 8}, 0),
            ("<answer>46</answer>", {"nums": [4, 6], "target": 46}, 0),
            ("<answer>8/(3-8/3)</answer>", {"nums": [3, 3, 8, 8], "target": 24}, 1),
            ("<answer>9^9^9</answer>", record, 0), ("<answer>" + "(" * 900 + "</answer>", record, 0),
            ("<answer>1 + 1</answer> <answer>4*6</answer>", {"nums": [4, 6], "target": 24}, 1),
        ],
    )  # fmt: skip
    assert score("countdown(use='some')", "<answer>4*6</answer>", {"nums": [4, 6, 9], "target": 24}) == 1
    assert score("countdown(use='some')", "<answer>4*6*1</answer>", {"nums": [4, 6, 9], "target": 24}) == 0
    assert score("countdown(use='some')", "<answer>4+4</answer>", {"nums": [4, 6], "target": 8}) == 0
    assert score("countdown(format_score=0.1)", "<answer>4+6</answer>", {"nums": [4, 6], "target": 24}) == 0.1
    assert score("countdown(format_score=0.1)", "<answer>four</answer>", {"nums": [4, 6], "target": 24}) == 0
    with pytest.raises(ValueError, match="needs target .* and nums or numbers"):
        score("countdown", "1", {"answer": "24"})
