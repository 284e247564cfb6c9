"""The default way of writing tools, in which conversations are given to chat templates that write none.

The system's message describes the functions, calls stand between <tool_call> and </tool_call> in what the assistant
said, and results between <tool_response> and </tool_response> in a message of the user: the marks are those of Hermes
and Qwen, by which calls are found in answers too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS = """You can call functions. Each line between <tools> and </tools> describes a function in JSON:
<tools>
{}
</tools>
To call a function, write its name and its arguments as a JSON object, in this form:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages that say as texts what tools there are, how they were called, and what they answered."""
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    found: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        after_result, is_result = is_result, message["role"] == "tool"
        content, calls = message.get("content"), message.get("tool_calls")
        if is_result:
            joined = _joined("<tool_response>\n", content, "\n</tool_response>")
            if after_result:  # templates may want user and assistant in turn
                found[-1]["content"] = _joined(found[-1]["content"], "\n", joined)
            else:
                found.append({"role": "user", "content": joined})
        elif isinstance(calls, list) and calls:
            written = "\n".join(f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in calls)
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**rest, "content": _joined(content, "\n" if content else "", written)})
        else:
            found.append(dict(message))
    told = _TOOLS.format("\n".join(_json(_without_nulls(tool)) for tool in tools))
    if found[0]["role"] in ("system", "developer"):
        content = found[0].get("content")
        found[0]["content"] = _joined(content, "\n\n" if content else "", told)
    else:
        found.insert(0, {"role": "system", "content": [{"type": "text", "text": told}] if in_parts else told})
    return found


def _call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return function
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


def _without_nulls(tool: Any) -> Any:
    """Returns a tool without what its function leaves out."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if value is not None}}


def _joined(*contents: Any) -> Any:
    """Returns contents as one: a text, or where there are parts among them a list of parts."""
    texts = [_json(one) if isinstance(one, Mapping) else one or "" for one in contents]
    if not any(isinstance(one, list) for one in texts):
        return "".join(texts)
    parts = [one if isinstance(one, list) else [{"type": "text", "text": one}] for one in texts if one]
    return [part for some in parts for part in some]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
