"""A mapping becomes a config only if every key is known and every value fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from peagle.config import from_mapping
from peagle.errors import ConfigError

KNOWN = "known: name, count, share, limit, quick, inner"


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["linear", "cosine"] = "cosine"
    rates: tuple[float, ...] = ()
    pair: tuple[int, int] = (0, 0)
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int | Literal["auto"] = 1
    share: float = 0.5
    limit: int | None = None
    quick: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.share < 0:
            raise ConfigError(f"share={self.share} is out of range", hint="use >= 0")


def test_values_and_sections_are_converted() -> None:
    options = {"name": "a", "share": "1e-4", "inner": {"kind": "linear", "rates": [1, 2.5]}}
    inner = Inner(kind="linear", rates=(1.0, 2.5))
    assert from_mapping(Outer, options, "here") == Outer(name="a", share=1e-4, inner=inner)
    assert from_mapping(Outer, {"name": "a", "quick": True}, "here").quick is True


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({}, "'name' is not set", None),
        ({"name": "a", "cuont": 2}, "unknown key 'cuont' in here", "did you mean 'count'?"),
        ({"name": "a", "inner": {"kin": 1}}, "unknown key 'kin' in inner", "did you mean 'kind'?"),
        ({"name": 3}, "name=3 does not fit", "use a valid string"),
        ({"name": "a", "count": "x"}, "count='x' does not fit", "use a valid integer or 'auto'"),
        ({"name": "a", "limit": 1.5}, "limit=1.5 does not fit", "use a valid integer"),
        ({"name": "a", "inner": 1}, "inner=1 does not fit", "use a mapping of keys to values"),
        (
            {"name": "a", "inner": {"kind": "round"}},
            "inner.kind='round' does not fit",
            "use 'linear' or 'cosine'",
        ),
        (
            {"name": "a", "inner": {"rates": [1, "x"]}},
            "inner.rates.1='x' does not fit",
            "use a valid number",
        ),
        (
            {"name": "a", "inner": {"pair": [1]}},
            "inner.pair=[1] does not fit",
            "use more values",
        ),
        ({"name": "a", "inner": {"pair": []}}, "inner.pair=[] does not fit", "use more values"),
        (
            {"name": "a", "inner": {"pair": [1, 2, 3]}},
            "inner.pair=[1, 2, 3] does not fit",
            "use at most 2 values",
        ),
        ({"name": "a", 1: 2}, "unknown key 1 in here", KNOWN),
        ({"name": "a", True: 2}, "unknown key True in here", KNOWN),
        ({"name": "a", None: 2}, "unknown key None in here", KNOWN),
        ({"name": "a", "count": True}, "count=True does not fit", "use a valid number"),
        ({"name": "a", "limit": False}, "limit=False does not fit", "use a valid number"),
        ({"name": "a", "share": True}, "share=True does not fit", "use a valid number"),
        (
            {"name": "a", "inner": {"rates": [1.0, True]}},
            "inner.rates.1=True does not fit",
            "use a valid number",
        ),
        (
            {"name": "a", "inner": {"sizes": {"x": 1, "y": True}}},
            "inner.sizes.y=True does not fit",
            "use a valid number",
        ),
        ({"name": "a", "quick": "yes"}, "quick='yes' does not fit", "use true or false"),
        ({"name": "a", "quick": "true"}, "quick='true' does not fit", "use true or false"),
        ({"name": "a", "quick": "maybe"}, "quick='maybe' does not fit", "use true or false"),
        ({"name": "a", "share": -1}, "share=-1.0 is out of range", "use >= 0"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(
    options: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, options, "here")
    assert (caught.value.message, caught.value.hint) == (message, hint)
