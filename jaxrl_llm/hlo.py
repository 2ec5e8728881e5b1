"""What a compiled program does on one device, read from its HLO text: matrix products and collectives, with how often
each runs. XLA's own `cost_analysis` counts the body of a loop once; here a loop with a known number of rounds counts so
often, and what lies in one without (the sampling of tokens) is marked.

Library calls that stand for a matrix product (cuBLAS on a GPU) are not seen: there `dot_flops` is too low.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
SIZES = {"pred": 1, "c64": 8, "c128": 16}  # bytes; those of other dtypes are in their names

_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$", re.M)
_CALLED = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_COLLECTIVE = re.compile(rf"^({'|'.join(KINDS)})(?:-start)?$")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    kind: str  # of KINDS
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each array that it moves, on one device
    axes: tuple[str, ...]  # of the mesh, along which devices exchange; ("?",) where the text was not understood
    devices: int  # that exchange with each other
    times: int  # rounds of the loops around it whose number is known
    per_token: bool  # whether a loop without a known number of rounds is around it as well
    op: str  # name of the operation in the traced function
    line: str  # of the text

    @property
    def bytes(self) -> int:
        """Of the whole arrays: what an all-gather gives, what a reduce-scatter takes; once."""
        own = sum(math.prod(shape) * dtype_bytes(dtype) for dtype, shape in self.shapes)
        return own * self.devices if self.kind == "reduce-scatter" else own

    @property
    def wire_bytes(self) -> float:
        """That one device sends, by the ring algorithm; once."""
        return wire_bytes(self.kind, self.bytes, self.devices)


def wire_bytes(kind: str, size: float, devices: int) -> float:
    """Bytes that each of `devices` sends for a collective over arrays of `size` bytes, by the ring algorithm:
    size · (k − 1)/k, twice that for an all-reduce; a permutation sends everything.

    >>> wire_bytes("all-gather", 80, 8), wire_bytes("all-reduce", 80, 8), wire_bytes("all-reduce", 80, 1)
    (70.0, 140.0, 0.0)
    """
    if kind.startswith("collective"):
        return float(size)
    return (2 if kind == "all-reduce" else 1) * size * (devices - 1) / devices


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    >>> dtype_bytes("f32"), dtype_bytes("bf16"), dtype_bytes("pred"), dtype_bytes("f8e4m3fn")
    (4, 2, 1, 1)
    """
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return SIZES.get(dtype) or (max(int(digits[1]) // 8, 1) if digits else 0)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    rest: str  # operands and attributes


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """name -> instructions, and the entry's name."""
    found, entry = {}, ""
    text = re.sub(r"/\*.*?\*/", "", text)  # numbers in front of every fifth element of a tuple
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ (?:\(|\{))", text):
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(|\{)", block)
        if head is None:
            continue
        found[head[2]] = [_Instruction(*match.groups()) for match in _INSTRUCTION.finditer(block)]
        entry = head[2] if head[1] else entry
    return found, entry


def _rounds(computations: Mapping[str, list[_Instruction]], entry: str) -> dict[str, list[tuple[int, bool]]]:
    """computation -> for each way that it is reached, how often it runs and whether in a loop of unknown length."""
    reached: dict[str, list[tuple[int, bool]]] = {}

    def visit(name: str, times: int, unknown: bool) -> None:
        reached.setdefault(name, []).append((times, unknown))
        for instruction in computations.get(name, ()):
            rest = instruction.rest
            called = [callee for _, callee in _CALLED.findall(rest)]
            for several in _LISTED.findall(rest):
                called += [callee.strip().lstrip("%") for callee in several.split(",")]
            trips = _TRIPS.search(rest) if instruction.opcode == "while" else None
            in_loop = instruction.opcode == "while"
            for callee in called:
                if callee in computations:
                    visit(callee, times * (int(trips[1]) if trips else 1), unknown or (in_loop and not trips))

    visit(entry, 1, False)
    return reached


def _shapes(result: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _SHAPE.findall(result)]


def dot_flops(text: str) -> tuple[float, float]:
    """FLOPs of the matrix products on one device (a multiplication and an addition are two): outside of loops of
    unknown length, and in one round of those."""
    computations, entry = _computations(text)
    totals = [0.0, 0.0]
    for name, ways in _rounds(computations, entry).items():
        results = {i.name: i.result for i in computations.get(name, ())}
        flops = sum(_flops(i, results) for i in computations.get(name, ()) if i.opcode == "dot")
        for times, unknown in ways:
            totals[unknown] += times * flops
    return totals[0], totals[1]


def _flops(dot: _Instruction, results: Mapping[str, str]) -> float:
    first = re.match(r"\s*(?:\S+\[[\d,]*\]\S* )?%?([\w.\-]+)", dot.rest)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    if first is None or first[1] not in results:
        return 0.0
    (_, lhs), (_, out) = _shapes(results[first[1]])[0], _shapes(dot.result)[0]
    inner = [lhs[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2.0 * math.prod(out) * math.prod(inner)


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of a program for a mesh, axis name -> size, in the mesh's order of devices.

    What only one device takes part in moves nothing and is left out.
    """
    computations, entry = _computations(text)
    found = []
    for name, ways in _rounds(computations, entry).items():
        for instruction in computations.get(name, ()):
            match = _COLLECTIVE.match(instruction.opcode)
            if match is None:
                continue
            kind, shapes = match[1], _shapes(instruction.result)
            if instruction.opcode == "all-gather-start" and len(shapes) > 1:
                shapes = shapes[len(shapes) // 2 :]  # operands, then results
            elif instruction.opcode == "collective-permute-start":
                shapes = shapes[1:2]
            groups = _groups(instruction.rest, math.prod(mesh.values()))
            axes, devices = _axes(groups, mesh)
            op = re.search(r'op_name="([^"]*)"', instruction.rest)
            line = f"{instruction.name} = {instruction.result} {instruction.opcode}({instruction.rest}"
            made = [
                Collective(kind, tuple(shapes), axes, devices, times, unknown, op[1] if op else "", line)
                for times, unknown in ways
            ]
            found += [c for c in made if devices > 1 or axes == ("?",)]
    return found


def _groups(rest: str, total: int) -> list[list[int]]:
    """The devices that exchange with each other; [] where the text is not understood. Permutations: pairs."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
    if pairs:
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])]
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest)
    if listed:
        return [[int(n) for n in g.split(",") if n] for g in re.findall(r"\{([\d,]*)\}", listed[1])] or [
            [*range(total)]
        ]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1])).tolist()
    return list(_mesh_groups(rest))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(dims: str, order: str | None) -> np.ndarray:
    sizes = _numbers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_groups(rest: str) -> Iterator[list[int]]:
    """Of replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([4,2]T(1,0)) {'axis_1'}: named axes, some of which may
    be parts of an axis, 'axis_0':(2)4 the part of size 4 behind one of size 2."""
    match = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", rest
    )
    if match is None:
        return
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    ids = _iota(match[2], match[3]) if match[2] else np.arange(math.prod(sizes.values()))
    split, chosen = [], []
    parts = {name: (int(before), int(size)) for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", match[4])}
    whole = set(re.findall(r"'([^']+)'(?!:)", match[4]))
    for name, size in sizes.items():
        before, own = parts.get(name, (1, size if name in whole else 1))
        chosen.append(len(split) + 1)
        split += [before, own, size // (before * own)]
    grid = np.moveaxis(ids.reshape(split), chosen, range(-len(chosen), 0))
    yield from grid.reshape(-1, math.prod(split[i] for i in chosen)).tolist()


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh's axes along which the devices of the groups differ, and how many devices are in one."""
    if not groups:
        return ("?",), 0
    sizes = tuple(mesh.values())
    varies = [False] * len(sizes)
    for group in groups:
        places = np.array(np.unravel_index(np.asarray(group), sizes))
        varies = [old or len(set(row)) > 1 for old, row in zip(varies, places.tolist(), strict=True)]
    axes = tuple(name for name, differs in zip(mesh, varies, strict=True) if differs)
    return axes, max(len(group) for group in groups) if axes else 1
