"""The reward that runs code: what passes, what fails, and what tries to get out of it."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from pathlib import Path

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import code, make_rewards, resolve
from jaxrl_llm.rewards.code import last_block, protections

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="Linux alone")
NAMESPACES = "namespaces" in protections()
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="no user namespaces here")

PLUS_ONE = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
RIGHT = "def f(x): return x + 1"


def run(text, record=None, **arguments):
    arguments = {"run_model_code": True, "namespaces": NAMESPACES} | arguments
    return code.code("", f"Here:\n```python\n{text}\n```\n", PLUS_ONE if record is None else record, **arguments)


def score(text, record=None, **arguments):
    return run(text, record, **arguments)["score"]


def left_behind():
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and b"sandbox.py" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    end = time.monotonic() + 5
    while left_behind() and time.monotonic() < end:  # the kernel takes a moment to end a namespace
        time.sleep(0.02)
    assert not left_behind()


# --- off by default


def test_it_is_off_unless_asked_for():
    for name in ("code", "code(seconds=3)", "code(run_model_code=1)"):
        with pytest.raises(UserError, match=r"reward 'code': runs programs .* say code\(run_model_code=True\)"):
            make_rewards([name])
    with pytest.raises(UserError, match="run_model_code=True"):
        code.code("", "x", PLUS_ONE)
    with pytest.raises(UserError, match="seconds is 0; expected a number above 0"):
        make_rewards(["code(run_model_code=True, seconds=0)"])


def test_without_namespaces_it_has_to_be_said(monkeypatch):
    monkeypatch.setattr(code, "protections", frozenset)
    with pytest.raises(UserError, match="no user namespaces here.*namespaces=False"):
        resolve("code(run_model_code=True)")
    assert make_rewards(["code(run_model_code=True, namespaces=False)"]).names == ("code",)


def test_it_cannot_run_where_a_process_cannot_lock_itself_down(monkeypatch, tmp_path):
    broken = tmp_path / "sandbox.py"
    broken.write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(code, "SANDBOX", broken)
    with pytest.raises(RuntimeError, match="could not lock itself down"):
        run(RIGHT)


# --- forms of tests


def test_asserts():
    assert run(RIGHT) == {"score": 1.0, "passed": 1.0, "error": None}
    assert run("def f(x): return 2") == {"score": 0.0, "passed": 0.5, "error": "AssertionError"}
    assert score("def f(x): return 2", share=True) == 0.5
    assert run("def g(x): return 2")["error"] == "NameError: name 'f' is not defined"
    assert "SyntaxError" in run("def f(x) return 2")["error"]
    assert run("raise ValueError('no')")["error"] == "the answer's code failed: ValueError: no"
    assert score(RIGHT, {"answer": '{"test_list": ["assert f(1) == 2"]}'}) == 1
    assert score(RIGHT, {"reward_model": {"ground_truth": ["assert f(1) == 2"]}}) == 1


def test_humaneval():
    test = "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"
    record = {"test": test, "entry_point": "f", "prompt": "def f(x):\n"}
    assert score(RIGHT, record) == 1
    assert score("def f(x): return abs(x) + 1", record) == 0
    assert score("def f(x): return abs(x) + 1", record, share=True) == 0
    assert score("def check(candidate): pass\ndef f(x): return 0", record) == 0


def test_programs():
    record = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
    assert score("a, b = map(int, input().split())\nprint(a + b, ' ')\n", record) == 1
    assert score("import sys\nprint(sum(map(int, sys.stdin.read().split())))", record) == 1
    assert score("import sys\nprint(sum(map(int, sys.stdin)))", record) == 0
    assert run("print(3)", record, share=True) == {"score": 0.5, "passed": 0.5, "error": "test 1: another output"}
    assert score("if __name__ == '__main__':\n    print(sum(map(int, input().split())))\n    exit()", record) == 1
    assert score("print(3)\nraise SystemExit(1)", record, share=True) == 0
    assert score("print(3 if 0 else 7)", {"answer": {"inputs": [""], "outputs": ["7"]}}) == 1
    calls = {"input_output": '{"fn_name": "f", "inputs": [[1], [[2]]], "outputs": [2, [2]]}'}
    assert score("def f(x): return x + 1 if x == 1 else x", calls) == 1


def test_values_pass_between_the_processes_as_they_are():
    record = {
        "test_setup_code": "import math",
        "test_list": [
            "a = (1, [2.5, 'ü\\ud800', None, True])\nassert echo(a, {'a': {3}}) == (a, {'a': {3}})",
            "assert echo(2**5000)[0] == 2**5000 and echo(b'x', 1j) == (b'x', 1j)",
            "assert math.isnan(echo(math.nan)[0]) and isinstance(echo(1)[0], int)",
            "a = [3, 1]\nassert order(a) is None and a == [1, 3]",
            "assert list(count(3)) == [0, 1, 2] and list(zip(count(2), count(2))) == [(0, 0), (1, 1)]",
            "p = Point(1, y=2)\nassert p.x == 1 and p.sum() == 3 and p.swapped().x == 2 and add(p, p) == 6",
            "p = Point(1, 2)\np.x = 5\nassert p.x == 5 and len(p) == 2 and p[0] == 5 and 2 in p",
            "try:\n    fail()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
            "assert counted() == {'a': 2} and named() == (1, 2)",
            "assert LIMIT.__class__ is not int or True",
        ],
    }  # fmt: skip
    answer = """
import collections
LIMIT = 3
def echo(*values): return values
def order(values): values.sort()
def count(n): yield from range(n)
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def sum(self): return self.x + self.y
    def swapped(self): return Point(self.y, self.x)
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __contains__(self, v): return v in (self.x, self.y)
def add(a, b): return a.sum() + b.sum()
def fail(): raise ValueError("no")
def counted(): return collections.Counter("aa")
def named(): return collections.namedtuple("N", "a b")(1, 2)
"""
    assert run(answer, record) == {"score": 1.0, "passed": 1.0, "error": None}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"question": "?"}, r"needs test_list, or test and entry_point, or inputs and outputs.*found: \['question'\]"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"), ({"test_list": []}, "has 0 tests"),
        ({"test_list": ["assert f(1) = 2"]}, "the record's tests cannot be run: SyntaxError"),
        ({"test_list": ["assert f(lambda x: x) == 2"]}, "cannot be run: the tests give the answer's code a function"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_tested_fails(record, message):
    with pytest.raises(ValueError, match=message):
        run(RIGHT, record)


@pytest.mark.parametrize(
    "response, block",
    [
        ("```python\na\n```", "a\n"), ("```py\na\n```\n```\nb\n```", "b\n"), ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na", "a"), ("x = 1", "x = 1"), ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```bash\nls\n```", None), ("<answer>```python\na\n```</answer>", "a\n"),
        ("```python\na\n```\nand\n```", "a\n"),
        ("```", None), ("", ""),
    ],
)  # fmt: skip
def test_the_last_block(response, block):
    assert last_block(response) == block


# --- attempts to get away with it

ESCAPES = {
    "prints": "print('passed'); print('{\"results\": [null, null]}')",
    "exits": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "claims equality": "class E:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x): return E()",
    "claims to be an int": """
class E(int):
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
def f(x): return E(0)
""",
    "claims a class": "class E:\n    __class__ = int\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
    "patches builtins": "import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef f(x): return 0",
    "defines builtins": "def all(x): return True\ndef f(x): return 0",
    "raises": "def f(x): raise AssertionError('passed')",
    "ends by exception": "def f(x): raise SystemExit(0)",
    "interrupts": "def f(x): raise KeyboardInterrupt",
    "kills its parents": """
import os
for process in (os.getppid(), 1):
    try: os.kill(process, 9)
    except OSError: pass
def f(x): return 0
""",
    "writes to every pipe": """
import os
for stream in range(3, 32):
    for text in (b'{"results": [null, null], "broken": null}\\n', b'["names", ["f"], []]\\n', b'["done",
    true, []]\\n' * 9):
        try: os.write(stream, text)
        except OSError: pass
def f(x): return 0
""",
    "rewrites the harness": """
import sys, gc
for frame in [sys._getframe(i) for i in range(3)]:
    frame.f_globals.update(Encoder=None, json=None)
for thing in gc.get_objects():
    if type(thing).__name__ == "Encoder": thing.__class__.encode = lambda *a: True
def f(x): return 0
""",
    "nests without end": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "returns itself": "def f(x):\n    a = []; a.append(a)\n    return a",
    "returns a lot": "def f(x): return 'x' * 10**7",
    "returns a bigint": "def f(x): return 10**10**5",
    "recurses": "def f(x): return f(x)",
    "takes memory": "a = bytearray(1 << 40)\ndef f(x): return x + 1",
    "takes files": "a = [open('/dev/null') for _ in range(1000)]\ndef f(x): return x + 1",
    "writes a large file": "open('a', 'wb').write(bytes(20 << 20))\ndef f(x): return x + 1",
    "null": "\0",
    "surrogate": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("attempt", ESCAPES)
def test_no_attempt_scores(attempt):
    result = run(ESCAPES[attempt])
    assert (result["score"], result["passed"]) == (0.0, 0.0), result
    assert result["error"] and len(result["error"]) <= 100 and result["error"].isprintable()


ENDLESS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(99)",
    "loops in the call": "def f(x):\n    while True: pass",
    "ignores signals": """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
}  # fmt: skip


@needs_namespaces
@pytest.mark.parametrize("kind", ENDLESS)
def test_what_does_not_end_is_ended(kind):
    assert run(ENDLESS[kind], seconds=0.5)["error"] == "the tests did not end in time"


def test_programs_that_do_not_end_or_write_without_end():
    record = {"inputs": ["", ""], "outputs": ["1", "1"]}
    assert score("print(1, flush=True)\nwhile True: pass", record, seconds=0.5, share=True) == 0
    assert score("while True: print(1)", record, seconds=1, share=True) == 0
    closed = "import os\nprint(1, flush=True)\nos.close(1)\nos.close(2)\nwhile True: pass"
    assert score(closed, record, seconds=0.5) == 0


def test_threads_are_possible_and_processes_are_not():
    threads = """
import threading
def f(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(x + 1))
    thread.start()
    thread.join()
    return found[0]
"""
    assert run(threads) == {"score": 1.0, "passed": 1.0, "error": None}
    if "seccomp" not in protections():
        pytest.skip("no seccomp here")
    for text in (
        "os.fork()",
        "os.system('true')",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run('true')",
    ):
        done = run(f"import os, subprocess\nif {text} == 0: pass\n{RIGHT}")
        assert done["score"] == 0 or text.startswith("os.system"), done  # which says by -1 that it could not
    assert run(f"import os\nassert os.system('true') != 0\n{RIGHT}")["score"] == 1


@pytest.mark.skipif(not protections() >= {"namespaces", "landlock"}, reason="not all of the protection here")
def test_nothing_is_reached(tmp_path, monkeypatch):
    """No network, no other process, no file outside, no environment: each attempt has to raise in there."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    attempts = [
        f"socket.create_connection(('127.0.0.1', {port}), 1)", "socket.create_connection(('1.1.1.1', 53), 1)",
        f"os.kill({os.getpid()}, 0)", f"open('/proc/{os.getpid()}/environ').read()", f"open({str(secret)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')", f"os.remove({str(secret)!r})", f"os.rename({str(secret)!r}, 'a')",
        f"os.truncate({str(secret)!r}, 0)", "os.environ['SOME_TOKEN']", "os.setuid(1)",
        f"os.mknod({str(tmp_path / 'node')!r})",
        "open('/proc/1/mem', 'rb').read()", f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
    ]  # fmt: skip
    tried = "\n".join(
        f"try:\n    {attempt}\n    done.append({attempt!r})\nexcept Exception: pass" for attempt in attempts
    )
    answer = f"import os, socket\ndone = []\n{tried}\ndef f(): return done\ndef home(): return os.listdir('.')"
    with server:
        result = run(answer, {"test_list": ["assert f() == [], f()", "assert home() == []"]})
    assert result == {"score": 1.0, "passed": 1.0, "error": None}
    assert secret.read_text() == "secret" and [path.name for path in tmp_path.iterdir()] == ["secret.txt"]


def test_a_row_scores_alone_among_others():
    rewards = make_rewards([functools.partial(code.code, run_model_code=True, namespaces=NAMESPACES)])
    texts = [f"```python\n{text}\n```" for text in (RIGHT, ESCAPES["exits at once"], RIGHT)]
    scores = rewards.score([""] * 3, texts, [PLUS_ONE, PLUS_ONE, {"answer": "?"}])
    assert scores.scores[:, 0].tolist() == [1, 0, 0]
    assert scores.valid.tolist() == [True, True, False]


def test_its_own_deadline_comes_before_the_workers():
    """Else a response that uses its time up would be a failed row, and not a wrong one."""
    from tests import tiny_folder  # which imports jax, and nothing else here does

    slow = f"code(run_model_code=True, seconds=12, namespaces={NAMESPACES})"
    with pytest.raises(UserError, match=r"config.reward.timeout = 10.0: .* may take 12 s .* must be given more"):
        tiny_folder.config(reward__functions=("exact", slow), reward__num_workers=1)
    for changes in ({"reward__timeout": 12.5, "reward__num_workers": 1}, {"reward__num_workers": 0}):
        tiny_folder.config(reward__functions=(slow,), **changes)
