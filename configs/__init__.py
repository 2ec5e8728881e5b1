"""Recipes: one file per experiment, each with a `get_config()` that starts from `configs.base`."""
