"""Which drafter runs: three flags, or vLLM's JSON instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from peagle.cli.flags import parse_json_object
from peagle.config import (
    MAX_DRAFT_NODES,
    MAX_SPECULATIVE_TOKENS,
    Method,
    SpeculationMode,
    SpeculativeConfig,
)
from peagle.errors import ConfigError


def _drafter(help_text: str, *, metavar: str | None = None, most: int | None = None) -> Any:
    least = None if most is None else 1
    return typer.Option(
        help=help_text, metavar=metavar, rich_help_panel="Speculation", min=least, max=most
    )


@dataclass(frozen=True, kw_only=True)
class DrafterFlags:
    """Which drafter runs: three flags, or vLLM's JSON instead."""

    spec_model: Annotated[
        str | None, _drafter("The head: a folder, an id or a built-in name.", metavar="HEAD")
    ] = None
    spec_tokens: Annotated[
        int | None, _drafter("Draft tokens per step.", metavar="K", most=MAX_SPECULATIVE_TOKENS)
    ] = None
    spec_nodes: Annotated[
        int | None,
        _drafter(
            "Draft a tree of N tokens, at most K levels deep.", metavar="N", most=MAX_DRAFT_NODES
        ),
    ] = None
    speculation: Annotated[
        SpeculationMode | None,
        _drafter(
            "auto: as many draft tokens per step as pay off, at most K and N; fixed: K or N. "
            "Default: auto for P-EAGLE heads without K and N."
        ),
    ] = None
    spec_method: Annotated[
        Method | None, _drafter("How to draft; default: what the head says.")
    ] = None
    speculative_config: Annotated[
        str | None, _drafter("These options and more as JSON, as in vLLM.", metavar="JSON")
    ] = None

    def given(self) -> dict[str, Any]:
        """The keys of a speculative_config that were given, unchecked: vLLM knows more than we."""
        keys = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
            "num_draft_nodes": self.spec_nodes,
            "speculation": self.speculation,
        }
        named = {key: value for key, value in keys.items() if value is not None}
        if self.speculative_config is None:
            return named
        if named:
            raise ConfigError(
                "--speculative-config and --spec-* were both given", hint="use one of the two"
            )
        return parse_json_object("--speculative-config", self.speculative_config)

    def config(self) -> SpeculativeConfig | None:
        """None where no drafter was asked for."""
        if self.speculative_config is not None:
            return SpeculativeConfig.from_mapping(self.given())
        any_drafter = "--spec-model HEAD or --spec-method ngram"
        self._refuse_without_drafter("--spec-tokens", self.spec_tokens, any_drafter)
        self._refuse_without_drafter("--spec-nodes", self.spec_nodes, any_drafter)
        self._refuse_without_drafter("--speculation", self.speculation, any_drafter)
        if self.spec_model is None and self.spec_method in (None, "none"):
            return None
        return SpeculativeConfig.from_mapping(self.given())

    def _refuse_without_drafter(self, flag: str, value: object, wanted: str) -> None:
        if value is not None and self.spec_model is None and self.spec_method in (None, "none"):
            raise ConfigError(
                f"{flag} {value} was given, but no drafter",
                hint=f"add {wanted}, or drop {flag}",
            )
