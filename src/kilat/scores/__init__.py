"""Score modifiers: one file each, f and its derivative side by side."""

from kilat.scores.alibi import Alibi
from kilat.scores.bias import Bias
from kilat.scores.core import ScoreModifier, in_order
from kilat.scores.softcap import Softcap
from kilat.scores.user import Score

__all__ = ["Alibi", "Bias", "Score", "ScoreModifier", "Softcap", "in_order"]
