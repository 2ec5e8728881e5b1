"""Measures the products of an update by themselves: every kernel of a layer and the head, forwards and backwards.

    python -m benchmarks.products --json
    python -m benchmarks.products --preset smollm2-135m --tokens 2048 --head-tokens 1024

`of_peak` is a product's share of the rate of the square product that `of_peak` of the other benchmarks is of, measured
before and after it. The last line is of all of them, each counted as often as an update computes it: what an update
would come to that did nothing beside them. Attention's products, of small matrices, are not among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks.measure.clock import beside_peak
from benchmarks.measure.options import positive
from benchmarks.measure.presets import PRESETS
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.models.products import matmul, matmul_rows

Kernel = tuple[str, tuple[int, int], int]  # name, [in, out], how many of them


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="smollm2-135m")
    parser.add_argument("--tokens", type=positive, default=2048, help="of a micro-batch (2048)")
    parser.add_argument(
        "--head-tokens", type=positive, default=1024, help="of them, those whose logits are wanted (1024)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="calls that are timed, after one that is not (5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON a product")
    options = parser.parse_args(argv)
    flops = at_peak = 0.0
    for line, times in measure(PRESETS[options.preset], options.tokens, options.head_tokens, options.repeats):
        flops, at_peak = flops + times * line["gflop"], at_peak + times * line["gflop"] / line["of_peak"]
        _print(line, options.json)
    _print({"product": "all", "gflop": flops, "of_peak": flops / at_peak}, options.json)


def kernels(preset: dict[str, Any]) -> list[Kernel]:
    """Those of all layers, and last the head, whose table has a row a token."""
    width, hidden, layers = preset["hidden_size"], preset["intermediate_size"], preset["num_hidden_layers"]
    size = preset.get("head_dim") or width // preset["num_attention_heads"]
    heads, kv = (preset[f"num_{of}_heads"] * size for of in ("attention", "key_value"))
    shapes = {"q": (width, heads), "k": (width, kv), "v": (width, kv), "o": (heads, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return [*((name, shape, layers) for name, shape in shapes.items()), ("head", (preset["vocab_size"], width), 1)]


def measure(
    preset: dict[str, Any], tokens: int, head_tokens: int, repeats: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """A line of each product, and how many such an update computes."""
    for name, shape, times in kernels(preset):
        head = name == "head"
        product = matmul_rows if head else matmul
        rows, (given, found) = (head_tokens, shape[::-1]) if head else (tokens, shape)
        keys = jax.random.split(jax.random.key(0), 3)
        x, kernel, g = (
            jax.random.normal(k, s) for k, s in zip(keys, ((rows, given), shape, (rows, found)), strict=True)
        )

        def backward(x: jax.Array, kernel: jax.Array, g: jax.Array, product: Any = product) -> Any:
            return jax.vjp(product, x, kernel)[1](g)

        for way, function, arguments, count in (
            ("forward", product, (x, kernel), 1),
            ("backward", backward, (x, kernel, g), 2),
        ):
            gflop = count * 2 * rows * given * found / 1e9
            seconds, peaks = beside_peak(_ready(jax.jit(function), arguments), repeats, "float32")
            shares = [gflop * 1e9 / s / peak for s, peak in zip(seconds, peaks, strict=True)]
            yield {"product": name, "way": way, "gflop": gflop, "of_peak": statistics.median(shares)}, times


def _ready(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))


def _print(line: dict[str, Any], as_json: bool) -> None:
    line = {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(line) if as_json else "  ".join(f"{value}" for value in line.values()), flush=True)


if __name__ == "__main__":
    in_huge_pages()
    main()
