"""How a process locks itself down before it runs a model's code: limits, namespaces, Landlock. See `sandbox.py`.

The standard library only: it is read by a Python that has nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from typing import Any

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on x86-64 and arm64
WRITE_FILE, READ_FILE, REFER, TRUNCATE = 1 << 1, 1 << 2, 1 << 13, 1 << 14
READS = (1 << 0) | READ_FILE | (1 << 3)  # execute, read files, list folders
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # write, remove, make: what Landlock's first version has
# machine -> its number in audit.h; clone; calls that are refused: fork, vfork, unshare, setns, ptrace,
# process_vm_writev, mount, bpf, perf_event_open, userfaultfd, add_key, request_key, keyctl, io_uring_setup
CALLS = {
    "x86_64": (0xC000003E, 56, (57, 58, 272, 308, 101, 311, 165, 321, 298, 323, 248, 249, 250, 425)),
    "aarch64": (0xC00000B7, 220, (97, 268, 117, 271, 40, 280, 241, 282, 217, 218, 219, 425)),
}
CLONE3, CLONE_THREAD, PR_SET_SECCOMP = 435, 0x10000, 22
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24


def limit(limits: dict[str, Any]) -> None:
    """Resource limits of this process and what it starts."""
    for name, value in (
        ("RLIMIT_AS", limits["memory_mb"] << 20),
        ("RLIMIT_CPU", limits["seconds"] + 1),
        ("RLIMIT_FSIZE", limits["file_mb"] << 20),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_NPROC", 64),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def isolate() -> bool:
    """New namespaces of users, network, processes and IPC: no network, and no process outlives or sees beyond it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC) != 0:
        return False
    for path, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
        except OSError:
            return False
    return True


def fence_in(folder: str) -> bool:
    """By Landlock: nothing is written, made or removed outside the folder and /dev/null (Linux 5.13), nothing read but
    it, Python and the system's libraries; no TCP (6.7); no signal to, and no look into, a process outside (6.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = READS | WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = (ctypes.c_uint64 * 3)(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.byref(handled), size, 0)
    if ruleset < 0:
        return False
    on_files = WRITE_FILE | READ_FILE | (rights & TRUNCATE)
    rules = [(folder, rights), ("/dev/null", on_files), ("/dev/urandom", READ_FILE), ("/etc/localtime", READ_FILE)]
    readable = {sys.base_prefix, os.path.dirname(os.__file__), "/usr", "/lib", "/lib64", "/bin"}
    for path, allowed in [*rules, *((path, READS) for path in sorted(readable))]:
        try:
            opened = os.open(path, os.O_PATH)
        except OSError:
            continue
        rule = allowed.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        failed = libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(opened)
        if failed:
            return False
    done = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def drop_privileges() -> None:
    """The capabilities that a new user namespace gives, which could undo it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)
    libc.capset(header, bytes(24))


def refuse_calls() -> bool:
    """By seccomp: no new processes (threads are allowed), and none of the calls that only an attack needs. Root is
    bound by no limit of processes, so that without this a fork bomb would take the machine until its deadline."""
    machine = os.uname().machine
    if machine not in CALLS:
        return False
    architecture, clone, refused = CALLS[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, no, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    # x86-64 has a second table of calls from this number on.
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, no)]
    for call in refused:
        program += [(equal, 0, 1, call), (give, 0, 0, no)]
    program += [(equal, 0, 1, CLONE3), (give, 0, 0, unknown)]  # the C library then uses clone, whose flags can be read
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD), (give, 0, 0, no)]
    program += [(give, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    filters = struct.pack("HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(PR_SET_SECCOMP, 2, filters, 0, 0) == 0


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def locked_down(given: dict[str, Any]) -> None:
    """Returns in a process that is locked down; those above it wait, and end with it.

    The process that runs code is not the first of its namespace: that one, which no signal from within ends, only
    waits, and dies with the one outside; and with it dies everything in the namespace.
    """
    die_with_parent()
    isolated = isolate()
    if given["namespaces"] and not isolated:
        os._exit(1)
    for _ in range(2 if isolated else 0):
        child = os.fork()
        if child:
            for stream in given["pipes"]:
                os.close(stream)
            while True:
                try:
                    ended, status = os.wait()
                except InterruptedError:
                    continue
                if ended == child:
                    os._exit(min(os.waitstatus_to_exitcode(status) & 0xFF, 255))
        die_with_parent()
    limit(given["limits"])
    done = [("namespaces", isolated), ("landlock", fence_in(os.getcwd()))]
    drop_privileges()
    done.append(("seccomp", refuse_calls()))
    # Only now, and only if all of this has been done, it says that it is ready, and of what is optional what it has.
    ready = given["pipes"].pop(0)
    os.write(ready, " ".join(["ready", *(name for name, worked in done if worked)]).encode())
    os.close(ready)
