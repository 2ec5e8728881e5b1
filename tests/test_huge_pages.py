"""Commands that start themselves once more, in memory that they keep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import huge_pages

KEPT = ":".join(f"glibc.malloc.{name}={value}" for name, value in huge_pages.KEPT.items())
HUGE = f"{KEPT}:glibc.malloc.hugetlb=1"
COMMAND = """
import os, sys
from jaxrl_llm import huge_pages
huge_pages._pages = lambda: "always [madvise] never"
huge_pages._glibc = lambda: (2, 36)
print("began", flush=True)
huge_pages.in_huge_pages()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.warnoptions)
"""


@pytest.mark.parametrize(
    ("given", "pages", "glibc", "expected"),
    [
        ({}, "always [madvise] never\n", (2, 35), HUGE),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, "[madvise]", (2, 36), f"glibc.rtld.nns=4:{HUGE}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "[madvise]", (2, 36), None),  # who wants to say it all
        ({"GLIBC_TUNABLES": HUGE}, "[madvise]", (2, 36), None),  # the command that was started again
        ({}, "[always] madvise never", (2, 36), KEPT),  # has huge pages already
        ({}, "always madvise [never]", (2, 36), KEPT),
        ({}, "", (2, 36), KEPT),
        ({}, "[madvise]", (2, 34), KEPT),
        ({}, "[madvise]", (2, 25), None),
        ({}, "[madvise]", (), None),
    ],
)
def test_a_command_asks_for_what_the_system_gives(
    given: dict[str, str], pages: str, glibc: tuple[int, ...], expected: str | None
) -> None:
    found = huge_pages._environment({"HOME": "/", **given}, pages, glibc)
    assert found == (expected and {"HOME": "/", "GLIBC_TUNABLES": expected})


@pytest.mark.parametrize(("given", "times"), [("", 2), ("glibc.malloc.hugetlb=0", 1)])
def test_a_command_begins_again_as_it_was(tmp_path: Path, given: str, times: int) -> None:
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    command = [sys.executable, "-W", "ignore", str(script), "--config.key=a b", "--last"]
    environ = {**os.environ, "GLIBC_TUNABLES": given}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    assert lines[:-1] == ["began"] * times
    setting = HUGE if times == 2 else given
    assert lines[-1] == f"{process.pid} {setting} ['--config.key=a b', '--last'] ['ignore']"
