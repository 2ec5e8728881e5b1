"""Cases of every formula, computed by an independent implementation: `python -m tests.golden DIR` runs an index of
them.

`cases` reads and compares, `adapters` translates a case into calls of jaxrl_llm, `design` knows where this project
answers otherwise on purpose and checks its own rule there. `data/` holds the project's copy of the cases.
"""
