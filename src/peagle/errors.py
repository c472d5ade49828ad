"""Errors a user can cause. Everything else is our bug and keeps its traceback."""

from __future__ import annotations


class PeagleError(ValueError):
    """A user's error: one line that says what is wrong, and a hint that says what to do.

    The command line prints both and exits with 2. It is a ValueError so that Python callers
    catch what vLLM would have raised in the same place.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class ModelError(PeagleError):
    """A model reference, a model folder or its weights cannot be used."""


class HeadError(PeagleError):
    """A head is broken, or does not fit the target it is used with."""


class DataError(PeagleError):
    """Training data is missing, empty, damaged or does not fit its target."""


class TrainingError(PeagleError):
    """A run cannot go on; what it had reached is kept."""


class OutputError(PeagleError):
    """A file or a folder cannot be written, or another process is writing to it."""


class ConfigError(PeagleError):
    """An option or a combination of options makes no sense."""


class RequestError(PeagleError):
    """One request cannot be served; its neighbours are not affected."""


class DeployError(PeagleError):
    """An endpoint cannot be made, reached or removed."""


class BackendError(PeagleError):
    """The engine behind a backend is missing, too old, or has failed."""
