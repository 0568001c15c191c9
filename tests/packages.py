"""Folders that look like installed distributions which add descriptors."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, entries: dict[str, str], version: str = "1.0", **modules: str) -> None:
    """Write a distribution into a folder that is, or will be, on ``sys.path``.

    Args:
        folder: like site-packages.
        name: of the distribution.
        entries: its entry points for descriptors: type -> ``module:name``.
        version: of the distribution.
        modules: source of its modules, by name.
    """
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{kind} = {place}" for kind, place in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[deepmd_ema.descriptors]", *lines, ""]))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
