"""Which JSON schemas are taken: those that the grammar follows to the letter, and that compile fast.

xgrammar ignores what it does not know; a client would take the output for checked.
"""

import json
from collections.abc import Iterator
from typing import Any

from engine.types import InvalidRequest, require

MAX_PROPERTIES = 500  # of all objects in a schema together
MAX_DEPTH = 64
MAX_CHARACTERS = 25_000  # of names and values, of all of a schema together: the time to compile is that squared
MAX_LENGTHS = 5000  # bounds of lengths and counts, of all of a schema together: more take seconds to compile
_NAMED = ("properties", "$defs", "definitions")  # keywords whose keys are names of the client's
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, not schemas
_EXPRESSIONS = ("pattern", "patternProperties")
_IGNORED = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas"),
    *("contains", "minContains", "maxContains", "uniqueItems", "additionalItems", "multipleOf"),
    *("propertyNames", "dependencies", "$dynamicRef"),
)
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_COUNTS = {"minProperties", "maxProperties"}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALONE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")  # what the grammar follows is the first of these alone
_SAYING = (
    *("type", "format", "properties", "required", "additionalProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "unevaluatedItems", *_BOUNDS, *_LIMITS, *_ALONE),
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def check_schema(text: str) -> None:
    """Raises InvalidRequest, naming `grammar`, for a schema that can't be followed."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("grammar", "the schema is not JSON") from None
    properties = lengths = characters = 0
    places = set()
    references = set()
    for place, node in _schemas(schema, "#", 0):
        _check_node(node)
        places.add(place)
        references.add(node.get("$ref", "#"))
        properties += len(node.get("properties", ()))
        lengths += _lengths(node)
        characters += _characters(node)
    astray = references - places  # as into a value, where nobody looks for what is not taken
    require(not astray, "grammar", "$ref must name a schema inside the schema, as in #/$defs/name")
    require(properties <= MAX_PROPERTIES, "grammar", f"at most {MAX_PROPERTIES} properties")
    require(lengths <= MAX_LENGTHS, "grammar", f"its lengths and counts may add up to {MAX_LENGTHS}")
    require(characters <= MAX_CHARACTERS, "grammar", f"at most {MAX_CHARACTERS} characters in names and values")


def _lengths(node: dict[str, Any]) -> int:
    """A schema's own bounds, and what takes as long to compile as so many."""
    properties = len(node.get("properties", ()))
    counted = properties**2 if _COUNTS & node.keys() else 0  # behind each of them, so many may have come
    bounds: int = max(node.get(key, 0) for key in _BOUNDS)
    return bounds + counted + 10 * any(key in node for key in _LIMITS)


def _characters(node: dict[str, Any]) -> int:
    """Of a schema's own names and values. Names take longer where they are counted, or others may come too."""
    names = sum(map(len, node.get("properties", ())))
    values = sum(len(json.dumps(node[key])) for key in ("const", "enum") if key in node)
    return names * (10 if _open(node) or _COUNTS & node.keys() else 1) + values


def _open(node: dict[str, Any]) -> bool:
    """Whether an object may have properties that are not named."""
    return node.get("additionalProperties", node.get("unevaluatedProperties", False)) is not False


def _schemas(node: Any, place: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside a schema, itself first, and where it stands. Raises InvalidRequest when it is nested too deep."""
    require(depth <= MAX_DEPTH, "grammar", "the schema is nested too deep")
    if isinstance(node, list):
        for at, item in enumerate(node):
            yield from _schemas(item, f"{place}/{at}", depth + 1)
    if not isinstance(node, dict):
        return
    yield place, node
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            for name, named in value.items():
                yield from _schemas(named, f"{place}/{key}/{_plain(name)}", depth + 1)
        elif key not in _VALUES:
            yield from _schemas(value, f"{place}/{_plain(key)}", depth + 1)


def _plain(name: str) -> str:
    """A name as a part of a reference; one that would have to be escaped can't be referred to."""
    return name if not set(name) & set("/~%") else "~"


def _check_node(node: dict[str, Any]) -> None:
    for key in _EXPRESSIONS:
        require(key not in node, "grammar", f"regular expressions ({key}) are not supported in a schema")
    for key in _IGNORED:
        require(node.get(key, False) is False, "grammar", f"{key} is not supported in a schema")
    for key in _BOUNDS:
        number = node.get(key, 0)
        require(isinstance(number, int) and number >= 0, "grammar", f"{key} must be a number, 0 or more")
    for key in ("anyOf", "oneOf", "allOf"):
        options = node.get(key, [{}])
        require(isinstance(options, list) and bool(options), "grammar", f"{key} must be a list of schemas")
    require(len(node.get("allOf", [{}])) == 1, "grammar", "allOf takes one schema")
    reference = node.get("$ref", "#")
    inside = isinstance(reference, str) and reference.startswith("#") and "~" not in reference
    require(inside, "grammar", "$ref must point into the schema, with #")
    _check_alone(node)
    _check_typed(node)
    _check_required(node)


def _check_alone(node: dict[str, Any]) -> None:
    alone = next((key for key in _ALONE if key in node), None)
    if alone is None:
        return
    beside = [key for key in _SAYING if key in node and key != alone]
    if alone in ("const", "enum"):
        values = [node["const"]] if alone == "const" else node["enum"]
        require(isinstance(values, list) and bool(values), "grammar", "enum must be a list of values")
        if all(_is_of(value, node.get("type")) for value in values):
            beside = [key for key in beside if key != "type"]
    require(not beside, "grammar", f"{', '.join(beside)} is not supported beside {alone}")


def _is_of(value: Any, names: Any) -> bool:
    """Whether a value is of a type, or of one of several."""
    if isinstance(names, list):
        return any(_is_of(value, name) for name in names)
    kinds = _TYPES.get(names, ()) if isinstance(names, str) else ()
    return isinstance(value, kinds) and (isinstance(value, bool) <= (bool in kinds))


def _check_typed(node: dict[str, Any]) -> None:
    """What is said of values of one type is followed where the type is named."""
    if "type" not in node:
        untyped = [key for key in (*_BOUNDS, *_LIMITS) if key in node]
        untyped += ["required"] if "required" in node and "properties" not in node else []
        require(not untyped, "grammar", f"{', '.join(untyped)} needs a type beside it")
    if "format" in node:
        lengths = [key for key in ("minLength", "maxLength") if key in node]
        require(not lengths, "grammar", f"{', '.join(lengths)} is not supported beside format")


def _check_required(node: dict[str, Any]) -> None:
    required, properties = node.get("required", []), node.get("properties", {})
    shaped = isinstance(required, list) and isinstance(properties, dict)
    require(shaped, "grammar", "required must be a list of names, properties an object")
    known = set(map(str, required)) <= set(properties)
    require(known, "grammar", "a required property is not among the properties")
    repeated = _open(node) and node.get("minProperties", 0) > 1  # a name that comes twice would count twice
    require(not repeated, "grammar", "minProperties above 1 is not supported beside additionalProperties")
