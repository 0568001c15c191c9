"""The schema of an input: one tree of arguments of dargs, made of the declarations of the sections.

dargs decides what is a right input. Of an input that it has refused, :func:`find_mistakes` names
every mistake by the same tree; of one that it accepts, :func:`to_section` makes the sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dargs import Argument, Variant
from dargs.dargs import ArgumentError, ArgumentTypeError

from deepmd_ema.config.fields import (
    Option,
    input_options,
    options,
    plain,
    unknown_choice,
)
from deepmd_ema.config.messages import (
    INVALID,
    NOT_AVAILABLE,
    Place,
    Reading,
    Values,
    close_names,
    dotted,
    show,
)
from deepmd_ema.config.schema.averaging import AVERAGES
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.loggers import LOGGERS
from deepmd_ema.config.schema.model import FITTINGS, MODELS
from deepmd_ema.config.schema.run import MultiTaskRun, SingleTaskRun
from deepmd_ema.config.unsupported import unavailable_key, unavailable_type

TYPE = "type"  # the key that chooses one of several kinds of a section
_REGISTRIES = (MODELS, DESCRIPTORS, FITTINGS, AVERAGES, LOGGERS)
# Trees of whole inputs by the types that are installed: building one takes a few tenths of a
# second, and a start needs it several times.
_roots: dict[tuple[Any, ...], Field] = {}


class Field(Argument):
    """An argument of dargs with the declaration that it is made of.

    dargs names the first mistake only. The declaration has what a message about each needs: unit,
    choices, other spellings and the reason of a removed value.

    Attributes:
        option: the declaration; None of the whole input and of one kind of a section.
        section: dataclass that a section becomes; None where ``type`` chooses it, and of plain
            values.
        keys: the name of an option and its other spellings.
        kinds: the kinds of a section by their ``type``; none where there is no choice.
        is_section: whether the value is a section, or a list or mapping of sections.
        inner_keys: every key of a section of one kind.
    """

    sub_fields: dict[str, Field]  # type: ignore[assignment]
    option: Any = None
    section: Any = None

    def __init__(
        self, name: str, dtype: Any, kinds: Sequence[Field] = (), **about: Any
    ) -> None:
        super().__init__(name, dtype, **about)
        self.keys = (name, *self.alias)
        self.kinds = {kind.name: kind for kind in kinds}
        self.is_section = bool(self.sub_fields or kinds)
        self.inner_keys = [
            key for field in self.sub_fields.values() for key in field.keys
        ]

    def kind_of(self, values: Mapping[str, Any]) -> Field | None:
        """Return the kind of a section that ``type`` chooses, or None if it chooses none."""
        if not self.kinds:
            return self
        name = values.get(TYPE, self.option.default_type)
        return next((kind for kind in self.kinds.values() if name in kind.keys), None)


def run_arguments(has_tasks: bool = False) -> Field:
    """Return the schema of a whole input.

    ``run_arguments().normalize_value(values, trim_pattern="_*")`` fills in defaults and replaces
    other spellings, ``run_arguments().check_value(values, strict=True)`` refuses what is wrong. Not
    in it: rules between options, the places of options in inputs of older versions, and options of
    DeePMD-kit that have no effect here.

    Args:
        has_tasks: whether the input has several tasks; the names of shared parts in it are replaced
            by the parts before.
    """
    # Other distributions may add types at any time, also after the first call; a tree without them
    # would refuse their sections.
    key: Any = (has_tasks, *(registry.sections() for registry in _REGISTRIES))
    if key not in _roots:
        _roots[key] = _kind("input", MultiTaskRun if has_tasks else SingleTaskRun)
    return _roots[key]


def gen_args(has_tasks: bool = False) -> list[Argument]:
    """Return the schemas of the sections, as DeePMD-kit's function of this name does."""
    return list(run_arguments(has_tasks).sub_fields.values())


def fault(field: Field, value: Any) -> str:
    """Return the rest of the message about a plain value that dargs refuses, or an empty string."""
    try:
        field.check_value(value)
    except ArgumentError as error:
        return field.option.explain(
            value, has_type=not isinstance(error, ArgumentTypeError)
        )
    return ""


def _kind(name: str, section: Any) -> Field:
    """Return the argument of a section."""
    about = {
        "alias": getattr(section, "aliases", ()),
        "sub_fields": list(map(field_of, input_options(section))),
    }
    # the docstring of a section, up to its attributes, is a text of the manual and of the schema
    doc = " ".join((section.__doc__ or "").partition("Attributes:")[0].split())
    kind = Field(name, dict, doc=doc, **about)
    kind.section = section
    # `type` is no option of a section: its class has the value. It is a key of the input all the
    # same, and the first that a message lists.
    if hasattr(section, TYPE):
        kind.inner_keys.insert(0, TYPE)
    return kind


def field_of(option: Option) -> Field:
    """Return the argument of an option, with the sections in it."""
    about: Values = {
        "optional": not option.required,
        "alias": option.alias,
        "doc": option.doc,
    }
    if option.unit:
        about["doc"] += f" Unit: {option.unit}."
    if not option.required:
        about["default"] = plain(option.default)
    dtype: list[Any] = list(option.types)
    kinds: list[Field] = []
    if not option.sections:
        # dargs calls it with values of the right type only
        about["extra_check"] = lambda value: not option.explain(value)
        about["extra_check_errmsg"] = f"Expected {option.wants}."
    else:
        dtype = [list if option.many else dict]
        # "repeat" of dargs: the value is a list, or a mapping by free names, of sections
        about["repeat"] = option.many or option.named
        if option.by_type:
            kinds = [_kind(section.type, section) for section in option.sections]
            tag = option.default_type or ""
            about["sub_variants"] = [
                Variant(TYPE, kinds, optional=bool(tag), default_tag=tag)
            ]
        else:
            about["sub_fields"] = list(map(field_of, input_options(option.sections[0])))
    if option.nullable:
        dtype.append(type(None))
    field = Field(option.name, dtype, kinds, **about)
    if option.sections and not kinds:
        field.section = option.sections[0]
    field.option = option
    return field


# ---- sections


class Section(NamedTuple):
    """A section of an input.

    Attributes:
        place: its canonical path.
        field: its argument.
        kind: the argument of the kind that ``type`` chooses; None if it chooses none.
        values: its values in the input.
    """

    place: Place
    field: Field
    kind: Field | None
    values: Values


def sections_of(field: Field, values: Any, place: Place) -> Iterator[Section]:
    """Yield a section and those in it, outer ones first; other values are left out."""
    if not isinstance(values, dict):
        return
    kind = field.kind_of(values)
    yield Section(place, field, kind, values)
    # a section of an unknown type has no known options, and so no known sections in it
    for inner in kind.sub_fields.values() if kind is not None else ():
        for key in inner.keys if inner.is_section else ():
            for path, item in _items_of(inner, values.get(key)):
                yield from sections_of(inner, item, (*place, inner.name, *path))


def _items_of(field: Field, value: Any) -> list[tuple[Place, Any]]:
    """Return the sections of an option, with their places in it; none of a wrong value."""
    if not field.repeat:
        return [((), value)]
    if isinstance(value, list):
        return [((number,), item) for number, item in enumerate(value)]
    if isinstance(value, dict):
        return [((name,), item) for name, item in value.items()]
    return []


def take_options(root: Field, reading: Reading) -> None:
    """Note the places of all options that an input gives, and leave out those without effect.

    These are options of DeePMD-kit that do nothing here, at any value or at some.
    """
    for section in sections_of(root, reading.values, ()):
        kind = section.kind
        if kind is None:
            continue
        # a list, because the loop removes keys
        for key in [key for key in section.values if key not in kind.inner_keys]:
            _drop_without_effect(section, kind, key, reading)
        for field in kind.sub_fields.values():
            place = (*section.place, field.name)
            # the first of two spellings counts; find_mistakes refuses the second
            spelling = next((key for key in section.values if key in field.keys), None)
            if spelling is None:
                continue
            reading.paths[place] = reading.spelled(section.place, spelling)
            reading.given_options.add(place)
            has_entries = field.is_section and field.repeat
            for path, _ in (
                _items_of(field, section.values[spelling]) if has_entries else ()
            ):
                # an entry that was moved to its place has a path of its own already
                reading.paths.setdefault(
                    (*place, *path), (*reading.paths[place], *path)
                )


def _drop_without_effect(
    section: Section, kind: Field, key: str, reading: Reading
) -> None:
    """Remove a key that does nothing here, with a remark if it was meant to do something."""
    value = section.values[key]
    place = (*section.place, key)
    without_effect = getattr(kind.section, "without_effect", {})
    if key in without_effect:
        default, why = without_effect[key]
        del section.values[key]
        if value != default:
            spelled = dotted(reading.spelled(section.place, key))
            reading.unused.append(f"{spelled} = {show(value)}: no effect, {why}")
        return
    entry = unavailable_key(section.place, key)
    if entry is None or not entry.is_no_op(value):
        return
    del section.values[key]
    if entry.no_op_values is None and value:
        reading.notes.append(
            f"{dotted(place)} has no effect and was left out: it only informs."
        )


def to_section(field: Field, values: Any, **more: Any) -> Any:
    """Return a section that dargs has accepted, with all defaults, as an object.

    Args:
        field: its argument.
        values: its normalized values.
        **more: values of fields that are no options.
    """
    kind = field.kind_of(values)
    assert kind is not None, "dargs has accepted the type"
    # not input_options: a shorthand is replaced before, so no section has its options
    arguments = {
        o.name: _to_value(kind.sub_fields[o.name], values[o.name])
        for o in options(kind.section)
    }
    return kind.section(**arguments, **more)


def _to_value(field: Field, value: Any) -> Any:
    """Return the value of an option as its section has it."""
    option = field.option
    if value is None and option.nullable:
        return None
    if field.is_section:
        items = [
            (path, to_section(field, item)) for path, item in _items_of(field, value)
        ]
        if option.named:
            return {path[0]: section for path, section in items}
        return [section for _, section in items] if option.many else items[0][1]
    # Whole numbers are floats where the declaration says float: 1 and 1.0 in an input then give
    # equal configs, whose files and digests are the same. `type(...) is` leaves booleans alone.
    if type(value) is int and float in option.types and int not in option.types:
        value = float(value)
    elif isinstance(value, list) and any("float" in str(kind) for kind in option.types):
        value = [
            float(number) if isinstance(number, int) else number for number in value
        ]
    return value if option.convert is None else option.convert(value)


# ---- mistakes


def find_mistakes(root: Field, reading: Reading) -> None:
    """Add every mistake of an input that dargs has refused to ``reading``."""
    if not isinstance(reading.values, dict):
        reading.refuse((), f" = {show(reading.values)}: expected a section {{...}}.")
    for section in sections_of(root, reading.values, ()):
        if section.kind is None:
            _refuse_type(section, reading)
        else:
            _refuse_keys(root, section, section.kind, reading)


def _refuse_keys(root: Field, section: Section, kind: Field, reading: Reading) -> None:
    """Refuse wrong values, unknown and missing keys of a section.

    What is refused goes into ``reading.wrong``: the caller removes these keys and has dargs check
    the rest with defaults in their place, so that data can be checked beside a wrong option.
    """
    by_key = {key: field for field in kind.sub_fields.values() for key in field.keys}
    seen: dict[str, str] = {}  # name of an option -> its first spelling
    unknown = []
    for key, value in section.values.items():
        field = by_key.get(key)
        place = reading.spelled(section.place, key)
        if field is None:
            if not (key == TYPE and TYPE in kind.inner_keys):
                unknown.append(key)
                reading.wrong.append((section.values, key))
        elif field.name in seen:
            reading.refuse(
                place,
                f": the same option as {seen[field.name]}. Remove one of the two.",
            )
            reading.wrong.append((section.values, key))
        else:
            seen[field.name] = str(place[-1])
            if not _is_right(field, value, (*section.place, field.name), reading):
                reading.wrong.append((section.values, key))
    missing = {
        name: field
        for name, field in kind.sub_fields.items()
        if not field.optional and name not in seen
    }
    for key in unknown:
        place = reading.spelled(section.place, key)
        entry = unavailable_key(section.place, key)
        if entry is not None:
            reading.refuse(
                place,
                f" = {show(section.values[key])}: {entry.reason}. {entry.instead or 'Remove it.'}",
            )
            continue
        # an unknown key that looks like a missing one is one mistake, not two
        meant = next(
            (field for field in missing.values() if close_names(key, field.keys)), None
        )
        if meant is not None:
            del missing[meant.name]
        reading.refuse(place, _unknown_key(root, section, kind, key, meant))
    for field in missing.values():
        outer = reading.paths.get(section.place, section.place)
        expected = f"{field.option.wants}."
        if field.is_section:
            expected = f"a section {{...}}: {field.option.doc.lower()}"
        reading.refuse(
            (*outer, field.name), f": required, but missing. Expected {expected}"
        )


def _is_right(field: Field, value: Any, place: Place, reading: Reading) -> bool:
    """Whether the value of an option is right, but for the content of its sections.

    A wrong one is refused.
    """
    # INVALID is wrong, but was refused when it was put there; null is right where it is a value
    if value is INVALID or (value is None and field.option.nullable):
        return value is None
    spelled = reading.paths.get(place, place)
    if not field.is_section:
        text = fault(field, value)
        if text:
            reading.refuse(spelled, text)
        return not text
    if field.repeat and not isinstance(value, list if field.option.many else dict):
        reading.refuse(spelled, field.option.wrong_type(value))
        return False
    is_right = True
    for path, item in _items_of(field, value):
        if isinstance(item, dict):
            is_right = (
                is_right and field.kind_of(item) is not None
            )  # refused as a section
            continue
        is_right = False
        if item is not INVALID:
            reading.refuse(
                (*spelled, *path), f" = {show(item)}: expected a section {{...}}."
            )
    return is_right


def _refuse_type(section: Section, reading: Reading) -> None:
    """Refuse the ``type`` of a section, whose other keys cannot be judged then."""
    types = list(section.field.kinds)
    name = section.values.get(TYPE)
    registry = section.field.option.registry
    if TYPE not in section.values:
        text = f": required, but missing. Expected one of {', '.join(types)}."
    elif (instead := unavailable_type(section.place, name)) is not None:
        advice = f"{NOT_AVAILABLE}. {instead}".rstrip()
        text = f" = {show(name)}: {advice} Available: {', '.join(types)}."
    elif registry is not None and str(name) in registry.faults:
        text = f" = {show(name)}: {registry.faults[str(name)]}"
    else:
        text = unknown_choice(name, types)
        if registry is not None and registry.group and "Did you mean" not in text:
            text += (
                " A type of another package is known where that package is installed."
            )
    reading.refuse((*reading.paths.get(section.place, section.place), TYPE), text)


def _unknown_key(
    root: Field, section: Section, kind: Field, key: str, required: Field | None
) -> str:
    """Return the message of a key that a section does not have.

    Args:
        root: argument of the whole input.
        section: the section.
        kind: its kind.
        key: the key.
        required: an option that is missing and has a name like it.
    """
    # An input of several tasks has an option of an input of one: `loss` is `loss_dict.TASK` there,
    # and `training_data` is `data_dict.TASK.training_data`.
    for field in kind.sub_fields.values():
        if field.option.named and field.is_section:
            outer = dotted((*section.place, field.name))
            is_whole = field.name == f"{key}_dict"
            if is_whole or any(key in inner.inner_keys for inner in kinds_of(field)):
                each = f"{outer}.TASK" if is_whole else f"{outer}.TASK.{key}"
                return f": unknown key here, in an input of several tasks. There it is {each}."
    if required is not None:
        return f": unknown key. Did you mean {required.name}, which is required and missing?"
    # The key belongs to another type of this section, or else to another section.
    having = [
        other.name
        for other in section.field.kinds.values()
        if other is not kind and key in other.inner_keys
    ]
    if having:
        places = [f"type {' or '.join(having)}, and this one is of type {kind.name}"]
    else:
        places = list(dict.fromkeys(_places_of(run_arguments(), key, "")))
        if len(places) not in (1, 2):  # a key of many sections is no hint
            places = [
                f"an entry of {field.name}"
                for field in kind.sub_fields.values()
                if field.option.many and field.is_section
                if any(key in inner.inner_keys for inner in kinds_of(field))
            ]
    close = close_names(key, kind.inner_keys)
    if places:
        mean = f" Or did you mean {' or '.join(close)}?" if close else ""
        return f": unknown key here. It belongs to {' or '.join(places)}.{mean}"
    mean = (
        f"Did you mean {' or '.join(close)}?"
        if close
        else f"Known: {', '.join(kind.inner_keys)}."
    )
    return f": unknown key. {mean}"


def kinds_of(field: Field) -> list[Field]:
    """Return the kinds of a section; itself where there is no choice."""
    return list(field.kinds.values()) or [field]


def _places_of(kind: Field, key: str, path: str) -> Iterator[str]:
    """Yield the places of an option in a section and those inside of it; lists are left out."""
    for field in kind.sub_fields.values():
        place = f"{path}.{field.name}" if path else field.name
        if key in field.keys:
            yield place
        if field.option.many or not field.is_section:
            continue  # `name`, `device` of entries of lists are too common to be missed anywhere
        kinds = kinds_of(field)
        having = [inner for inner in kinds if key in inner.inner_keys]
        # the type is named where it decides; an option of all types has one place without it
        if len(having) < len(kinds):
            yield from (f"{place}.{key} of type {inner.name}" for inner in having)
        else:
            for inner in kinds:
                yield from _places_of(inner, key, place)
