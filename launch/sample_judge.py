"""How good the bundled sample's text is: prompts from held-out files, a verdict of Python's own tokenizer."""

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from ..models.v4.model import Model
from .engine import Engine, SamplingParams

PROMPT_LINES = 6
CUT_MESSAGES = ("EOF in multi-line", "unterminated triple-quoted")
"""What the tokenizer says of a bracket or a long string that is still open where the text ends."""


@dataclass(frozen=True)
class Continuation:
    """A prompt, what the model wrote behind it, its ids, and the verdict on both together."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    verdict: str


def judge(text: str) -> str:
    """'whole', 'cut' or 'fault': what Python's tokenizer makes of the text up to its last complete line.

    'cut': nothing is wrong but a bracket or a triple-quoted string is open at the end.
    """
    complete = text[: text.rfind("\n") + 1]
    try:
        for token in tokenize.generate_tokens(io.StringIO(complete).readline):
            # Up to Python 3.11 a stray quote or character is a token of its own, later an exception.
            if token.type == tokenize.ERRORTOKEN and not token.string.isspace():
                return "fault"
    except tokenize.TokenError as error:
        return "cut" if any(message in str(error) for message in CUT_MESSAGES) else "fault"
    except SyntaxError:
        return "fault"
    return "whole"


def definition_prompts(texts: Sequence[str], count: int) -> list[tuple[str, str]]:
    """`count` first lines of functions and classes at the left margin, and what follows them in their text.

    Evenly spaced over all there are. A prompt has at most PROMPT_LINES lines and ends where no bracket or string is
    open.
    """
    found = []
    for text in texts:
        lines = text.splitlines(keepends=True)
        for start, line in enumerate(lines):
            if line.startswith(("def ", "class ")):
                cuts = ("".join(lines[start : start + n]) for n in range(PROMPT_LINES, 0, -1))
                heads = [head for head in cuts if judge(head) == "whole"][:1]
                found += [(head, "".join(lines[start:])[len(head) :]) for head in heads]
    if len(found) < count:
        raise ValueError(f"texts have {len(found)} definitions, allowed: at least the {count} prompts asked for")
    return [found[i * len(found) // count] for i in range(count)]


def write_continuations(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    slots: int = 25,
) -> list[tuple[int, ...]]:
    """The ids that the model writes behind each prompt, without the end token; the prompt's number is its seed."""
    longest = max(len(prompt) for prompt in prompts)
    engine = Engine(model, requests=slots, max_context=longest + max_new_tokens)
    eos = model.config.eos_token_id
    written: dict[int, list[int]] = {}
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, eos_id=eos)
        written[engine.add_request(prompt, params)] = []
    while engine.active:
        for event in engine.step():
            written[event.request_id] += event.token_ids
    engine.close()
    return [tuple(ids) for ids in written.values()]


def distinct_share(sequences: Sequence[Sequence[int]], n: int = 4) -> float:
    """Different n-grams over all n-grams of all sequences; 1 where there is none."""
    grams = [tuple(ids[i : i + n]) for ids in sequences for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
