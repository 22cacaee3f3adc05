"""What messages, and tools with a choice of them, become, as a caller writes them."""

from typing import Any

from attend.service.chat.forms import AnswerFormat
from attend.service.chat.tools import Calling
from attend.service.contract import conversation
from attend.service.contract.requests import ChatRequest
from attend.service.remarks import Remarks


def messages_of(messages: list[Any], remarks: Remarks | None = None) -> list[dict[str, Any]]:
    """The messages of a chat as templates take them."""
    remarks = Remarks(strict=True) if remarks is None else remarks
    return conversation.messages_of(ChatRequest.read({"messages": messages}, remarks).messages, remarks)


def calling_of(tools: Any, choice: Any, parallel: Any, form: AnswerFormat, remarks: Remarks | None = None) -> Calling:
    """The tools of a chat, and how they may be called."""
    remarks = Remarks(strict=True) if remarks is None else remarks
    given = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = ChatRequest.read({"messages": [{"role": "user", "content": "a"}]} | given, remarks)
    return conversation.calling_of(body.tools, body.tool_choice, body.parallel_tool_calls, form, remarks)
