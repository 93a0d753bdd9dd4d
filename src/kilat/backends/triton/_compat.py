"""What differs between Triton 3.6 and 3.9, and what every launch must say."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
"""Options of every launch; from Triton 3.10 on fused multiply-add must be asked for."""
