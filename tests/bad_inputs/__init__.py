"""Bad inputs: a desk to try one of them, and a generator of hundreds (``python tests/bad_inputs --help``)."""

from bad_inputs.desk import GOOD, USER, Desk, Reported, sit_down, write_systems

__all__ = ["GOOD", "USER", "Desk", "Reported", "sit_down", "write_systems"]
