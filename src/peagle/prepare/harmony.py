"""GPT-OSS's answers: channels in one text, of which a client sends back the final one alone.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

All of it is generated, and so is supervised; what the next prompt holds of it is another matter.
"""

from __future__ import annotations

import re

CHANNEL = "<|channel|>"
# A channel's name may be followed by a recipient: `commentary to=functions.weather`.
_MESSAGES = re.compile(
    r"<\|channel\|>(?P<channel>\w+)(?P<recipient>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?P<end><\|end\|>|<\|return\|>|<\|call\|>|$)",
    re.DOTALL,
)


def speaks_harmony(chat_template: str | None) -> bool:
    return chat_template is not None and CHANNEL in chat_template


def final_text(text: str) -> str | None:
    """The final channel of an answer, whose special tokens are still in its text.

    None where there is none: it was cut while thinking, or it calls a tool, whose answer nobody
    has. Then a client has nothing to go on with.
    """
    messages = list(_MESSAGES.finditer(text))
    if not messages or messages[-1]["end"] == "<|call|>":
        return None
    final = [message["text"] for message in messages if message["channel"] == "final"]
    return final[-1] if final else None
