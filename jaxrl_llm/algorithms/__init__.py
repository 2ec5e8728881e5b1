"""Arrays in, arrays out: the formulas of reinforcement learning on language models.

Nothing here knows a model, a config object or a trainer. Every function works under `jax.jit`, `jax.grad` and
`jax.vmap`, keeps float64 if given float64, and never lets a masked-out entry (NaN and infinity included) reach a value
or a gradient. `B` counts rows (responses), `R` is the response width, `V` the vocabulary, `K` the reward functions.
"""
