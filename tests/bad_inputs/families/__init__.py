"""The families of bad inputs, and the cases that are known to fail."""

from __future__ import annotations

from fnmatch import fnmatchcase

from bad_inputs.case import Case
from bad_inputs.families import (
    checkpoints,
    commands,
    data,
    files,
    frozen,
    hdf5,
    machine,
    options,
    others,
    paths,
    text,
)

# titles of cases, as patterns of names of files -> what is not answered right yet
KNOWN: dict[str, str] = {}


def known(case: Case) -> str:
    """Return the known faults among the cases that this is one of, or nothing."""
    return next((reason for pattern, reason in KNOWN.items() if fnmatchcase(case.title, pattern)), "")


def all_cases() -> list[Case]:
    """Return every case, family by family."""
    modules = (options, text, paths, data, hdf5, others, files, checkpoints, frozen, commands, machine)
    cases = [case for module in modules for case in module.cases()]
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles), sorted({t for t in titles if titles.count(t) > 1})
    return cases
