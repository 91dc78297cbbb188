"""The tokenizer and the chat rule that a configuration's ``data`` asks for."""

from typing import Any

from podium.utils.dataset_text import ChatOptions, use_chat_template
from podium.utils.tokenizer import load_tokenizer


def load_chat_tokenizer(path: str, data: Any, trust_remote_code: bool, key: str) -> Any:
    """The model's tokenizer, with the template of ``data.chat_template`` where that is set.

    Raises:
        UserError: no tokenizer, or no template, is there.
    """
    tokenizer = load_tokenizer(path, trust_remote_code, key=key)
    use_chat_template(tokenizer, data.chat_template, "data.chat_template")
    return tokenizer


def chat_options(data: Any) -> ChatOptions:
    """How ``data`` has chats rendered."""
    return ChatOptions(data.apply_chat_template_kwargs, data.system_prompt)
