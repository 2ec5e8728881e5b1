"""Draws every policy loss of one token against the ratio r = π / π_old.

    python -m benchmarks.losses --out docs/losses.png

Solid: the loss; dashed: its slope in log π, which is what the optimizer sees (where it is 0 the token teaches nothing).
Both come from the functions of the package with their own defaults. A batch is one token, so that a row's ratio is its
token's. Losses that read a probability beside the ratio have π_old = 1/4, so that r may go up to 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.losses import POLICY_LOSSES, Norm
from jaxrl_llm.types import Array

PI_OLD = 0.25
RATIOS = np.geomspace(1 / 4, 4, 2001)
ONE = Norm(tokens=jnp.float32(1), sequences=jnp.float32(1))

# Orange and blue are told apart by every kind of colour vision.
COLORS = {1.0: "#0072B2", -1.0: "#D55E00"}


# Options that the shape of a curve depends on, and how a panel calls them.
NAMED = {
    "clip_ratio_low": "low",
    "clip_ratio_high": "high",
    "clip_ratio_c": "c",
    "tau_pos": "τ₊",
    "tau_neg": "τ₋",
    "dro_beta": "β",
    "ppo_kl_coef": "coef",
    "rollout_is_threshold": "threshold",
}


class Panel(NamedTuple):
    """One loss as it is drawn."""

    title: str
    options: str  # the defaults that shape it
    loss: Callable[[Array, float], Array]  # log π float [], A -> the token's loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/losses.png"))
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    shown = panels()
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(shown) // columns), columns, figsize=(12, 9), layout="constrained", sharex=True, sharey=True
    )
    for ax, panel in zip(axes.flat, shown, strict=True):
        for advantage, color in COLORS.items():
            losses, slopes = curve(panel, advantage)
            ax.plot(RATIOS, losses, color=color, linewidth=2.2)
            ax.plot(RATIOS, slopes, color=color, linewidth=1.4, linestyle=(0, (4, 2)))
        ax.axvline(1, color="black", linewidth=0.6)
        ax.axhline(0, color="black", linewidth=0.6)
        ax.set_title(panel.title, fontsize=12)
        ax.text(0.03, 0.03, panel.options, transform=ax.transAxes, ha="left", color="#444444", fontsize=9)
        ax.grid(alpha=0.2)
    axes.flat[0].set(xscale="log", xlim=(1 / 4, 4), ylim=(-4.2, 4.2))
    axes.flat[0].set_xticks([1 / 4, 1 / 2, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    axes.flat[0].minorticks_off()
    for ax in axes[-1]:
        ax.set_xlabel("ratio r")
    handles = [
        Line2D([], [], color=COLORS[1.0], linewidth=2.2, label="A = +1: loss"),
        Line2D([], [], color=COLORS[1.0], linewidth=1.4, linestyle=(0, (4, 2)), label="slope in log π"),
        Line2D([], [], color=COLORS[-1.0], linewidth=2.2, label="A = −1: loss"),
        Line2D([], [], color=COLORS[-1.0], linewidth=1.4, linestyle=(0, (4, 2)), label="slope in log π"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=11)
    figure.savefig(args.out, dpi=110)


def panels() -> list[Panel]:
    """The losses in the registry's order; of those that treat tokens in two ways, the one that is their own."""
    own: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
        "bypass_mode": (": reinforce", {"loss_type": "reinforce"}, ("rollout_is_threshold",)),
        # The bounds of the covariance, which is 0 in a batch of one token, are opened, and every token is drawn.
        "clip_cov": (
            ": a token drawn",
            {"clip_cov_lb": -jnp.inf, "clip_cov_ub": jnp.inf, "clip_cov_ratio": 1.0},
            ("clip_ratio_low", "clip_ratio_high"),
        ),
        "kl_cov": (": a token penalized", {}, ("ppo_kl_coef",)),
    }
    found = []
    for name, entry in POLICY_LOSSES.items():
        suffix, options, shaping = own.get(name, ("", {}, tuple(NAMED)))
        values = {NAMED[key]: entry.options[key] for key in shaping if key in entry.options}
        text = "  ".join(f"{key} {value:g}" for key, value in values.items())
        found.append(Panel(name + suffix, text, partial(alone, name, **options)))
    return found


def alone(name: str, log_prob: Array, advantage: float, **options: Any) -> Array:
    """The loss of a batch of one token."""
    new, old = log_prob.reshape(1, 1), jnp.full((1, 1), np.log(PI_OLD))
    advantages, mask = jnp.full((1, 1), advantage), jnp.ones((1, 1), bool)
    return POLICY_LOSSES[name](new, old, advantages, mask, ONE, key=jax.random.key(0), **options)[0]


def curve(panel: Panel, advantage: float) -> tuple[Array, Array]:
    """Loss and slope in log π at each of RATIOS."""
    # A hair below 1, so that the last probability has a logarithm and an odds ratio.
    log_probs = jnp.log(jnp.minimum(PI_OLD * jnp.asarray(RATIOS), 1 - 1e-6))
    return jax.jit(jax.vmap(jax.value_and_grad(lambda x: panel.loss(x, advantage))))(log_probs)


if __name__ == "__main__":
    main()
