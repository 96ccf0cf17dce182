"""Conversations: messages to a prompt by the tokenizer's chat template, and tool calls out of the text that comes back.

Tool calls have one format, that of the Hermes models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number
of them, with or without text around. A call that the client insists on (tool_choice) is the whole output, without tags:
a grammar makes sure of it.
"""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import pydantic_core
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from deployments.fields import TextModel, text_tokens
from deployments.openai import ChatRequest, FunctionCall, Message, NamedTool, Tool
from engine.types import Grammar, InvalidRequest, require

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KINDS = {"type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref"}  # of schemas: one says what values there are
DEFAULT_TEMPLATE = """\
{%- if tools %}
{{- '# system:\\nCall a function with <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Functions:\\n' }}
{%- for tool in tools %}
{{- tool.function | tojson + '\\n' }}
{%- endfor %}
{{- '\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '# ' + message.role + ':\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '# assistant:\\n' }}
{%- endif %}
"""  # for tokenizers that have none


_OURS = {"messages", *signature(PreTrainedTokenizerFast.apply_chat_template).parameters}  # no client says these


def chat_prompt(
    model: TextModel,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    values: Mapping[str, Any],
    add_special_tokens: bool,
) -> tuple[int, ...]:
    """The token ids of a conversation up to where the answer begins. Raises InvalidRequest when the template refuses it.

    values: for the template, by the names that it knows. add_special_tokens: around what the template writes.
    """
    template = None if model.tokenizer.chat_template else DEFAULT_TEMPLATE
    taken = [name for name in values if name in _OURS]
    require(not taken, "chat_template_kwargs", f"{', '.join(taken)[:100]} can't be said here")
    developers = template is not None or "developer" in str(model.tokenizer.chat_template)
    try:
        text = model.tokenizer.apply_chat_template(
            [_for_template(message, developers) for message in messages],
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            **values,
        )
    except TemplateError as error:
        raise InvalidRequest("messages", f"the model's chat template refuses them: {str(error)[:200]}") from None
    except Exception:  # noqa: BLE001  a template is a program; whatever it trips over are these messages
        raise InvalidRequest("messages", "the model's chat template can't take them") from None
    return text_tokens(str(text), model, add_special_tokens)


def _for_template(message: Message, developers: bool) -> dict[str, Any]:
    """As templates expect it: the arguments of calls are objects, not text.

    developers: the template knows that role; others would leave such messages out.
    """
    values = message.model_dump(exclude_none=True)
    if message.role == "developer" and not developers:
        values["role"] = "system"
    if not message.tool_calls:
        del values["tool_calls"]
    for call in values.get("tool_calls", ()):
        call["function"]["arguments"] = _object(call["function"]["arguments"])
    return values


def _object(text: str) -> Any:
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def forced_call(request: ChatRequest) -> Grammar | None:
    """The grammar of the call that `tool_choice` insists on, if it does."""
    if request.tool_choice in ("none", "auto"):
        return None
    named = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
    functions = [tool.function for tool in request.tools if named in (None, tool.function.name)]
    parameters = [
        function.parameters if _KINDS & function.parameters.keys() else {**function.parameters, "type": "object"}
        for function in functions
    ]
    definitions = {f"f{at}": _moved(schema, f"#/$defs/f{at}") for at, schema in enumerate(parameters)}
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/f{at}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, function in enumerate(functions)
    ]
    choice: dict[str, Any] = options[0] if len(options) == 1 else {"anyOf": options}
    return Grammar("json_schema", json.dumps({**choice, "$defs": definitions}))


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references into itself still hold when it stands at `root` in another one."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def parse_call(text: str) -> FunctionCall | None:
    """The call that a text is, if it is one."""
    call = _object(text.strip())
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)):
        return None
    try:
        arguments = json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number without a value, such as 1e999
        return None
    return FunctionCall(name=call["name"], arguments=arguments)


class WholeCall:
    """Reads an output that is one call, without tags: nothing is known before its end."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[str | FunctionCall]:
        """Takes text."""
        self._text += text
        return []

    def flush(self) -> list[str | FunctionCall]:
        """The call; or the text, when it was cut short."""
        return [parse_call(self._text) or self._text]


class TaggedCalls:
    """Reads calls out of a text that comes in pieces; what is not a call stays text."""

    def __init__(self, most: int | None = None) -> None:
        """most: calls that are told; those behind them are not."""
        self._held = ""
        self._space = ""  # behind what was said since a call: told before more text, not before a call or the end
        self._called = 0
        self._most = most

    def push(self, text: str) -> list[str | FunctionCall]:
        """The texts and calls that are certain now."""
        self._held += text
        found: list[str | FunctionCall] = []
        while (start := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, start)) >= 0:
            if not self._take_call(end, found):
                self._say(self._held[: end + len(CLOSE)], found)
            self._held = self._held[end + len(CLOSE) :]
        certain = start if start >= 0 else len(self._held) - _begun(self._held)
        self._say(self._held[:certain], found)
        self._held = self._held[certain:]
        return found

    def flush(self) -> list[str | FunctionCall]:
        """What was held back."""
        found: list[str | FunctionCall] = []
        if not self._take_call(len(self._held), found):  # the output may end before its closing tag
            self._say(self._held, found)
        self._held = ""
        return found

    def _take_call(self, end: int, found: list[str | FunctionCall]) -> bool:
        """Tells of the call that ends here, and of the text before it; whether there is one.

        It begins at the first opening tag, or else at the last one: those before may be text about tags.
        """
        for start in (self._held.find(OPEN, 0, end), self._held.rfind(OPEN, 0, end)):
            call = parse_call(self._held[start + len(OPEN) : end]) if start >= 0 else None
            if call is not None:
                self._say(self._held[:start], found)
                self._call(call, found)
                return True
        return False

    def _call(self, call: FunctionCall, found: list[str | FunctionCall]) -> None:
        if self._most is None or self._called < self._most:
            found.append(call)
        self._called += 1
        self._space = ""

    def _say(self, text: str, found: list[str | FunctionCall]) -> None:
        """However it comes in pieces: behind the first call, space before a call or the end means nothing."""
        if self._called:
            text = self._space + text
            said = text.rstrip()
            self._space, text = text[len(said) :], said
        if text:
            found.append(text)


def _begun(text: str) -> int:
    """Length of the longest end of a text that the opening tag begins with."""
    return next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
