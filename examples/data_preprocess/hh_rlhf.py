"""Anthropic's HH-RLHF for reward models: both conversations as chats (main_rm with data.prompt_key=null).

    python examples/data_preprocess/hh_rlhf.py --out data/hh_rlhf [--source FOLDER_OR_HUB_NAME]

Conversations that do not end with the assistant are left out, and counted.
"""

from __future__ import annotations

import re
import sys

from common import Row, arguments, load, write

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def chat_of(text: str) -> list[dict[str, str]]:
    """A transcript with ``Human:`` and ``Assistant:`` turns as messages; turns of one speaker in a row are one."""
    parts = _TURN.split(text)
    messages: list[dict[str, str]] = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        role = _ROLES[speaker]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n\n" + content.strip()
        else:
            messages.append({"role": role, "content": content.strip()})
    return messages


def row_of(row: Row, index: int) -> Row | None:
    """Chosen and rejected as chats."""
    sides = {side: chat_of(row[side]) for side in ("chosen", "rejected")}
    whole = all(chat and chat[0]["role"] == "user" and chat[-1]["role"] == "assistant" for chat in sides.values())
    if not whole or sides["chosen"] == sides["rejected"]:
        return None
    return {**sides, "data_source": "Anthropic/hh-rlhf", "extra_info": {"index": index}}


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__, "Anthropic/hh-rlhf").parse_args(argv)
    for split in ("train", "test"):
        write(split, load(args.source, None, split, args.limit), row_of, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
