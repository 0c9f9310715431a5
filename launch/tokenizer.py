"""Text to ids and back: a checkpoint's tokenizer.json, and text that appears token by token."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ..models.checkpoint.reader import CheckpointError
from ..models.checkpoint.tokenizer import BOS, EOS
from ..models.checkpoint.verify import TOKENIZER_LIMIT, TOKENIZER_NAME


class TextTokenizer:
    """A byte-level tokenizer whose ids all lie below the model's vocabulary size."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, source: str = TOKENIZER_NAME) -> None:
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        highest = max(vocab.values(), default=-1)
        if highest >= vocab_size:
            raise CheckpointError(f"{source}: id {highest} is beyond the vocabulary, allowed: 0 to {vocab_size - 1}")
        # Otherwise the words <think> in a prompt would become the token of that name.
        tokenizer.encode_special_tokens = True
        self.tokenizer, self.source = tokenizer, source
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> "TextTokenizer":
        """The folder's tokenizer.json. CheckpointError if it is missing, too large, unreadable or not byte-level."""
        path = directory / TOKENIZER_NAME
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file, and text needs a tokenizer")
        size = path.stat().st_size
        if size > TOKENIZER_LIMIT:
            raise CheckpointError(f"{path} has {size} bytes, allowed: at most {TOKENIZER_LIMIT}")
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            decoder = json.loads(text).get("decoder")
            tokenizer = Tokenizer.from_str(text)
        except Exception as problem:  # tokenizers raises plain Exception
            raise CheckpointError(f"{path} is no tokenizer: {problem}") from problem
        if not _is_byte_level(decoder):
            kind = decoder.get("type") if isinstance(decoder, dict) else decoder
            raise CheckpointError(f"{path}: decoder is {kind!r}, allowed: 'ByteLevel'")
        return cls(tokenizer, vocab_size, str(path))

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; a special token's name in it is text too."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def special_id(self, name: str) -> int | None:
        """The id of a token by its official name, None where the tokenizer lacks it."""
        found: int | None = self.tokenizer.token_to_id(name)
        return found

    @property
    def bos_id(self) -> int | None:
        return self.special_id(BOS)

    @property
    def eos_id(self) -> int | None:
        return self.special_id(EOS)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; empty for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self.tokenizer.id_to_token(token_id)
        return b"" if token is None else b"".join(_BYTES.get(c, c.encode()) for c in token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by name; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class TextStream:
    """The text of one sequence as its tokens come.

    Never gives half a character, nor text that may yet turn out to be part of a stop string. `text` is all that
    was given so far; once `stopped`, it ends before the first stop string and nothing more comes.
    """

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty, allowed: at least one character")
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take a token; the text that may be shown now."""
        return "" if self.stopped else self._take(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """No token comes any more; the rest of the text."""
        if self.stopped:
            return ""
        shown = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + self._give(rest if not self.stopped else "")

    def _take(self, text: str) -> str:
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._held, self.stopped = self._held[: min(found)], "", True
            return self._give(shown)
        keep = self._open_stop()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._give(shown)

    def _open_stop(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for keep in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-keep:]
            if any(stop.startswith(end) for stop in self._stops):
                return keep
        return 0

    def _give(self, text: str) -> str:
        self.text += text
        return text


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)


def _byte_table() -> dict[str, int]:
    """Byte-level alphabet: visible Latin-1 bytes stand for themselves, the others follow from code point 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = {character: bytes([byte]) for character, byte in _byte_table().items()}
