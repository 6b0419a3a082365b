"""As much of JSON Schema as ``docs/status.schema.json`` uses; anything else is a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_SAYS_NOTHING = {"$schema", "$defs", "title", "description", "discriminator", "default"}


def complaints(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``value``; empty where nothing is."""
    found: list[str] = []
    if schema.get("type") == "object" and not isinstance(value, dict):
        return [f"{value!r} is no object"]
    for word, rule in schema.items():
        match word:
            case "$ref":
                name = rule.removeprefix("#/$defs/")
                found += complaints(value, root["$defs"][name], root)
            case "type":
                fits = isinstance(value, _TYPES[rule])
                if not fits or (isinstance(value, bool) and rule != "boolean"):
                    found.append(f"{value!r} is no {rule}")
            case "anyOf":
                if not any(not complaints(value, one, root) for one in rule):
                    found.append(f"{value!r} is none of {len(rule)}")
            case "oneOf":
                if sum(not complaints(value, one, root) for one in rule) != 1:
                    found.append(f"{value!r} is not one of {len(rule)}")
            case "enum":
                if value not in rule:
                    found.append(f"{value!r} is not in {rule}")
            case "const":
                if value != rule:
                    found.append(f"{value!r} is not {rule!r}")
            case "minimum":
                if isinstance(value, (int, float)) and value < rule:
                    found.append(f"{value} is less than {rule}")
            case "pattern":
                if isinstance(value, str) and not re.search(rule, value):
                    found.append(f"{value!r} does not match")
            case "required":
                found += [f"{name} is missing" for name in rule if name not in value]
            case "properties":
                for name, one in rule.items():
                    if name in value:
                        found += [f"{name}: {text}" for text in complaints(value[name], one, root)]
            case "propertyNames":
                for name in value:
                    found += complaints(name, rule, root)
            case "additionalProperties":
                others = set(value) - set(schema.get("properties", ()))
                for name in sorted(others):
                    if rule is False:
                        found.append(f"{name} is not known")
                    else:
                        found += complaints(value[name], rule, root)
            case "items":
                for one in value:
                    found += complaints(one, rule, root)
            case _ if word not in _SAYS_NOTHING:
                raise NotImplementedError(word)
    return found
