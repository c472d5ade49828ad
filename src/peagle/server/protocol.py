"""Bodies of requests and answers: OpenAI's, with vLLM's additions and one of ours, `speculative`.

An unknown key is refused rather than ignored. What OpenAI's clients send for its own bookkeeping
is accepted and has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
INT64 = (1 << 63) - 1
TokenId = Annotated[int, Field(ge=0, le=INT64)]
Count = Annotated[int, Field(ge=0, le=INT64)]
_Item = TypeVar("_Item")
# Of a very long list whose items are all wrong the first is told: to tell each takes half a minute.
Items = Annotated[list[_Item], Field(fail_fast=True)]


class Body(BaseModel):
    """JSON as it stands: a text is not a number, true is not 1, and there is no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RequestBody(Body):
    """Read from JSON by `model_validate_json`, which refuses texts that are not valid Unicode."""


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None  # without effect


class Speculative(Body):
    """How this request is speculated for. The answer does not depend on it."""

    num_speculative_tokens: Count | None = Field(
        default=None, description="Draft tokens per step; 0: none; null: the server's"
    )
    show_drafts: bool | None = Field(
        default=False, description="Chunks and answers say which of their text was drafted"
    )
    show_trees: bool | None = Field(
        default=False, description="They show each step's drafts; a GPU's steps wait for that"
    )


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's; exactly one of the first five."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class SamplingBody(RequestBody):
    """What both kinds of completions take. None stands for the default of SamplingParams."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=INT64)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Items[str] | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    speculative: Speculative | None = None
    # Without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(SamplingBody):
    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    echo: bool | None = False
    logprobs: Count | None = None
    best_of: Count | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None  # of OpenAI's client, which sends them back. Without effect.


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of a streamed call, when a client sends it back


class Message(Body):
    role: Role
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # What an answer had beside its content: our name for it, and that of other servers.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Of answers of OpenAI's own and of its client, which are sent back as they are. Without effect.
    parsed: Any = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingBody):
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Count | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None  # a variable of the chat template, as GPT-OSS's has
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort}
        return own | (self.chat_template_kwargs or {})


class TokenizeRequest(RequestBody):
    """A text or a conversation; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Items[TokenId]


class Answer(BaseModel):
    """Bodies that we write. Keys that were not set are left out."""


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculativeDecoding(Answer):
    """Acceptance of one request, over all of its answers."""

    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float
    acceptance_rate: float


class Metrics(Answer):
    """Figures of one request; times in seconds."""

    time_to_first_token: float | None
    e2e_latency: float
    speculative_decoding: SpeculativeDecoding | None = None


class DraftedText(Answer):
    """A piece of an answer, and whether drafts that were accepted or the target itself gave it."""

    text: str
    drafted: bool


class DraftNode(Answer):
    """A draft token; `parent` is the number of the one before it, counted from 1, or 0."""

    text: str
    parent: int
    accepted: bool


class DraftedStep(Answer):
    """The tree of one step, and the token that the target added to what it accepted."""

    nodes: list[DraftNode]
    bonus: str


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    drafts: list[DraftedText] | None = None
    trees: list[DraftedStep] | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None


class CalledFunction(Answer):
    name: str
    arguments: str


class CalledTool(Answer):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in streams


class ChatMessage(Answer):
    """A message, or in a stream what is added to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    drafts: list[DraftedText] | None = None
    trees: list[DraftedStep] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: Metrics | None = None


class Drafter(Answer):
    method: str
    num_speculative_tokens: int


class ModelCard(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["peagle"] = "peagle"  # clients take it for a server with vLLM's keys
    root: str
    max_model_len: int
    drafter: Drafter | None = None


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Answer):
    prompt: str


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetails
