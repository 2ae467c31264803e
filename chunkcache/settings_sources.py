"""Where each setting's value comes from: for people who wonder why a value is what it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chunkcache.settings import ENV_PREFIX, Settings, file_values, load_settings
from chunkcache.store.remote.address import mask_url

SettingSource = Literal["flag", "env", "file", "default"]


@dataclass(frozen=True)
class SettingInfo:
    """One setting in force.

    Attributes:
        name: Its name.
        value: Its value, without secrets.
        source: What said so: an argument, the environment, the file, or nothing.
        default: What it is where nothing is said.
        meaning: What it does.
    """

    name: str
    value: Any
    source: SettingSource
    default: Any
    meaning: str


def shown_value(name: str, value: Any) -> Any:
    """A setting's value without the secrets that it may hold."""
    return mask_url(value) if name == "remote" and value is not None else value


def explain_settings(given: Mapping[str, object]) -> tuple[SettingInfo, ...]:
    """Every setting in force, in the order of their definition.

    Args:
        given: Arguments; those of None were not given.

    Raises:
        InvalidValueError: A value is out of range or unknown, or the file cannot be read.
    """
    settings = load_settings(**given)
    in_environment = {name.lower() for name in os.environ}
    in_file = file_values()

    def source_of(name: str) -> SettingSource:
        if given.get(name) is not None:
            return "flag"
        if (ENV_PREFIX + name).lower() in in_environment:
            return "env"
        return "file" if name in in_file else "default"

    return tuple(
        SettingInfo(
            name,
            shown_value(name, getattr(settings, name)),
            source_of(name),
            field.get_default(call_default_factory=True),
            " ".join((field.description or "").split()),
        )
        for name, field in Settings.model_fields.items()
    )
