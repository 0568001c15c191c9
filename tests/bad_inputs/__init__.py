"""Bad inputs: a desk to try one by hand, and a generator of hundreds (``python tests/bad_inputs --help``)."""

from bad_inputs.desk import GOOD, USER, Desk, Told, sit_down, write_systems

__all__ = ["GOOD", "USER", "Desk", "Told", "sit_down", "write_systems"]
