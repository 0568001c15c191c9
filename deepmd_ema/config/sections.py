"""Sections of an input as objects: canonical keys, the check of each value, and all mistakes with their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deepmd_ema.config.fields import Option, input_options, is_comment, keys_of, options, unknown_choice
from deepmd_ema.config.messages import NOT_AVAILABLE, Place, Problem, close_names, dotted, show
from deepmd_ema.config.schema.run import SingleTaskRun
from deepmd_ema.config.unsupported import unavailable_key, unavailable_type

INVALID: Any = object()  # in place of a value that cannot be used


class InvalidOptionError(Exception):
    """A rule has read an option that is wrong in itself, so the rule has nothing to say."""


@dataclass
class Reading:
    """An input while it is read: its values, where each of them is, and what is noted about it.

    Attributes:
        values: a copy of the input, which is brought into the sections of today.
        lines: lines of the keys, moved ones included.
        root: class of the whole input.
        moved: place of a key, after it was moved -> its path in the input.
        given: canonical paths of the options that the input names.
        paths: canonical path of an option or of an entry -> the path as the input spells it.
        notes: what was changed or left out, one sentence each.
        unused: options that were left out because they do nothing here, with the reason.
        problems: all mistakes, at paths of the input.
    """

    values: Any
    lines: dict[Place, int]
    root: Any = SingleTaskRun
    moved: dict[Place, Place] = field(default_factory=dict)
    given: set[Place] = field(default_factory=set)
    paths: dict[Place, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, path: Place, text: str) -> Any:
        """Note a mistake at a path of the input, and return ``INVALID`` to stand in its place."""
        self.problems.append(Problem(path, text))
        return INVALID

    def options_of(self, kind: Any, raw: Any, path: Place, others: Sequence[Any] = ()) -> Any:
        """Return the values of a section by canonical key, ``INVALID`` where one is wrong or missing.

        Comments are left out, and so are options of DeePMD-kit with values that ask for nothing.

        Args:
            kind: class of the section.
            raw: what the input has for it, right or wrong; if it is no section, the result is ``INVALID``.
            path: canonical path of the section.
            others: the other classes of which ``type`` chooses one.
        """
        spelled = self.paths.get(path, path)
        if not isinstance(raw, dict):
            return self.refuse(spelled, f" = {show(raw)}: expected a section {{...}}.")
        by_key = {key: option for option in input_options(kind) for key in option.keys}
        values: dict[str, Any] = {}
        unknown = []
        for key, value in raw.items():
            option = by_key.get(key)
            if option is None:
                if not is_comment(key) and not (key == "type" and hasattr(kind, "type")):
                    unknown.append(key)
                continue
            here, there = (*path, option.name), self.moved.get((*path, key), (*spelled, key))
            if here in self.given:
                self.refuse(there, f": the same option as {self.paths[here][-1]}. Remove one of the two.")
                continue
            self.given.add(here)
            self.paths[here] = there
            values[option.name] = self.value(option, value, here)
        missing = [o for o in input_options(kind) if o.required and o.name not in values]
        meant: set[str] = set()  # options that unknown keys may mean: no rule says that they are missing
        replaced: set[str] = set()  # required options that are misspelled
        for key in unknown:
            place = self.moved.get((*path, key), (*spelled, key))
            if not isinstance(key, str):
                self.refuse((*spelled, str(key)), ": a key must be a text. Put it in quotes.")
            elif (entry := unavailable_key(path, key)) is None:
                having = [s for s in others if key in keys_of(s)]
                required = next((o for o in missing if o.name not in replaced and close_names(key, o.keys)), None)
                if required is not None:
                    replaced.add(required.name)
                self.refuse(place, _unknown_key(kind, having, (*path, key), required))
                meant |= {by_key[name].name for name in close_names(key, keys_of(kind)) if name in by_key}
                # the type may be the mistake, so nothing is expected of what the other types do not have
                meant |= {o.name for s in having for o in by_key.values() if o.name not in keys_of(s)}
            elif not entry.is_no_op(raw[key]):
                self.refuse(place, f" = {show(raw[key])}: {entry.reason}. {entry.instead or 'Remove it.'}")
            elif entry.no_op_values is None and raw[key]:
                self.notes.append(f"{dotted((*path, key))} has no effect and was left out: it only informs.")
        for o in missing:
            if o.name not in replaced:
                expected = f"a section {{...}}: {o.doc.lower()}" if o.sections else f"{o.wants}."
                self.refuse((*spelled, o.name), f": required, but missing. Expected {expected}")
        return dict.fromkeys([*meant, *(o.name for o in missing)], INVALID) | values

    def value(self, option: Option, value: Any, path: Place) -> Any:
        """Return the value of an option as its section has it, ``INVALID`` if it is wrong."""
        if value is INVALID or (value is None and option.nullable):
            return value
        if not option.sections:
            if text := option.fault(value):
                return self.refuse(self.paths.get(path, path), text)
            # whole numbers are floats where the declaration says float
            if type(value) is int and float in option.types and int not in option.types:
                value = float(value)
            elif isinstance(value, list) and any("float" in str(t) for t in option.types):
                value = [float(v) if isinstance(v, int) else v for v in value]
            return value if option.convert is None else option.convert(value)
        if not (option.many or option.named):
            return self.section(option, value, path)
        spelled = self.paths.get(path, path)
        if not isinstance(value, list if option.many else dict):
            return self.refuse(spelled, option.wrong_type(value))
        items = enumerate(value) if isinstance(value, list) else value.items()
        inner = {}
        for key, item in ((key, item) for key, item in items if not is_comment(key)):
            self.paths.setdefault((*path, key), (*spelled, key))
            # a shared part that is missing is reported already
            inner[key] = item if item is INVALID else self.section(option, item, (*path, key))
        # of a wrong entry nothing can be read
        unreadable = dict.fromkeys((o.name for o in options(option.sections[0])), INVALID)
        inner = {k: build(option.sections[0], unreadable) if one is INVALID else one for k, one in inner.items()}
        return list(inner.values()) if option.many else inner

    def section(self, option: Option, raw: Any, path: Place) -> Any:
        """Return the section of an option as an object, ``INVALID`` if it has no known ``type``."""
        sections, kind = option.sections, option.section_of(raw)
        if kind is not None:
            values = self.options_of(kind, raw, path, [s for s in sections if s is not kind])
            return INVALID if values is INVALID else build(kind, values)
        known, name = [section.type for section in sections], raw.get("type")
        if "type" not in raw:
            text = f": required, but missing. Expected one of {', '.join(known)}."
        elif (instead := unavailable_type(path, name)) is not None:
            text = f" = {show(name)}: {' '.join(filter(None, (f'{NOT_AVAILABLE}.', instead)))}"
            text += f" Available: {', '.join(known)}."
        elif option.registry is not None and str(name) in option.registry.faults:
            text = f" = {show(name)}: {option.registry.faults[str(name)]}"
        else:
            text = unknown_choice(name, known)
            if option.registry is not None and option.registry.group and "Did you mean" not in text:
                text += " A type of another package is known where that package is installed."
        return self.refuse((*self.paths.get(path, path), "type"), text)  # the keys of an unknown type cannot be judged


def build(kind: type, values: Mapping[str, Any], **more: Any) -> Any:
    """Return a section object.

    Args:
        kind: its class.
        values: by canonical key; what is not there gets its default. Options that are ``INVALID`` raise
            ``InvalidOptionError`` when they are read.
        more: fields that are no options.
    """
    given = {o.name: values[o.name] for o in options(kind) if o.name in values}
    invalid = [name for name, value in given.items() if value is INVALID]
    if not invalid:
        return kind(**given, **more)
    usable = {o.name: o.default for o in options(kind)} | given | more
    guards = {name: property(_refuse_reading) for name in invalid}
    section: Any = object.__new__(type(kind.__name__, (kind,), guards))
    for name in usable.keys() - guards.keys():
        object.__setattr__(section, name, usable[name])  # sections are frozen
    return section


def _refuse_reading(section: Any) -> NoReturn:
    raise InvalidOptionError


# ---- unknown keys


def _unknown_key(kind: Any, having: Sequence[Any], path: Place, required: Option | None) -> str:
    """Return the message of a key that a section does not have.

    Args:
        kind: class of the section.
        having: the other types that have it.
        path: of the key.
        required: an option that is missing and has a name like it.
    """
    key = str(path[-1])
    # in an input of several tasks, where an option of an input of one task is
    for o in (o for o in input_options(kind) if o.named):
        outer, is_section = dotted((*path[:-1], o.name)), o.name == f"{key}_dict"
        if is_section or any(key in keys_of(section) for section in o.sections):
            each = f"{outer}.TASK" if is_section else f"{outer}.TASK.{key}"
            return f": unknown key here, in an input of several tasks. There it is {each}."
    if required is not None:
        return f": unknown key. Did you mean {required.name}, which is required and missing?"
    places = list(dict.fromkeys(_places_of(SingleTaskRun, key, "")))
    if having:
        names = " or ".join(s.type for s in having)
        places = [f"type {names}, and this one is of type {kind.type}"]
    elif len(places) not in (1, 2):  # a key of many sections is no hint
        lists = [o for o in input_options(kind) if o.many]
        places = [f"an entry of {o.name}" for o in lists if any(key in keys_of(s) for s in o.sections)]
    close = close_names(key, keys_of(kind))
    if places:
        mean = f" Or did you mean {' or '.join(close)}?" if close else ""
        return f": unknown key here. It belongs to {' or '.join(places)}.{mean}"
    mean = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(keys_of(kind))}."
    return f": unknown key. {mean}"


def _places_of(kind: type, key: str, path: str) -> Iterator[str]:
    """Yield the places of an option in a section and those inside of it; lists are left out."""
    for o in input_options(kind):
        here = f"{path}.{o.name}" if path else o.name
        if key in o.keys:
            yield here
        if o.many:
            continue  # `name`, `device` are too common to be missed anywhere
        having = [s for s in o.sections if key in keys_of(s)]
        if len(having) < len(o.sections):
            yield from (f"{here}.{key} of type {getattr(s, 'type', '')}" for s in having)
        else:
            for s in o.sections:
                yield from _places_of(s, key, here)
