"""Errors in OpenAI's shape, with their status. No message holds text of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from peagle.errors import RequestError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

MAX_ERRORS = 1000  # of a body: to list very many takes seconds
# A key or an item's number in a path; not a kind of value, which pydantic writes there, too.
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}|[0-9]+")


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def document(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "internal_server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.document, self.status, self.headers)


def client_has_gone() -> ApiError:
    """Nobody reads it, but logs and metrics."""
    return ApiError(499, "the client has gone")


def refusal(error: RequestError, param: str | None = None) -> ApiError:
    """What the engine, a tokenizer or SamplingParams refuse."""
    hint = f"; {error.hint}" if error.hint else ""
    return ApiError(400, f"{error.message}{hint}", param=param)


def misfit(error: ValidationError) -> ApiError:
    """A body that does not fit its model: pydantic's first error, without the value. Where a value
    may be of several kinds, that of the kind which it came closest to."""
    if error.error_count() > MAX_ERRORS:
        return ApiError(400, f"the body does not fit in {error.error_count()} places")
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda one: len(one["loc"]))
    path = [part for part in map(str, first["loc"]) if NAME.fullmatch(part) and part != "str"]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":  # half of a surrogate pair is, too, and what is very deep
        return ApiError(400, "the body is not valid JSON, or a text in it not valid Unicode")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {str(first['loc'][-1])[:64]!r}", param=param)
    said = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {said}", param=param)
