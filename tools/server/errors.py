"""What is answered where a request cannot be: a status, and one line in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omnidraft.runtime.errors import OmniDraftError

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A status with one line for the client; `param`: the field of the request that is at fault, if it is one."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


@contextmanager
def answered_with(status: int) -> Iterator[None]:
    """Turns an OmniDraftError inside into an ApiError of this status."""
    try:
        yield
    except OmniDraftError as error:
        raise ApiError(status, str(error)) from None


async def answer_error(request: Request, error: Exception) -> Response:
    """For Starlette: an ApiError, or what it raises itself (no such path, no such method)."""
    if isinstance(error, ApiError):
        return error.response
    status: int = getattr(error, "status_code", 500)
    if status == 404:
        return ApiError(404, f"{request.url.path}: no such path; docs/server.md lists those there are").response
    if status == 405:
        headers = getattr(error, "headers", None)
        return ApiError(405, f"{request.method} {request.url.path}: no such method here", headers=headers).response
    return ApiError(500, "the server failed; its error stream says why").response
