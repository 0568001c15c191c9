"""Installs the pretended device in every process that has this folder in its path."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "pretend_cuda", Path(__file__).parents[1] / "__init__.py"
)
sys.modules["pretend_cuda"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["pretend_cuda"])
sys.modules["pretend_cuda"].install()
