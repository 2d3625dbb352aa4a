"""Scenarios as YAML text."""

from __future__ import annotations

import msgspec

from kvcomm.chaos.scenario import Scenario, scenario_of
from kvcomm.errors import ConfigError

BYTES_MAX = 1 << 20


def parse_scenario(text: str) -> Scenario:
    """Raises ``ConfigError``: it is not YAML, or no scenario; the message says where."""
    import yaml

    if len(text) > BYTES_MAX:
        raise ConfigError(f"a scenario of {len(text)} characters; at most {BYTES_MAX}")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}") from error
    except RecursionError:
        raise ConfigError("not a scenario: brackets within brackets, far too deep") from None
    return scenario_of(document)


def written(scenario: Scenario) -> str:
    """The YAML text of ``scenario``, to change and run."""
    import yaml

    document = msgspec.to_builtins(scenario)
    defaults = msgspec.to_builtins(Scenario("x", "", []))
    needed = ("name", "promise", "steps")
    kept = {key: value for key, value in document.items() if key in needed or value != defaults[key]}
    return str(yaml.safe_dump(kept, sort_keys=False, width=100, allow_unicode=True))
