"""The flags with which the tests' tiny programs compile in a tenth of the time. Imports no jax, which reads them when
it starts.

Programs are traced, cut and optimized as ever; only their translation into machine code is the one that takes the
least time.
"""

from importlib.metadata import version

FLAGS = ["--xla_backend_optimization_level=0"]
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):  # later ones end at a flag that they do not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
