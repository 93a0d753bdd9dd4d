"""Measurements: contenders timed in turn after each was checked, limits of the machine, peak memory, reports."""
