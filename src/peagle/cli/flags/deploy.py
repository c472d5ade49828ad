"""Where and how a model is deployed: the fields of DeployConfig, as flags."""

from __future__ import annotations

import inspect
from dataclasses import fields

from peagle.cli.flags import ConfigFlags, field_flag
from peagle.deploy.config import DeployConfig


class DeployFlags(ConfigFlags):
    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [
            field_flag(DeployConfig, field.name, "Endpoint", note=_default_note(field.default))
            for field in fields(DeployConfig)
        ]

    def config(self) -> DeployConfig:
        return DeployConfig(**self.given)


def _default_note(default: object) -> str:
    return f"Default: {default}." if default not in (None, False) else ""
