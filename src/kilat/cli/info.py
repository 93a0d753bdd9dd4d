"""`kilat info`: versions, processor, threads, cache and backends, as a bug report needs them."""

from __future__ import annotations

from kilat.cli.output import JsonFlag, print_json, show, size, table


def _cpu_backend() -> dict[str, object]:
    """Return the instruction sets of the CPU kernels, the one in use, and the pool that runs them."""
    from kilat.backends.cpu import isa, pool

    return {
        "isa": isa.host_isa().name,
        "isas": [found.name for found in isa.supported_isas()],
        "thread_pool": "torch's OpenMP" if pool.kind() == "openmp" else "Python threads (no OpenMP library was found)",
    }


def _cache() -> dict[str, object]:
    from kilat.cli.cache import cache_files
    from kilat.config import cache_dir

    files = cache_files()
    return {"folder": str(cache_dir()), "files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def _backends() -> list[dict[str, object]]:
    """Return every backend of the registry, and why one that is missing is not available."""
    from kilat.backends import registry

    found = {name: registry.get(name) for name in registry.names()}
    return [
        {"name": name, "available": not isinstance(backend, str), "reason": backend if isinstance(backend, str) else ""}
        for name, backend in found.items()
    ]


def info(as_json: JsonFlag = False) -> None:
    """Print versions, processor features, threads, the kernel cache and the backends that are available."""
    from kilat.bench.machine import device, revision, versions

    sections: dict[str, dict[str, object]] = {
        "versions": dict(versions()),
        "processor": device(),
        "cpu kernels": _cpu_backend(),
        "cache": _cache(),
    }
    backends = _backends()
    if as_json:
        print_json({**sections, "backends": backends, "git": revision()})
        return
    for title, values in sections.items():
        made = table(title, "what", "value", left=2)
        for key, value in values.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            made.add_row(key, size(value) if key == "bytes" and isinstance(value, int) else text)
        show(made)
    made = table("backends", "name", "available", "why not", left=3)
    for backend in backends:
        made.add_row(str(backend["name"]), "yes" if backend["available"] else "no", str(backend["reason"]))
    show(made)
