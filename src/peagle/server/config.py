"""What the server is told at start. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.config import Doc
from peagle.errors import ConfigError

API_KEY_VARIABLE = "PEAGLE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address, keys and limits of one server."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Annotated[
        str | None, Doc("Name of the model in requests.", if_none="MODEL, of a folder its name")
    ] = None
    api_key: Annotated[
        str | None, Doc(f"Key that requests must bring; also from ${API_KEY_VARIABLE}.")
    ] = None
    api_key_file: Annotated[Path | None, Doc("The same from the first line of a file.")] = None
    api_server_count: Annotated[
        int | None,
        Doc("Processes that speak HTTP.", if_none="1, with a GPU one for each 4 cores, at most 4"),
    ] = None
    max_waiting_requests: Annotated[
        int, Doc("Answers that may wait beside --max-num-seqs; more get 429.")
    ] = 256
    request_timeout: Annotated[float, Doc("Seconds that an answer may take, waiting included.")] = (
        600.0
    )
    shutdown_timeout: Annotated[float, Doc("Seconds for open answers after a stop signal.")] = 30.0
    max_body_bytes: Annotated[int, Doc("Longest body of a request.")] = 4 << 20
    max_n: Annotated[int, Doc("Most answers to a request, over all of its prompts.")] = 64
    max_stop_strings: Annotated[int, Doc("Most stop strings and bad words of a request.")] = 32
    max_logprobs: Annotated[int, Doc("Most log-probabilities per token.")] = 20
    allowed_origins: Annotated[
        Sequence[str], Doc("Web origin whose pages may call the server (CORS).")
    ] = ()
    ssl_keyfile: Annotated[Path | None, Doc("Private key, to serve HTTPS.")] = None
    ssl_certfile: Annotated[Path | None, Doc("Certificate, to serve HTTPS.")] = None
    log_requests: Annotated[bool, Doc("One JSON line per request to stderr.")] = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is out of range", hint="use 1 to 65535")
        counts = ("max_body_bytes", "max_n", "max_stop_strings")
        for name, least in (
            ("max_waiting_requests", 0),
            ("max_logprobs", 0),
            *((n, 1) for n in counts),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range", hint=f"use >= {least}"
                )
        if self.api_server_count is not None and not 1 <= self.api_server_count <= 64:
            raise ConfigError(
                f"api_server_count={self.api_server_count} is out of range", hint="use 1 to 64"
            )
        for name in ("request_timeout", "shutdown_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range", hint="use > 0")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("HTTPS needs --ssl-keyfile and --ssl-certfile", hint="give both")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def read_api_key(config: ServerConfig, variable: str | None) -> str | None:
    """The key from the flag, the file or the environment; None: requests need none."""
    if config.api_key is not None and config.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file were both given", hint="use one of the two")
    key = config.api_key if config.api_key is not None else variable
    if config.api_key_file is not None:
        try:
            key = config.api_key_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable("--api-key-file", error) from None
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ConfigError("the API key is empty or not printable ASCII", hint="choose another")
    return key


def check_certificate(config: ServerConfig) -> None:
    """Refuses before the model is loaded what the server would refuse after it."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # an SSLError is one
        raise _unreadable("--ssl-certfile and --ssl-keyfile", error) from None


def _unreadable(flags: str, error: OSError | UnicodeDecodeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"{flags}: cannot read: {reason}", hint="check the path and its contents")
