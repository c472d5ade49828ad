"""The app, and what a user sees when something goes wrong: one line and a hint."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

import peagle
from peagle.cli import (
    bench,
    capture,
    chat,
    demo,
    deploy,
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
from peagle.cli.help import Group
from peagle.cli.render import print_error
from peagle.cli.verb import Quiet, Verb, Verbose, as_verb, with_dashes
from peagle.config import RANGES, expected_value
from peagle.errors import PeagleError
from peagle.files import refusal
from peagle.log import setup_logging
from peagle.processes import Terminated, interruptions, raise_interruption

EXIT_OURS, EXIT_USER = 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 130, 141, 143  # 128 + the signal's number
VALUE_ERRORS = (*RANGES, "int_parsing", "float_parsing", "int_from_float")
COMPLETION = "_PEAGLE_COMPLETE"  # set by the shell

app = typer.Typer(
    name="peagle",
    cls=Group,
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
app.add_typer(deploy.app, name="deploy")
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


def _make_verbs(group: typer.Typer) -> None:
    """Gives every command, of groups in it as well, what all verbs understand."""
    for command in group.registered_commands:
        assert command.callback is not None
        command.callback, command.cls = as_verb(command.callback), Verb
    for inside in group.registered_groups:
        if inside.typer_instance is not None:
            _make_verbs(inside.typer_instance)


_make_verbs(app)


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
    if sys.stderr is None:  # `2>&-`
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return _failed(EXIT_USER, "stdout is closed", "redirect it to a file or to /dev/null")
    try:
        code = _run(args)
        sys.stdout.flush()
    except PeagleError as error:
        return _failed(EXIT_USER, error.message, error.hint)
    except TyperException as error:
        return _failed(EXIT_USER, *_usage_error(error))
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # of a file that no verb was prepared for, or of stdout
        return _failed(EXIT_USER, *_refused(error))
    except UnicodeEncodeError as error:
        return _failed(EXIT_USER, *_not_encodable(error))
    except Terminated:
        return EXIT_TERMINATED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        if _is_lack_of_memory(error):
            hint = "lower --max-num-seqs, --max-model-len or the sizes in the recipe"
            return _failed(EXIT_USER, f"out of memory: {error}", hint)
        message = f"unexpected {type(error).__name__}: {error}"
        return _failed(EXIT_OURS, message, "PEAGLE_DEBUG=1 shows where; please report it")
    return code


def _run(args: list[str]) -> int:
    """typer's own entry makes 1 of a closed pipe and Ctrl-C of SIGTERM; a shell's question which
    words may follow is answered by it alone."""
    command = typer.main.get_command(app)
    if COMPLETION in os.environ:
        command.main(args, prog_name="peagle", complete_var=COMPLETION)
    interruptions.clear()
    try:
        with command.make_context("peagle", args) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except SystemExit as end:  # rich's answer to a closed pipe
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    except Exception:
        if interruptions:  # what came of the signal's own exception
            raise_interruption(interruptions[0])
        raise
    return 0


def _failed(code: int, message: str, hint: str | None) -> int:
    if os.environ.get("PEAGLE_DEBUG") == "1":
        traceback.print_exc()
    print_error(message, hint)
    return code


def _usage_error(error: TyperException) -> tuple[str, str]:
    """Message and hint. typer keeps its usage errors' fields off the public base class."""
    nearest = _nearest(error)
    if nearest:
        return error.message, f"did you mean {nearest}?"
    parameter: Any = getattr(error, "param", None)
    errors = getattr(error.__cause__, "errors", None)
    wrong = errors()[0] if parameter and errors else {"type": None}  # pydantic's, of a value
    if wrong["type"] in VALUE_ERRORS:
        fault = "is out of range" if wrong["type"] in RANGES else "does not fit"
        return f"{parameter.opts[0]} {wrong['input']} {fault}", f"use {expected_value(wrong)}"
    if error.message.startswith("No such option: -") and "--" not in error.message:
        return error.message, "write -- before a text that begins with a dash"
    context = getattr(error, "ctx", None)
    hint = f"see {context.command_path if context else 'peagle'} --help"
    if error.message.startswith("No such option: "):  # format_message() adds guesses that are none
        return error.message, hint
    return error.format_message().replace("Value error, ", ""), hint


def _nearest(error: TyperException) -> str | None:
    """typer's guess, unless dashes alone make it alike: --json is not nearly --stop."""
    typed, guesses = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    names = {guess.lstrip("-"): guess for guess in guesses or ()}
    if typed is not None:
        found = difflib.get_close_matches(typed.lstrip("-"), names, n=1)
        return names[found[0]] if found else None
    return next(iter(guesses or ()), None)


def _refused(error: OSError) -> tuple[str, str]:
    """Message and hint. If it was stdout, what is still buffered would fail again at the end."""
    _drop_output()
    reason, remedy = refusal(error)
    return (f"{error.filename}: {reason}" if error.filename else f"cannot write: {reason}"), remedy


def _is_lack_of_memory(error: Exception) -> bool:
    """Python's, a GPU's, or a plain RuntimeError of torch's allocator for CPUs."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


def _not_encodable(error: UnicodeEncodeError) -> tuple[str, str]:
    text = ascii(error.object[error.start : error.end])
    return f"{error.encoding} cannot express {text}", "set PYTHONIOENCODING=utf-8"


def _drop_output() -> None:
    """What cannot be written has nowhere to go, and Python would say so when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
