"""Types of descriptors, fitting networks, models and averages: records that name their parts.

A part is imported by name when it is used, so no other module imports a folder of
``model/families``. Other distributions add records by entry points.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

REPAIR = "Repair or uninstall the package."


@dataclass(frozen=True)
class Family:
    """One type of descriptor, fitting network, model or average, and where its parts are.

    Attributes:
        section: dataclass of its section in the input; its module must not import torch. Its
            ``type`` is the name.
        module: ``package.module:name`` of the class or function that builds the part of the model
            from the section; empty if the section is all there is.
        tree: ``package.module:name`` of the class that writes it to ``.dp`` files; empty if it
            cannot be frozen so.
        example: a small section without ``type``, for tests: three elements, cutoff 4 angstrom.
        origin: name and version of the distribution that adds it; empty for those of dp-ema.
    """

    section: type[Any]
    module: str = ""
    tree: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    def load(self, part: str) -> Any:
        """Return the object that the field ``part``, which is ``module`` or ``tree``, names.

        Raises:
            ConfigError: if another distribution adds the type and the object cannot be imported.
        """
        name = getattr(self, part)
        try:
            return resolve_name(name)
        except Exception as error:
            # a module of dp-ema itself has a bug, which needs its traceback
            if not self.origin:
                raise
            raise ConfigError(
                f'type "{self.section.type}" of the package {self.origin}: {name} '
                f"cannot be imported ({type(error).__name__}: {error}). {REPAIR}"
            ) from error


class Registry(Mapping[str, Family]):
    """Records by the ``type`` of their sections: first dp-ema's, then other distributions'.

    Args:
        builtin: type -> ``package.module:name`` of the record of dp-ema, or of the section if there
            is nothing else to it.
        group: entry points by which other distributions add records; empty if they cannot.
        protocol: its members must be in a section of another distribution.
        base: class of sections of other distributions, if an entry point names the section itself.
    """

    def __init__(
        self,
        builtin: Mapping[str, str],
        group: str = "",
        protocol: type | None = None,
        base: type | None = None,
    ) -> None:
        self.builtin = dict(builtin)
        self.group = group
        self._protocol = protocol
        self._base = base
        # What the records below were read from. Modules and entry points are read at the first use
        # only: `dp-ema --help` needs neither.
        self._key: tuple[Any, ...] = ()
        self._records: dict[str, Family] = {}
        self._faults: dict[str, str] = {}

    def __getitem__(self, name: str) -> Family:
        """Return the record of a type."""
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the types that can be used."""
        return iter(self._read())

    def __len__(self) -> int:
        """Return the number of types that can be used."""
        return len(self._read())

    def sections(self, left_out: Collection[str] = ()) -> tuple[type[Any], ...]:
        """Return the sections that an input may have, without the types ``left_out``."""
        records = self._read()
        names = (
            name
            for name in records
            if name not in left_out and name not in self._faults
        )
        return tuple(records[name].section for name in names)

    @property
    def faults(self) -> Mapping[str, str]:
        """Types that no input may have, because another distribution adds them wrongly.

        By type: what is wrong, and what to do.
        """
        self._read()
        return self._faults

    def _read(self) -> dict[str, Family]:
        """Return the records.

        They and the faults are read again after a change of ``builtin`` or of ``sys.path``.
        """
        # sys.path represents the installed distributions: listing their entry points takes
        # milliseconds, and every look-up of a type comes here
        key = (*self.builtin.items(), *sys.path)
        if key == self._key:
            return self._records
        self._records = {}
        self._faults = {}
        for name, place in self.builtin.items():
            record = resolve_name(place)
            # a section if there is nothing else to the types
            self._records[name] = (
                record if isinstance(record, Family) else Family(record)
            )
        if self.group:
            from importlib.metadata import (
                entry_points,
            )  # only a run that reads a config needs it

            # sorted: in the order of sys.path, manual and messages would differ between machines
            entries = entry_points(group=self.group)
            for name in sorted(entries.names):
                added = self._added(
                    name, [entry for entry in entries if entry.name == name]
                )
                if isinstance(added, Family):
                    self._records[name] = added
                else:
                    self._faults[name] = added
        self._key = key
        return self._records

    def _added(self, name: str, entries: list[EntryPoint]) -> Family | str:
        """Return the record that the entry points of one name add, or why it cannot be used.

        A fault is no error: other types of the registry can be used, and an input without this one
        does not need it.
        """
        origins = [
            f"{entry.dist.name} {entry.dist.version}" if entry.dist else "(no name)"
            for entry in entries
        ]
        both = " and ".join(origins)
        if name in self._records:
            return (
                f"dp-ema has this type, and the package {both} adds it too. "
                "Uninstall the package."
            )
        if len(entries) > 1:
            return f"the packages {both} both add this type. Uninstall one of them."
        head = f"the package {origins[0]} adds this type, but {entries[0].value}"
        try:
            record = entries[0].load()
        except Exception as error:  # whatever the code of others raises
            return (
                f"{head} cannot be imported ({type(error).__name__}: {error}). {REPAIR}"
            )
        if self._base is not None and isinstance(record, type):
            record = Family(record)
        if not isinstance(record, Family):
            kind = Family if self._base is None else self._base
            expected = f"{kind.__module__}.{kind.__name__}"
            if kind is not Family:
                expected = f"a subclass of {expected}"
            return f"{head} is of type {type(record).__name__}, expected {expected}. {REPAIR}"
        if problem := self._problem(name, record.section):
            return f"{head} has {problem}. {REPAIR}"
        return dataclasses.replace(record, origin=origins[0])

    def _problem(self, name: str, section: Any) -> str:
        """Return the fault of the section of another distribution, or an empty string."""
        if not (isinstance(section, type) and dataclasses.is_dataclass(section)):
            return f"section {section!r}, expected a dataclass"
        if self._base is not None and not issubclass(section, self._base):
            return (
                f"section {section!r}, expected a subclass of "
                f"{self._base.__module__}.{self._base.__name__}"
            )
        # A subclass without the decorator is a dataclass by its base, and its options would be
        # plain attributes that no input can give.
        if self._base is not None and "__dataclass_fields__" not in vars(section):
            return f"a section that is not decorated as {self._base.__name__} is"
        try:
            typing.get_type_hints(section)  # config reads them to check options
        except Exception as error:
            return (
                f"a section with an annotation that cannot be read ({type(error).__name__}: "
                f"{error})"
            )
        kind = getattr(section, "type", None)
        if kind != name:
            return f"a section of type {kind!r}, expected {name!r}"
        # dir() has no fields without a default, and vars() no members that are annotations only
        expected = (
            {*vars(self._protocol), *self._protocol.__annotations__}
            if self._protocol
            else set()
        )
        has = {*dir(section), *(f.name for f in dataclasses.fields(section))}
        missing = sorted(
            member for member in expected - has if not member.startswith("_")
        )
        missing += sorted(getattr(section, "__abstractmethods__", ()))
        if missing:
            return f"a section without {', '.join(missing)}"
        taken = set()
        for record in self._records.values():
            taken |= {record.section.type, *getattr(record.section, "aliases", ())}
        double = [alias for alias in getattr(section, "aliases", ()) if alias in taken]
        return f"the alias {double[0]!r}, which another type has" if double else ""
