"""Numerics of this machine: a sample of all options against float64, torch's errors beside."""

from kilat.checks.report import Report, Row
from kilat.checks.run import CASES, check

__all__ = ["CASES", "Report", "Row", "check"]
