"""Prepare flash-attn-4, a peer of `kilat bench --suite h200`, for a GPU machine without network.

Downloads the wheels (Linux x86-64, Python 3.12) and packs what is in them tighter, so that all of it stays below
60 MiB; then prints the lines that unpack it on the other machine. About eight minutes of one core at the lowest
priority; what is already there is not made again. The wheels belong to their makers: never commit them.

    python scripts/peers.py [FOLDER]        default: build/peers, which git ignores
    python scripts/peers.py --lines FOLDER  only print the lines
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Deflate sees 32 KiB back, xz the whole archive, and it knows x86 jumps: 102 MB of wheels become 55 MiB.
ARCHIVES = {
    "packages.tar.xz": (
        "flash-attn-4==4.0.0b36",
        "nvidia-cutlass-dsl==4.8.1",
        "nvidia-cutlass-dsl-libs-base==4.8.1",
        "nvidia-cutlass-dsl-libs-core==4.8.1",
        "quack-kernels==0.6.5",
        "apache-tvm-ffi==0.1.15.post2",
        "torch-c-dlpack-ext==0.1.5",
        "einops==0.8.2",
    ),
    "libs-cu13.tar.xz": ("nvidia-cutlass-dsl-libs-cu13==4.8.1",),
}
XZ = ("xz", "--x86", "--lzma2=preset=9e,dict=192MiB", "--stdout")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
BUDGET = 60 << 20


def download(requirements: tuple[str, ...], folder: Path) -> None:
    """Fetch wheels for Python 3.12 on Linux x86-64 without what they depend on; raises if one does not exist."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *requirements]
    subprocess.run(command, check=True)


def pack(wheels: list[Path], archive: Path) -> None:
    """Unpack wheels into one place, as an installation would, and pack that; the archive appears when it is whole."""
    part = archive.with_suffix(".part")
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                if any(".data/" in name for name in opened.namelist()):
                    raise ValueError(f"{wheel.name} must be installed by unpacking alone; it has a .data folder")
                opened.extractall(scratch)
        with (
            part.open("wb") as written,
            subprocess.Popen(["tar", "c", "-C", scratch, "."], stdout=subprocess.PIPE) as tar,
        ):
            subprocess.run(XZ, stdin=tar.stdout, stdout=written, check=True)
        if tar.returncode:
            raise RuntimeError(f"tar ended with {tar.returncode}; {part} is not whole")
    part.replace(archive)


def prepare(folder: Path) -> None:
    """Fill `folder`, skipping what it holds already."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, requirements in ARCHIVES.items():
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory() as scratch:
                download(requirements, Path(scratch))
                pack(sorted(Path(scratch).glob("*.whl")), folder / name)


def size(folder: Path) -> int:
    """Bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def lines(folder: str) -> str:
    """Shell lines that unpack `folder` on the other machine, where it may be read-only.

    The .pth file of the DSL is not read from such a place, so its package path is named, too. flash-attn-4 keeps its
    kernels there, so that processes share what each of them compiles.
    """
    return "\n".join(
        (
            "SITE=/tmp/peers-site; mkdir -p $SITE",
            f"for name in {' '.join(ARCHIVES)}; do tar xJf {folder}/$name -C $SITE; done",
            "export PYTHONPATH=$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages:$PYTHONPATH",
            "export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/tmp/peers-kernels",
        )
    )


def main() -> int:
    """Prepare the folder and print the lines; 1 if it is too large to travel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--lines", action="store_true", help="only print the lines for the other machine")
    options = parser.parse_args()
    if not options.lines:
        if shutil.which("xz") is None:
            parser.error("xz must be on PATH; got none")
        os.nice(19)
        prepare(options.folder)
        total = size(options.folder)
        print(f"# {options.folder}: {total / 2**20:.1f} MiB")
        if total > BUDGET:
            print(f"too large to travel: at most {BUDGET >> 20} MiB", file=sys.stderr)
            return 1
    print(lines(str(options.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
