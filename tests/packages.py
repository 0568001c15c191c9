"""Folders that look like installed distributions which add descriptors, averages or loggers."""

from pathlib import Path


def install(
    folder: Path,
    name: str,
    entries: dict[str, str],
    version: str = "1.0",
    group: str = "deepmd_ema.descriptors",
    **modules: str,
) -> None:
    """Write a distribution into a folder that is, or will be, on ``sys.path``.

    Args:
        folder: like site-packages.
        name: of the distribution.
        entries: its entry points: type -> ``module:name``.
        version: of the distribution.
        group: of the entry points.
        modules: source of its modules, by name.
    """
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    lines = [f"{kind} = {place}" for kind, place in entries.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
