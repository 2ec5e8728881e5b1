from __future__ import annotations

import ast
import hashlib
import json
import math
import operator
import pickle
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import tasks
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import (
    addition,
    arithmetic,
    column_pairs,
    column_sums,
    countdown,
    max_of_n,
    sorting,
    story_forms,
    word_problems,
)
from jaxrl_llm.tasks.generated import Draw, combination, permuted, selection

MADE: dict[str, Any] = {
    "arithmetic": lambda **kwargs: arithmetic(digits=1, operands=3, **kwargs),
    "sorting": lambda **kwargs: sorting(n=3, largest=15, **kwargs),
    "sorting words": lambda **kwargs: sorting(n=3, items="words", order="both", **kwargs),
    "max_of_n": lambda **kwargs: max_of_n(n=2, which="both", largest=60, **kwargs),
    "countdown": lambda **kwargs: countdown(n=3, largest=12, **kwargs),
    "word_problems": lambda **kwargs: word_problems(steps=1, **kwargs),
}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: Fraction}


def value_of(text) -> tuple[Any, list[Any]]:
    """The exact value of an arithmetic expression, and the numbers in it."""
    numbers = []

    def value(node) -> Any:
        match node:
            case ast.Constant():
                numbers.append(node.value)
                return node.value
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp():
                return SIGNS[type(node.op)](value(node.left), value(node.right))
        raise AssertionError(text)

    return value(ast.parse(text, mode="eval").body), numbers


def content(record) -> Any:
    """What two problems with another surface have in common, read from the prompt alone."""
    match record["data_source"]:
        case "word_problems":  # the numbers in the order told, and what becomes of them
            return (tuple(re.findall(r"\d+", record["prompt"])), record["answer"])
        case "arithmetic":
            return tuple(sorted(re.findall(r"[+-]?\d+", "+" + record["prompt"].split()[2].lstrip("+"))))
    listed = record["prompt"].partition(":")[2].partition(".")[0] if "nums" not in record else str(record["nums"])
    return tuple(sorted(re.findall(r"\w+", listed)))


# --- what is written down elsewhere depends on these


@pytest.mark.parametrize(
    "records, digest",
    [
        (addition(), "0aaea420e020"),
        (addition(digits=3, split="train"), "d6055e67a0a3"),
        (column_sums(split="train", forget=0.6, copies=10), "5bbc83342431"),
        (column_sums(split="test", seed=3), "422681de92c1"),
        (column_pairs(split="train"), "57a76c2611f4"),
    ],
)
def test_the_lists_are_what_they_always_were(records, digest):
    assert hashlib.sha256(json.dumps(records).encode()).hexdigest()[:12] == digest


def test_addition_is_right_and_its_splits_are_apart():
    for record in addition(digits=2):
        a, b = record["prompt"].removeprefix("What is ").removesuffix("?").split("+")
        assert int(a) + int(b) == int(record["answer"])
    assert len({record["prompt"] for record in addition(digits=3)}) == 10_000
    train, test = ({record["prompt"] for record in addition(2, split)} for split in ("train", "test"))
    assert not train & test and len(train | test) == 10_000
    assert test != {record["prompt"] for record in addition(2, "test", seed=1)}


# --- what all that are generated have in common


@pytest.mark.parametrize("name", MADE)
def test_train_and_test_share_no_content_and_make_up_the_whole(name):
    parts = {split: list(MADE[name](split=split)) for split in ("all", "train", "test")}
    contents = {split: [content(record) for record in records] for split, records in parts.items()}
    if name != "word_problems":  # of which numbers and answer alone are read here, and not the plot
        assert all(len(set(found)) == len(found) for found in contents.values())
        if len(contents["all"]) < tasks.MOST_RECORDS:  # so these are all that there are
            assert {*contents["train"], *contents["test"]} == set(contents["all"])
    assert len(parts["train"]) + len(parts["test"]) == len(parts["all"])
    assert all(len({r["prompt"] for r in records}) == len(records) for records in parts.values())
    assert 0.05 < len(parts["test"]) / len(parts["all"]) < 0.15
    # Not at the same seed and difficulty alone.
    others = {content(record) for record in MADE[name](split="test", seed=5)}
    assert not others & set(contents["train"]) or name == "word_problems"


def test_a_storys_plot_and_numbers_are_in_one_split_however_it_is_told():
    train, test = (word_problems(steps=1, split=split) for split in ("train", "test"))
    seen = {tuple(record["response"].splitlines()) for record in train}
    assert len(seen) > 0.5 * len(train)
    spaces = [records._streams[0] for records in (train, test, word_problems(steps=1, split="test", seed=9))]
    contents = [{s.space.content(s.number(i)) for i in range(s.capacity)} for s in spaces]
    assert not contents[0] & contents[1] and contents[1] == contents[2]
    assert len(contents[0] | contents[1]) == spaces[0].space.size


def test_a_problem_is_in_the_same_split_at_every_difficulty():
    small, large = ({content(r) for r in max_of_n(2, largest=most, split="test")} for most in (30, 60))
    assert small and small == {pair for pair in large if max(int(x) for x in pair) <= 30}
    more = {content(r) for r in max_of_n(2, largest=30, split="test", held_out=0.3)}
    assert small < more


@pytest.mark.parametrize("name", MADE)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**70), index=st.integers(0, 30), split=st.sampled_from(["all", "train", "test"]))
def test_a_record_depends_on_seed_split_and_index_alone(name, seed, index, split):
    make = MADE[name]
    source = make(seed=seed, split=split)
    record, _ = source[index], source[50 % len(source)]
    assert record == source[index] == make(seed=seed, split=split, count=index + 1)[index]
    assert record == json.loads(json.dumps(record))
    assert {"prompt", "response", "answer", "level", "data_source"} <= record.keys()


def test_another_seed_gives_another_order():
    one, other = ([record["prompt"] for record in sorting(seed=seed)[:50]] for seed in (0, 1))
    assert not set(one) & set(other)


def test_a_generated_task_is_a_sequence_and_a_source_for_grain():
    made = countdown(count=20, split="train")
    assert (len(made), made[-1], made[3:5]) == (20, made[19], [made[3], made[4]])
    for index in (20, -21):
        with pytest.raises(IndexError):
            made[index]
    dataset = grain.MapDataset.source(made).shuffle(seed=1).map(lambda record: record["target"]).batch(5)
    assert sum(len(batch) for batch in dataset) == 20
    read = list(grain.MapDataset.source(countdown(count=20, split="train")).to_iter_dataset())  # from threads
    assert read == list(made)
    assert pickle.loads(pickle.dumps(made))[7] == made[7]


def test_reading_from_several_threads_gives_the_same():
    made, expected = sorting(split="train", count=3000), list(sorting(split="train", count=3000))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(made.__getitem__, range(3000))) == expected


def test_a_million_records_cost_nothing_until_they_are_read():
    made = word_problems(steps=4, split="train", count=1_000_000)
    assert len(made) == 1_000_000 and made[3]["level"] == 4


def test_difficulties_take_turns_and_a_small_one_is_used_up():
    made = arithmetic(digits=(1, 2), operands=2, signs="+")
    found = [record["level"] for record in made]
    assert found[:8] == [1, 2] * 4 and found[110:] == [2] * (len(found) - 110)
    assert Counter(found) == {1: math.comb(11, 2), 2: math.comb(101, 2) - math.comb(11, 2)}
    assert len({content(record) for record in made}) == len(made)
    assert [record["level"] for record in word_problems(steps=range(1, 6))[:5]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: sorting(n=2, largest=9, count=46),
            r"sorting: count = 46, and there are 45 different problems of split",
        ),
        (lambda: sorting(count=-1), "count must be at least 0, found -1"),
        (lambda: sorting(n=1), "sorting: n must be from 2 to 50, or several of them, found 1"),
        (lambda: sorting(n=(3, True)), "found True"),
        (lambda: sorting(n=(3, 3)), r"several different ones, found \(3, 3\)"),
        (lambda: sorting(n=()), "one number, or several"),
        (lambda: sorting(items="wrods"), "sorting: items = 'wrods'; did you mean 'words'"),
        (lambda: sorting(n=12, largest=11), "only the numbers 0 to largest = 11; raise it"),
        (lambda: max_of_n(largest=10**7), "largest must be from 1 to 999999"),
        (lambda: max_of_n(which="smalest"), "did you mean 'smallest'"),
        (lambda: arithmetic(digits=10), "digits must be from 1 to 9"),
        (lambda: arithmetic(operands=(2, 11)), "operands must be from 2 to 10"),
        (lambda: arithmetic(signs="-"), r"signs = '-'; did you mean '\+-'"),
        (lambda: countdown(n=9), "n must be from 2 to 8"),
        (lambda: countdown(largest=1), "largest must be from 2"),
        (lambda: word_problems(steps=6), "steps must be from 1 to 5"),
        (lambda: word_problems(split="dev"), "split must be all, train or test, found 'dev'"),
        (lambda: word_problems(held_out=2), r"held_out must be in \[0, 1\]"),
    ],
)
def test_what_cannot_be_asked_for_is_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_nothing_held_out_and_everything_held_out():
    for held_out, train, test in ((0.0, 45, 0), (1.0, 0, 45)):
        found = [sorting(2, largest=9, split=split, held_out=held_out) for split in ("train", "test")]
        assert [len(records) for records in found] == [train, test] and [len(list(r)) for r in found] == [train, test]


# --- each task is right


@settings(deadline=None, max_examples=60)
@given(
    digits=st.integers(1, 9), operands=st.integers(2, 10), seed=st.integers(0, 99), signs=st.sampled_from(["+", "+-"])
)
def test_arithmetic_is_right(digits, operands, seed, signs):
    record = arithmetic(digits, operands, signs, seed=seed)[seed]
    expression = record["prompt"].removeprefix("What is ").removesuffix("?")
    value, numbers = value_of(expression)
    assert str(value) == record["answer"] == record["response"]
    assert len(numbers) == operands and len(str(max(numbers))) == digits
    assert signs == "+-" or "-" not in expression
    assert record["level"] == digits + operands - 2


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 50),
    seed=st.integers(0, 99),
    words=st.booleans(),
    order=st.sampled_from(["ascending", "descending", "both"]),
)
def test_sorting_is_right(n, seed, words, order):
    record = sorting(n, "words" if words else "numbers", order, seed=seed)[seed]
    shown = record["prompt"].partition(": ")[2].partition(".")[0].split(", ")
    answer = record["answer"].split(", ")
    descending = "from largest" in record["prompt"] or "from last" in record["prompt"]
    key = str if words else int
    assert answer == sorted(shown, key=key, reverse=descending) and len(set(answer)) == n == record["level"]
    assert order == "both" or descending == (order == "descending")


@settings(deadline=None, max_examples=60)
@given(n=st.integers(2, 50), seed=st.integers(0, 99), which=st.sampled_from(["largest", "smallest", "both"]))
def test_an_end_of_a_list_is_right(n, seed, which):
    record = max_of_n(n, which, seed=seed)[seed]
    shown = [int(x) for x in record["prompt"].partition(": ")[2].rstrip("?").split(", ")]
    asked = "largest" if "largest" in record["prompt"] else "smallest"
    assert int(record["answer"]) == (max if asked == "largest" else min)(shown) and len(set(shown)) == n
    assert which in ("both", asked)


@settings(deadline=None, max_examples=150)
@given(n=st.integers(2, 8), largest=st.integers(2, 120), seed=st.integers(0, 99))
def test_a_countdown_has_the_solution_that_is_given(n, largest, seed):
    made = countdown(n, largest, seed=seed)
    record = made[seed % len(made)]
    value, numbers = value_of(record["answer"])
    assert value == record["target"] > 0
    assert sorted(numbers) == sorted(record["nums"]) and len(numbers) == n
    assert f" {', '.join(map(str, record['nums']))} " in record["prompt"]
    assert f"equals {record['target']}." in record["prompt"]


def test_countdowns_targets_are_seldom_found_at_once():
    made = countdown(n=4)[:500]
    inside = [10 <= record["target"] < 1000 and record["target"] not in record["nums"] for record in made]
    assert sum(inside) > 495
    assert {sign for record in made for sign in record["answer"] if sign in "+-*/"} == set("+-*/")


@settings(deadline=None, max_examples=200)
@given(steps=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_a_word_problem_is_reasoned_out_rightly(steps, seed):
    record = word_problems(steps, seed=seed)[seed % 97]
    *lines, last = record["response"].splitlines()
    assert last == f"#### {record['answer']}" and len(lines) == steps == record["level"]
    known = [int(x) for x in re.findall(r"\d+", record["prompt"])]
    for line in lines:
        equation = line.partition(": ")[2].removesuffix(".")
        left, _, right = equation.partition(" = ")
        value, _ = value_of(left)
        assert value == int(right) >= 0, line
        known.append(int(right))
    assert record["answer"] == str(known[-1]) and "{" not in record["prompt"] + record["response"]


def test_word_problems_are_told_in_many_ways():
    assert sum(map(len, story_forms.FORMS.values())) >= 60 and story_forms.WHY.keys() == story_forms.FORMS.keys()
    told = {re.sub(r"\d+", "#", record["prompt"]) for record in word_problems(steps=1)[:1000]}
    assert len(told) > 800
    without_words = {tuple(re.findall(r"[.?] (\w+)", record["prompt"])) for record in word_problems(steps=3)[:300]}
    assert len(without_words) > 150


# --- numbering


@settings(deadline=None, max_examples=40)
@given(items=st.integers(1, 9), taken=st.integers(1, 5))
def test_every_set_and_multiset_has_its_number(items, taken):
    sets = [tuple(combination(i, items, taken)) for i in range(math.comb(items, taken))]
    assert len(set(sets)) == len(sets) and all(list(s) == sorted(set(s)) and s[-1] < items for s in sets)
    multisets = [tuple(selection(i, items, taken)) for i in range(math.comb(items + taken - 1, taken))]
    assert len(set(multisets)) == len(multisets) and all(list(s) == sorted(s) and s[-1] < items for s in multisets)
    assert max(multisets[: math.comb(items - 1 + taken - 1, taken)], default=(0,))[-1] < max(items - 1, 1)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 400), seed=st.integers(0, 5))
def test_an_order_has_every_number_once(size, seed):
    assert sorted(permuted(i, size, seed) for i in range(size)) == list(range(size))


def test_draws_are_even():
    draw = Draw("even")
    found = Counter(draw.below(5) for _ in range(5000))
    assert all(900 < count < 1100 for count in found.values())
    assert {draw.between(2, 3) for _ in range(50)} == {2, 3}


def test_every_task_has_the_arguments_that_its_name_in_a_config_takes():
    for name in ("arithmetic", "sorting", "max_of_n", "countdown", "word_problems"):
        made = getattr(tasks, name)(split="test", held_out=0.2, seed=1, count=3, data_source="mine")
        assert [record["data_source"] for record in made] == ["mine"] * 3
