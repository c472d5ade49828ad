"""Which engine answers, and what only vLLM is told: the fields of VllmOptions, as flags."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Annotated, Any, ClassVar

import typer

from peagle.backends import BackendName
from peagle.backends.vllm.options import VllmOptions
from peagle.cli.flags import ConfigFlags, field_flag
from peagle.cli.flags.engine import EngineFlags
from peagle.compatibility import LLM_ARGUMENTS, drop_unused
from peagle.config import EngineConfig
from peagle.errors import ConfigError

OPTIONS = tuple(field.name for field in fields(VllmOptions))
SHARED = tuple(field.name for field in fields(EngineConfig) if field.name in OPTIONS)
SERVED_ALONE = ("async_scheduling", "stream_interval")  # they are about a server's clients


class VllmFlags(ConfigFlags):
    """All of vLLM's options that we know, for a vLLM elsewhere; what is not given is vLLM's."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [_flag(name) for name in OPTIONS]

    def options(self) -> VllmOptions:
        return VllmOptions(**self.given)


class BackendFlags(ConfigFlags):
    """`--backend`, and options that the embedded engine does not have."""

    left_out: ClassVar[tuple[str, ...]] = (*SHARED, *SERVED_ALONE)

    def __init__(self, *, backend: BackendName, **values: Any) -> None:
        super().__init__(**values)
        self.backend = backend

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        option = typer.Option(help="The engine that answers.", rich_help_panel="Engine")
        backend = inspect.Parameter(
            "backend",
            inspect.Parameter.KEYWORD_ONLY,
            default="embedded",
            annotation=Annotated[BackendName, option],
        )
        names = [name for name in OPTIONS if name not in cls.left_out]
        return [backend, *(_flag(name) for name in names)]

    def vllm_options(self, engine: EngineFlags) -> VllmOptions | None:
        """None for the embedded engine, which refuses what would change something on vLLM."""
        if self.backend == "vllm":
            shared = {name: engine.given[name] for name in SHARED if name in engine.given}
            return VllmOptions(**self.given, **shared)
        hint = "add --backend vllm, or drop it"
        for name in drop_unused(self.given, LLM_ARGUMENTS, ConfigError, hint=hint):
            raise ConfigError(
                f"{name}={self.given[name]} is an option that only vLLM has", hint=hint
            )
        return None


class ServedBackendFlags(BackendFlags):
    """The same for `peagle serve`."""

    left_out = SHARED


def _flag(name: str) -> inspect.Parameter:
    return field_flag(VllmOptions, name, "vLLM", described_in=EngineConfig)
