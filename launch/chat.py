"""Messages as token ids, in the official chat and thinking forms."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.checkpoint.tokenizer import BOS, EOS
from .tokenizer import TextTokenizer

USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
THINK, END_THINK = "<think>", "</think>"
ROLES = ("system", "user", "developer", "assistant")
FORMS = ("chat", "thinking")


@dataclass(frozen=True)
class Message:
    """One turn. reasoning: what an assistant thought before its content."""

    role: str
    content: str
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}, allowed: {', '.join(ROLES)}")
        if self.reasoning and self.role != "assistant":
            raise ValueError(f"reasoning is given for role {self.role!r}, allowed: only for assistant")


@dataclass(frozen=True)
class Special:
    """A special token by its official name."""

    name: str


Part = str | Special


def encode_chat(
    messages: Sequence[Message], tokenizer: TextTokenizer, form: str = "chat", *, keep_reasoning: bool = False
) -> list[int]:
    """The ids of a conversation, ready for the assistant's turn if its last message is a user's.

    Text never becomes a special token. keep_reasoning keeps reasoning before the last user turn. ValueError names
    special tokens that the tokenizer lacks.
    """
    parts = render(messages, form, keep_reasoning=keep_reasoning)
    names = dict.fromkeys(part.name for part in parts if isinstance(part, Special))
    ids = {name: tokenizer.special_id(name) for name in names}
    missing = [name for name, token_id in ids.items() if token_id is None]
    if missing:
        raise ValueError(f"{tokenizer.source} lacks {', '.join(missing)}, which chat needs; prompt without chat")
    out: list[int] = []
    for part in parts:
        if isinstance(part, Special):
            token_id = ids[part.name]
            assert token_id is not None
            out.append(token_id)
        else:
            out += tokenizer.encode(part)
    return out


def render(messages: Sequence[Message], form: str = "chat", *, keep_reasoning: bool = False) -> list[Part]:
    """The conversation as text and special tokens; neighbouring texts are one, no blank is added."""
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, allowed: {', '.join(FORMS)}")
    if not messages:
        raise ValueError("there are no messages, allowed: one or more")
    last_user = max((i for i, m in enumerate(messages) if _asks(m)), default=-1)
    parts: list[Part] = [Special(BOS)]
    for i, message in enumerate(messages):
        kept = form == "thinking" and (keep_reasoning or i >= last_user)
        if message.role == "system":
            parts.append(message.content)
        elif _asks(message):
            parts += [Special(USER), message.content]
            if i + 1 == len(messages) or messages[i + 1].role == "assistant":
                parts += [Special(ASSISTANT), Special(THINK if kept else END_THINK)]
        else:
            # The turn's <think> stands after the user's text already.
            parts += [message.reasoning, Special(END_THINK)] if kept else []
            parts += [message.content, Special(EOS)]
    return _joined(parts)


def _asks(message: Message) -> bool:
    return message.role in ("user", "developer")


def _joined(parts: Sequence[Part]) -> list[Part]:
    out: list[Part] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part != "":
            out.append(part)
    return out
