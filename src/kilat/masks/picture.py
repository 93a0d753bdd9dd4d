"""Pictures of masks: characters for a terminal, SVG for a page."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from numpy.typing import NDArray

from kilat.masks.core import Mask

_CELL = 12


@dataclass(frozen=True)
class MaskPicture:
    """Which keys (columns) each query (row) sees; `str` is the picture in characters."""

    title: str
    visible: NDArray[Any]
    """bool [seqlen_q, seqlen_kv]"""

    def __str__(self) -> str:
        rows = ["".join("█" if x else "·" for x in row) for row in self.visible]
        return "\n".join([f"{self.title}: queries down, keys across, █ visible", *rows])

    def svg(self) -> str:
        """The picture as SVG."""
        seqlen_q, seqlen_kv = self.visible.shape
        width, height = seqlen_kv * _CELL + 1, seqlen_q * _CELL + 1
        cells = [
            f'<rect x="{j * _CELL + 1}" y="{i * _CELL + 1}" width="{_CELL - 1}" height="{_CELL - 1}" '
            f'fill="{"#2f6db5" if self.visible[i, j] else "#e6e6e6"}"/>'
            for i in range(seqlen_q)
            for j in range(seqlen_kv)
        ]
        title = self.title.replace("&", "&amp;").replace("<", "&lt;")
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><title>{title}</title>'
        return "\n".join([head, *cells, "</svg>", ""])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the picture to a file whose name ends in .svg or .txt; raises ValueError for another ending."""
        name = fspath(path)
        if not name.endswith((".svg", ".txt")):
            raise ValueError(f"path must end in .svg or .txt; got path={name!r}")
        with open(name, "w", encoding="utf-8") as file:
            file.write(self.svg() if name.endswith(".svg") else f"{self}\n")


def draw(mask: Mask, seqlen_q: int, seqlen_kv: int, batch: int, head: int) -> MaskPicture:
    """The picture of one batch entry and head."""
    from kilat.masks.ranges import visible

    return MaskPicture(mask.name, visible(mask, batch, head, seqlen_q, seqlen_kv))
