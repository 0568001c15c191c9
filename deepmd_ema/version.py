"""The version of the program."""

__version__ = "0.3.0.dev0"
