"""The requests of OpenAI's API, as far as they are served. Unknown fields are ignored."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from deployments.fields import Flag, Int, Many, NullsAreAbsent, Number, Prompt, Sampling, Text, known_prompt
from engine.types import MAX_LOGPROBS, Grammar, InvalidRequest, require

MAX_PROMPTS = 32  # of one request
MAX_TOOLS = 128
MAX_MESSAGES = 4096  # of a conversation, with the calls in them: more take too long to be looked at between two others
UNSUPPORTED = (  # fields that would change the output, and are not done here: better refused than ignored
    *("suffix", "functions", "function_call", "prompt_logprobs", "use_beam_search", "logits_processors"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"),
    *("json_schema", "audio", "prediction", "chat_template", "echo_logprobs", "prompt_embeds"),
    *("continue_final_message", "include_stop_str_in_output", "allowed_token_ids", "truncate_prompt_tokens"),
    *("documents", "return_tokens_as_token_ids", "return_token_ids", "web_search_options"),
)
AS_THEY_ARE: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "modalities": ["text"],
    "verbosity": "medium",
    "length_penalty": 1.0,
}


class StreamOptions(NullsAreAbsent):
    """Of a streamed answer."""

    include_usage: Flag = False


class PacelineOptions(NullsAreAbsent):
    """What Paceline adds to OpenAI's requests."""

    stats: Flag = False  # answer with the seed used, and with what speculation did
    timeout_s: Annotated[Number, Field(gt=0)] | None = None  # when shorter than the server's own
    documents: Many[Text] = ()  # texts that the output may quote; with one prompt
    window: Text = ""  # what is verified in a step; none: what the model's configuration says


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema")
    return value


class JsonSchemaFormat(NullsAreAbsent):
    """A named schema."""

    name: Text = "output"
    schema_: Annotated[dict[str, Any] | bool, BeforeValidator(_schema, dict[str, Any] | bool)] = Field(alias="schema")
    strict: Flag = True  # the output follows the schema in any case


class ResponseFormat(NullsAreAbsent):
    """What the output has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest."""
        if self.type != "json_schema":
            return Grammar("json_object") if self.type == "json_object" else None
        require(self.json_schema is not None, "response_format", "json_schema is missing")
        return Grammar("json_schema", json.dumps(self.json_schema.schema_)) if self.json_schema else None


def _top_k(value: Any) -> Any:
    return 0 if value == -1 else value  # as vLLM's clients write "no limit"


class _Request(Sampling):
    top_k: Annotated[Int, BeforeValidator(_top_k, Int)] = 0
    stream: Flag = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    best_of: Int | None = None  # taken when it changes nothing
    cache_salt: Text = ""  # KV is shared among requests with the same one
    paceline: PacelineOptions = PacelineOptions()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def formed(self) -> bool:
        """Whether the output has to look like something: a grammar is compiled for it."""
        return self.response_format is not None and self.response_format.type != "text"

    def grammar(self) -> Grammar | None:
        """What the output has to look like. Raises InvalidRequest."""
        return self.response_format.grammar() if self.response_format is not None else None

    def check(self) -> None:
        """What fields say together. Raises InvalidRequest."""
        require(self.stream or self.stream_options is None, "stream_options", "only with stream")
        require(self.best_of in (None, self.n), "best_of", "is not supported beyond n")


def refuse_unsupported(values: dict[str, Any]) -> None:
    """Raises InvalidRequest for a field that means something, but nothing here."""
    for name in UNSUPPORTED:
        if values.get(name):
            raise InvalidRequest(name, "is not supported")
    for name, usual in AS_THEY_ARE.items():
        if values.get(name, usual) not in (usual, None):
            raise InvalidRequest(name, f"is always {json.dumps(usual)} here")


# --- /v1/completions


def _prompts(value: Any) -> Any:
    """One or several prompts, each a text or token ids, as a list of prompts."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return [known_prompt(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts")
    if len({type(prompt) for prompt in value}) > 1:
        raise ValueError("all prompts must be texts, or all token ids")
    return value


_PromptForms = Text | list[Int] | list[Text] | list[list[Int]]


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    prompt: Annotated[Many[Prompt], BeforeValidator(_prompts, _PromptForms)]
    add_special_tokens: Flag = True  # to prompts that are texts
    max_tokens: Int = 16
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Flag = False  # the prompt comes first in the text

    def check(self) -> None:
        """See _Request."""
        super().check()
        require(len(self.prompt) == 1 or not self.paceline.documents, "paceline.documents", "only with one prompt")
        require(not (self.echo and self.logprobs is not None), "echo", "has no log probabilities of the prompt")


# --- /v1/chat/completions


class FunctionCall(NullsAreAbsent):
    """A function with its arguments."""

    name: Text
    arguments: Text  # JSON


class ToolCall(NullsAreAbsent):
    """A call that the model asks for."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


def _text_parts(value: Any) -> Any:
    """Content as one text; parts of other kinds are not taken."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('its parts must be {"type": "text", "text": ...}')
    return "".join(part["text"] for part in value)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(NullsAreAbsent):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_text_parts, Text | list[TextPart])] | None = None
    name: Text | None = None
    tool_calls: Many[ToolCall] = ()
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self


def _few_enough(value: Any) -> Any:
    """Before any is looked at."""
    if isinstance(value, list):
        calls = (message.get("tool_calls") for message in value if isinstance(message, dict))
        if len(value) + sum(len(each) for each in calls if isinstance(each, list)) > MAX_MESSAGES:
            raise ValueError(f"must be at most {MAX_MESSAGES}, with the calls in them")
    return value


Messages = Annotated[Many[Message], Field(min_length=1), BeforeValidator(_few_enough)]


class Function(NullsAreAbsent):
    """What can be called."""

    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: Flag | None = None  # what the client didn't say is nothing for the prompt


class Tool(NullsAreAbsent):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """Which one."""

    name: Text


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


def _tool_choice(value: Any) -> Any:
    function = (
        value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    )
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if named or value in ("none", "auto", "required"):
        return value
    form = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f"must be 'none', 'auto', 'required' or {form}")


class _Chat(NullsAreAbsent):
    """What becomes a prompt by the chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # as vLLM's: what the model's template asks for
    reasoning_effort: Text | None = None  # for the template too

    @property
    def template_values(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}


class ChatRequest(_Request, _Chat):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    add_special_tokens: Flag = False  # around what the template writes
    max_tokens: Int | None = None  # None: as many as the context has room for
    max_completion_tokens: Int | None = None  # the newer name
    logprobs: Flag = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] = ()
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_tool_choice, Text | NamedTool)
    ] = "auto"
    parallel_tool_calls: Flag = True  # false: of several calls only the first is answered
    echo: Flag = False

    @property
    def forced(self) -> bool:
        """Whether a call is insisted on."""
        return self.tool_choice not in ("none", "auto")

    @property
    def formed(self) -> bool:
        """See _Request."""
        return super().formed or self.forced

    def check(self) -> None:
        """See _Request."""
        super().check()
        require(not self.echo, "echo", "is not supported")
        require(self.logprobs or self.top_logprobs is None, "top_logprobs", "only with logprobs")
        require(bool(self.tools) or not self.forced, "tool_choice", "only with tools")
        calls = self.tools and self.tool_choice == "auto"  # which the format would leave no room for
        require(not (self.formed and calls), "response_format", "not together with tools, but with tool_choice 'none'")
        names = [tool.function.name for tool in self.tools]
        require(len(set(names)) == len(names), "tools", "each function needs a name of its own")
        if isinstance(self.tool_choice, NamedTool):
            require(
                self.tool_choice.function.name in names, "tool_choice", "names a function that is not among the tools"
            )


# --- the others


class TokenizeRequest(_Chat):
    """The body of POST /tokenize: a prompt, or messages as the chat template writes them."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] = ()  # with messages
    add_special_tokens: Flag | None = None  # where they are not named: as /v1/completions, /v1/chat/completions do
    return_token_strs: Flag = False

    def check(self) -> None:
        """What fields say together. Raises InvalidRequest."""
        require((self.prompt is None) != (self.messages is None), "prompt", "give either a prompt or messages")


class DetokenizeRequest(NullsAreAbsent):
    """The body of POST /detokenize."""

    model: Text | None = None
    tokens: Many[Int]
