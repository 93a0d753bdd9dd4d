"""The version of the package: the one place that states it (pyproject.toml and `kilat info` read it from here)."""

__version__ = "0.1.0"
