"""The app, and what a user sees when something goes wrong: one line and a hint."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import TyperException

import peagle
from peagle.cli import (
    bench,
    capture,
    chat,
    demo,
    doctor,
    env,
    evaluate,
    export,
    generate,
    heads,
    prepare,
    report,
    serve,
    simulate,
    train,
    tune,
)
from peagle.cli.render import print_error
from peagle.cli.verb import Quiet, Verb, Verbose, as_verb, with_dashes
from peagle.errors import PeagleError
from peagle.log import setup_logging

EXIT_OURS, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="peagle",
    help="Lossless parallel speculative decoding: faster answers, the same tokens.",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": with_dashes,  # flags may have underscores, as vLLM's may
    },
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("prepare")(prepare.prepare)
app.command("capture")(capture.capture)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.add_typer(bench.app, name="bench")
app.command("tune")(tune.tune_command)
app.command("simulate")(simulate.simulate_command)
app.command("report")(report.report_command)
app.command("serve")(serve.serve)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("heads")(heads.heads)
app.command("env")(env.env)


@app.command("version")
def _version() -> None:
    """Show the version."""
    typer.echo(f"peagle {peagle.__version__}")


@app.command("help")
def _help(
    words: Annotated[list[str] | None, typer.Argument(metavar="VERB", help="Default: all.")] = None,
) -> None:
    """Show the help of a verb."""
    raise typer.Exit(main([*(words or []), "--help"]))


for _registered in (*app.registered_commands, *bench.app.registered_commands):
    assert _registered.callback is not None
    _registered.callback, _registered.cls = as_verb(_registered.callback), Verb


def _print_version(asked: bool) -> None:
    if asked:
        _version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _before_every_verb(
    context: typer.Context,
    verbose: Verbose = 0,
    quiet: Quiet = False,
    _version: Annotated[
        bool,
        typer.Option(
            *("--version", "-V"),
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    setup_logging(-1 if quiet else verbose)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        code = typer.main.get_command(app).main(args, prog_name="peagle", standalone_mode=False)
        sys.stdout.flush()
    except PeagleError as error:
        return _failed(EXIT_USER, error.message, error.hint)
    except TyperException as error:
        return _failed(EXIT_USER, *_usage_error(error))
    except BrokenPipeError:
        return _reader_went_away()
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {error}"
        return _failed(EXIT_OURS, message, "PEAGLE_DEBUG=1 shows where; please report it")
    return code if isinstance(code, int) else 0


def run() -> None:
    sys.exit(main(sys.argv[1:]))


def _failed(code: int, message: str, hint: str | None) -> int:
    if os.environ.get("PEAGLE_DEBUG") == "1":
        traceback.print_exc()
    print_error(message, hint)
    return code


def _usage_error(error: TyperException) -> tuple[str, str]:
    """Message and hint. typer keeps its usage errors' fields off the public base class."""
    nearest = getattr(error, "possibilities", None)
    if nearest:
        return error.message, f"did you mean {nearest[0]}?"
    context = getattr(error, "ctx", None)
    if error.message.startswith("No such option: -") and "--" not in error.message:
        return error.message, "write -- before a text that begins with a dash"
    return error.format_message(), f"see {context.command_path if context else 'peagle'} --help"


def _reader_went_away() -> int:
    # `peagle ... | head`: what is still buffered has nowhere to go, and Python would say so.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OURS
