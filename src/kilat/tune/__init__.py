"""Tuning tables: what was fastest on a machine, measured by `kilat tune`, and read by the backends' heuristics.

A configuration comes from the first of these that has one: what a caller forces (`lookup.forced`), the user's table,
the table in this package, the backend's built-in rule.
"""
