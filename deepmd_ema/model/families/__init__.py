"""Descriptors, fitting networks and kinds of models, a folder for each.

``FAMILY`` of a folder, or a constant for each of its types, names section, builder and writer of
files of DeePMD-kit. ``config.registry`` finds it by name. Sections are imported, because every
input is checked against them; builders and writers are named as text, so that reading an input
imports neither torch nor them.
"""
