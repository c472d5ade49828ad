"""The routes."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import peagle
from peagle.engine.prompts import TokenizedPrompt, check_tokens
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams
from peagle.server.async_llm import AsyncLLM, Generation
from peagle.server.config import ServerConfig
from peagle.server.engine_loop import Ready
from peagle.server.errors import ApiError, client_has_gone, misfit, refusal
from peagle.server.guards import Guards
from peagle.server.metrics import ServerMetrics
from peagle.server.page import page
from peagle.server.params import chat_params, completion_params, forces_a_call
from peagle.server.prompts import PromptRenderer
from peagle.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    Drafter,
    ErrorAnswer,
    ModelCard,
    ModelList,
    RequestBody,
    SamplingBody,
    Speculative,
    StreamOptions,
    TokenizeRequest,
    TokenizeResponse,
)
from peagle.server.responses import ChatWriter, CompletionWriter, json_response, respond
from peagle.server.tool_calls import ToolCallReader

IS_JSON = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE | re.ASCII)
_Body = TypeVar("_Body", bound=RequestBody)


@dataclass(eq=False)
class Service:
    """What the routes have in common."""

    names: Sequence[str]  # of the model; requests may use any, answers show the first
    config: ServerConfig
    llm: AsyncLLM
    renderer: PromptRenderer
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> Ready:
        """Raises ApiError while the model is loading, and where the engine has stopped."""
        self.llm.check_ready()
        assert self.llm.ready is not None
        return self.llm.ready

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            message = f"the model does not exist; this server has {self.names[0]}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_num_answers(self, body: CompletionRequest) -> None:
        """Before the prompts are read, which may be very many."""
        is_many = isinstance(body.prompt, list) and not isinstance((body.prompt or [0])[0], int)
        num_answers = (body.n or 1) * (len(body.prompt) if is_many else 1)
        if num_answers > self.config.max_n:
            most = self.config.max_n
            raise ApiError(400, f"{num_answers} answers are asked for; the most are {most}")

    def generate(
        self,
        request: Request,
        body: SamplingBody,
        prompts: list[TokenizedPrompt],
        params: SamplingParams,
    ) -> Generation:
        """Opens the request, if the engine can serve it."""
        ready = self.ready
        for prompt in prompts:
            _check_length(prompt, ready)
            check_tokens(
                prompt.token_ids,
                params,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
            )
        asked = body.speculative or Speculative()
        generation = self.llm.generate(
            prompts,
            params,
            shows_drafts=bool(asked.show_drafts),
            shows_trees=bool(asked.show_trees),
        )
        request.state.generation = generation
        return generation


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    app = FastAPI(
        title="peagle",
        version=peagle.__version__,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.service = service
    app.include_router(posts)
    app.include_router(router)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    config = service.config
    app.add_middleware(
        Guards,
        api_key=api_key,
        max_body_bytes=config.max_body_bytes,
        only_local_hosts=config.is_loopback and api_key is None,
        log_requests=config.log_requests,
        observe=service.metrics.observe_http,
    )
    if config.allowed_origins:  # outside: a browser asks first, and sends no key with that
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.metrics.watch(service.llm)
    service.llm.start()
    try:
        yield
    finally:
        service.llm.close()


async def _service(request: Request) -> Service:
    """Not a plain function: FastAPI would call that in a thread."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


class JsonRoute(APIRoute):
    """A route whose body is read straight into its model, which is the endpoint's first parameter;
    the others are the request and the service. FastAPI would find that out anew for each request,
    and read JSON into objects first. The description of the API is still FastAPI's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        assert self.body_field is not None
        model: type[RequestBody] = self.body_field.field_info.annotation  # type: ignore[assignment]
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            body = read_body(model, request.headers.get("content-type"), await request.body())
            return await endpoint(body, request, request.app.state.service)

        return handle


router = APIRouter()
posts = APIRouter(route_class=JsonRoute)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 429, 500, 503, 504)
}


@posts.post("/v1/chat/completions", response_model=ChatCompletion, responses=REFUSALS)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, service: Served
) -> Response:
    """An answer to a conversation, by the model's chat template."""
    service.check_model(body.model)
    params = chat_params(body, service.config)
    reads_tools, is_call = bool(body.tools) and body.tool_choice != "none", forces_a_call(body)
    if body.tools:
        service.renderer.check_tools(reads_marks=reads_tools and not is_call)
    form = None if is_call else service.renderer.answer_format
    marked = form is not None and form.in_special_tokens and body.skip_special_tokens is not False
    if marked:  # the reader needs them, and leaves them out
        params = replace(params, skip_special_tokens=False)
    new_reader = None
    if is_call or reads_tools or marked:
        tools = body.tools or () if reads_tools else ()
        new_reader = partial(ToolCallReader, form, tools, body.parallel_tool_calls is False)
    prompt = await service.renderer.conversation(body.messages, body.tools, body.template_variables)
    writer = ChatWriter(
        f"chatcmpl-{request.state.request_id}",
        service.names[0],
        service.generate(request, body, [prompt], params),
        service.renderer.tokenizer,
        body.stream_options or StreamOptions(),
        bool(body.return_token_ids),
        new_reader=new_reader,
    )
    return await respond(writer, request.receive, stream=bool(body.stream))


@posts.post("/v1/completions", response_model=Completion, responses=REFUSALS)
async def completions(body: CompletionRequest, request: Request, service: Served) -> Response:
    """The text that follows a prompt."""
    service.check_model(body.model)
    params = completion_params(body, service.config)
    service.check_num_answers(body)
    prompts = await service.renderer.completion(body)
    writer = CompletionWriter(
        f"cmpl-{request.state.request_id}",
        service.names[0],
        service.generate(request, body, prompts, params),
        service.renderer.tokenizer,
        body.stream_options or StreamOptions(),
        bool(body.return_token_ids),
        echoes=bool(body.echo),
    )
    return await respond(writer, request.receive, stream=bool(body.stream))


@router.get("/v1/models", response_model=ModelList, responses=REFUSALS)
async def models(service: Served) -> ModelList:
    """The one model, under the name that requests use."""
    return ModelList(data=[_card(service)])


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=REFUSALS)
async def model(name: str, service: Served) -> ModelCard:
    """The model by its name, which may hold slashes."""
    service.check_model(name)
    return _card(service)


def _card(service: Service) -> ModelCard:
    ready, name = service.ready, service.names[0]
    drafter = None
    if ready.num_speculative_tokens:
        drafter = Drafter(method=ready.method, num_speculative_tokens=ready.num_speculative_tokens)
    return ModelCard(
        id=name,
        created=service.created,
        root=name,
        max_model_len=ready.max_model_len,
        drafter=drafter,
    )


@posts.post("/tokenize", response_model=TokenizeResponse, responses=REFUSALS)
async def tokenize(body: TokenizeRequest, request: Request, service: Served) -> Response:
    """Token ids of a text, or of a conversation by the model's chat template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages")
    renderer = service.renderer
    if body.messages is not None:
        prompt = await renderer.conversation(body.messages, body.tools, body.chat_template_kwargs)
    else:
        prompt = await renderer.encode(body.prompt or "", body.add_special_tokens is not False)
    tokens, length = prompt.token_ids, service.ready.max_model_len
    answer = TokenizeResponse(count=len(tokens), max_model_len=length, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = await renderer.decode_each(tokens)
    return json_response(answer)


@posts.post("/detokenize", response_model=DetokenizeResponse, responses=REFUSALS)
async def detokenize(body: DetokenizeRequest, request: Request, service: Served) -> Response:
    """The text of token ids."""
    service.check_model(body.model)
    size = service.ready.vocab_size
    if any(token >= size for token in body.tokens):
        raise ApiError(400, f"a token id is not in the vocabulary of {size}", param="tokens")
    return json_response(DetokenizeResponse(prompt=await service.renderer.decode(body.tokens)))


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={503: {"model": ErrorAnswer}})
async def health(service: Served) -> Response:
    """200 once the model is loaded and warm."""
    service.llm.check_ready()
    return Response()


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": peagle.__version__}


@router.get("/metrics", response_class=Response)
async def metrics(service: Served) -> Response:
    """For Prometheus."""
    await service.llm.renew_status()
    return Response(service.metrics.page(), media_type=service.metrics.content_type)


@router.head("/", include_in_schema=False)
@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def front_page() -> HTMLResponse:
    html, policy = page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


def read_body(model: type[_Body], content_type: str | None, content: bytes) -> _Body:
    """Only what is said to be JSON is read: a page of another origin cannot say so unasked."""
    if not IS_JSON.match(content_type or ""):
        raise ApiError(400, "the body is not said to be JSON; send Content-Type: application/json")
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise misfit(error) from None


def _check_length(prompt: TokenizedPrompt, ready: Ready) -> None:
    count = len(prompt.token_ids)
    if count >= ready.max_model_len:
        message = f"the prompt has {count} tokens, the context of this model {ready.max_model_len}"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return refusal(error).response


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response


async def _on_disconnect(request: Request, error: Exception) -> JSONResponse:
    return client_has_gone().response


async def _on_our_mistake(request: Request, error: Exception) -> JSONResponse:
    return ApiError(500, "internal error; the server's log has it under the request id").response


HANDLERS = {
    ApiError: _on_api_error,
    RequestError: _on_refusal,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,  # while its body was read
    Exception: _on_our_mistake,
}
