"""Builds the pretended device if its sources have changed, and runs a module or a script with
it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "collectives.cpp")
SITE, LIBRARY = HERE / "site", "PRETEND_CUDA_LIBRARY"


def main() -> int:
    """Run ``python WORDS`` with the pretended device, and return its exit code."""
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/pretend_cuda -m MODULE ... | SCRIPT ...")
    os.environ[LIBRARY] = str(built())
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return subprocess.call([sys.executable, *sys.argv[1:]])


def built() -> Path:
    """Return the extension for this torch, compiled if it is not in the cache; that takes one to
    two minutes.
    """
    import torch

    if torch.version.cuda is not None:
        sys.exit(
            "the pretended device needs a torch without CUDA; this one can use a real GPU: python "
            "-m pytest -m gpu"
        )
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        sys.exit(
            "the pretended device is compiled with g++, which was not found: install it, or name "
            "yours in CXX"
        )
    text = (
        "".join((HERE / name).read_text() for name in (*SOURCES, "device.h"))
        + torch.__version__
        + sys.version
    )
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dp-ema-tests"
    )
    library = (
        folder / f"pretend_cuda-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    )
    if not library.exists():
        print(
            "compiling the pretended CUDA device (once, about a minute)",
            file=sys.stderr,
        )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            compile_sources(compiler, Path(made))
            os.replace(Path(made) / "library.so", library)
    return library


def compile_sources(compiler: str, folder: Path) -> None:
    """Compile the sources side by side, and link them to ``library.so`` in ``folder``."""
    from torch.utils.cpp_extension import include_paths, library_paths

    flags = [
        "-O1",
        "-w",
        "-fPIC",
        "-std=c++20",
        "-DTORCH_EXTENSION_NAME=pretend_cuda_device",
    ]
    flags += [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    objects = [folder / f"{name}.o" for name in SOURCES]
    runs = [
        subprocess.Popen([compiler, *flags, "-c", str(HERE / name), "-o", str(made)])
        for name, made in zip(SOURCES, objects, strict=True)
    ]
    codes = [run.wait() for run in runs]
    if any(codes):
        sys.exit("the pretended device could not be compiled")
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    paths = [f"-L{path}" for path in library_paths()]
    words = [
        compiler,
        "-shared",
        *map(str, objects),
        "-o",
        str(folder / "library.so"),
        *paths,
        *libraries,
    ]
    subprocess.run(words, check=True)


if __name__ == "__main__":
    sys.exit(main())
