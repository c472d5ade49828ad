"""Address, keys and limits of the embedded server: the fields of ServerConfig, as flags."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from peagle.cli.flags import ConfigFlags, doc_of, field_flag
from peagle.server.config import ServerConfig

NOT_HERE = ("host", "port")  # vLLM's, too, with defaults of its own
KINDS: dict[str, Any] = {"allowed_origins": list[str], "log_requests": bool | None}


class ServerFlags(ConfigFlags):
    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        names = [field.name for field in fields(ServerConfig) if field.name not in NOT_HERE]
        return [
            field_flag(ServerConfig, name, "Server", kind=KINDS.get(name), note=_note(name))
            for name in names
        ]

    def config(self, host: str | None, port: int | None) -> ServerConfig:
        address = {"host": host, "port": port}
        given = self.given | {name: value for name, value in address.items() if value is not None}
        return ServerConfig(**given)


def _note(name: str) -> str:
    default, doc = getattr(ServerConfig, name), doc_of(ServerConfig, name)
    if name in KINDS and default == ():
        return "May be repeated."
    words = doc.if_none if default is None and doc else default
    return "" if words in ("", None) else f"Default: {words}."
