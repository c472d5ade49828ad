"""Logging to stderr, so that stdout carries data alone."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from peagle.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def setup_logging(verbosity: int = 0) -> None:
    """Sends the package's log to stderr: verbosity 1 (-v) means INFO, 2 (-vv) DEBUG and -1 (-q)
    ERROR; 0 is what PEAGLE_LOG_LEVEL says.

    For the command line: a program that imports us keeps its own set-up. transformers' remarks
    about what we check ourselves (a prompt's length) stay away unless asked for.
    """
    if verbosity < 1:  # read when transformers is imported, which is later
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("peagle")
    logger.setLevel(_level(verbosity))
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment: while a bar is shown, to a place above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's own would keep today's stderr

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def is_quiet() -> bool:
    """Whether the user wants results and errors alone."""
    return not logging.getLogger("peagle").isEnabledFor(logging.WARNING)


def _level(verbosity: int) -> str:
    if verbosity < 0:
        return "ERROR"
    if verbosity:
        return "INFO" if verbosity == 1 else "DEBUG"
    level = os.environ.get("PEAGLE_LOG_LEVEL", "WARNING").upper()
    if level not in LEVELS:
        raise ConfigError(
            f"PEAGLE_LOG_LEVEL={level} is not a level", hint=f"use one of: {', '.join(LEVELS)}"
        )
    return level
