"""`kilat cache show` and `kilat cache clear`: the compiled kernels on disk."""

from __future__ import annotations

from pathlib import Path

import typer

from kilat.cli.output import JsonFlag, print_json, show, size, table

app = typer.Typer(help="Show or clear the compiled kernels on disk.", no_args_is_help=True)


def cache_files() -> list[Path]:
    """Return the files of compiled kernels in the cache folder, in the order of names; none if there is no folder."""
    from kilat.backends.store import entries
    from kilat.config import cache_dir

    if cache_dir().is_file():
        raise ValueError(f"KILAT_CACHE_DIR must name a folder, or one to be made; got the file {str(cache_dir())!r}")
    return list(entries())


@app.command("show")
def show_cache(as_json: JsonFlag = False) -> None:
    """List the compiled kernels: name and size, and the folder that they are in."""
    from kilat.config import cache_dir

    files = [{"name": path.name, "bytes": path.stat().st_size} for path in cache_files()]
    total = sum(path.stat().st_size for path in cache_files())
    if as_json:
        print_json({"folder": str(cache_dir()), "bytes": total, "files": files})
        return
    made = table(f"{len(files)} compiled kernels, {size(total)}", "name", "size")
    for file in files:
        made.add_row(str(file["name"]), size(int(str(file["bytes"]))))
    show(made)
    show(f"folder: {cache_dir()} (KILAT_CACHE_DIR changes it)")


@app.command("clear")
def clear_cache(as_json: JsonFlag = False) -> None:
    """Delete the compiled kernels; they are compiled again at their next use."""
    files = cache_files()
    total = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    if as_json:
        print_json({"removed": len(files), "bytes": total})
    else:
        show(f"removed {len(files)} compiled kernels, {size(total)}")
