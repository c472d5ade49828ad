"""Logging to stderr, so that stdout carries data alone."""

from __future__ import annotations

import logging
import os
import sys

from peagle.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def setup_logging(verbosity: int = 0) -> None:
    """Sends the package's log to stderr; -v means INFO and -vv DEBUG, over PEAGLE_LOG_LEVEL.

    For the command line: a program that imports us keeps its own set-up. transformers' remarks
    about what we check ourselves (a prompt's length) stay away unless asked for.
    """
    if not verbosity:  # read when transformers is imported, which is later
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("peagle")
    logger.setLevel(_level(verbosity))
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False


def _level(verbosity: int) -> str:
    if verbosity:
        return "INFO" if verbosity == 1 else "DEBUG"
    level = os.environ.get("PEAGLE_LOG_LEVEL", "WARNING").upper()
    if level not in LEVELS:
        raise ConfigError(
            f"PEAGLE_LOG_LEVEL={level} is not a level", hint=f"use one of: {', '.join(LEVELS)}"
        )
    return level
