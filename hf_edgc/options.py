"""How an option is declared and how a value is refused, the same for all of them."""

from dataclasses import field
from typing import Any, Literal, get_args, get_origin


def option(default: Any, help_text: str) -> Any:
    """Dataclass field whose help text is its documentation and that of the command line."""
    return field(default=default, metadata={"help": help_text})


def invalid(name: str, value: object, allowed: str) -> ValueError:
    """Error for a value that is out of range; ``allowed`` completes "use ..."."""
    return ValueError(f"EDGC option {name}={value!r} is not allowed: use {allowed}.")


def check_type(name: str, value: object, hint: Any) -> None:
    """Raise ValueError unless ``value`` fits ``hint`` (a plain type, list[str], Literal or an optional of these)."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise invalid(name, value, "one of " + ", ".join(get_args(hint)))
        return
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return
    if list[str] in kinds and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return
    if float in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return
    if not any(type(value) is kind for kind in kinds):
        wanted = " or ".join("none" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise invalid(name, value, f"a value of type {wanted}")
