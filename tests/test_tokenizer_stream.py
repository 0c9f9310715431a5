"""Text that comes token by token: whole characters only, stop strings never shown, equal to decoding at once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.launch.tokenizer import TextStream, TextTokenizer
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.tokenizer import BOS, EOS, byte_level_tokenizer
from meshspark.models.v4.config import tiny

VOCAB = tiny().vocab_size


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return _write(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer(tiny())[0])


def _write(folder, text):
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return TextTokenizer.load(folder, VOCAB)


def _stream(tokenizer, ids, stops=()):
    """Pieces by token, the rest, and the stream."""
    stream = TextStream(tokenizer, stops)
    pieces = [stream.push(i) for i in ids]
    return pieces, stream.finish(), stream


def test_a_character_appears_when_its_last_byte_does(tokenizer):
    pieces, rest, _ = _stream(tokenizer, tokenizer.encode("a\u20acb\U0001f600"))
    assert (pieces, rest) == (["a", "", "", "\u20ac", "b", "", "", "", "\U0001f600"], "")


def test_half_a_character_at_the_end_is_replaced(tokenizer):
    pieces, rest, stream = _stream(tokenizer, tokenizer.encode("x\u20ac")[:-1])
    assert (pieces, rest, stream.text) == (["x", "", ""], "\ufffd", "x\ufffd")


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_the_stream_is_what_the_tokenizer_decodes(tokenizer, ids):
    pieces, rest, stream = _stream(tokenizer, ids)
    whole = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) + rest == stream.text == tokenizer.decode(ids) == whole


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab\n", max_size=20), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_and_never_shows_a_part_of_it(tokenizer, text, stops):
    pieces, rest, stream = _stream(tokenizer, tokenizer.encode(text), stops)
    at = [text.find(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(at)
    assert "".join(pieces) + rest == stream.text
    # A shorter stop that ends earlier is seen first, though a longer one began before it.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    assert stream.text == (text[: min(first)] if at else text)


def test_what_may_begin_a_stop_is_held_back_and_given_when_it_does_not(tokenizer):
    pieces, rest, _ = _stream(tokenizer, tokenizer.encode("1\n\n2\n"), ["\n\n\n"])
    assert (pieces, rest) == (["1", "", "", "\n\n2", ""], "\n")


def test_a_stop_may_lie_across_tokens_and_characters(tokenizer):
    _, rest, stream = _stream(tokenizer, tokenizer.encode("say \u20ac\u20ac now"), ["\u20ac n"])
    assert (stream.text, rest, stream.stopped) == ("say \u20ac", "", True)


def test_an_empty_stop_is_refused(tokenizer):
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, [""])


def test_names_of_special_tokens_in_text_are_text(tokenizer):
    ids = tokenizer.encode(f"a{BOS}</think>")
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_id("</think>")} & set(ids)
    assert tokenizer.decode(ids) == f"a{BOS}</think>"


def test_special_ids_by_official_name(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode([0, 1]) == BOS + EOS
    assert tokenizer.special_id("<nothing>") is None


def test_a_file_that_is_no_byte_level_tokenizer_of_this_model_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such file"):
        TextTokenizer.load(tmp_path, VOCAB)
    good = byte_level_tokenizer(tiny())[0]
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        _write(tmp_path, good[:-9])
    with pytest.raises(CheckpointError, match="decoder is 'WordPiece', allowed: 'ByteLevel'"):
        _write(
            tmp_path, json.dumps({**json.loads(good), "decoder": {"type": "WordPiece", "prefix": "", "cleanup": True}})
        )
    _write(tmp_path, good)
    with pytest.raises(CheckpointError, match="beyond the vocabulary, allowed: 0 to 99"):
        TextTokenizer.load(tmp_path, 100)
    monkeypatch.setattr("meshspark.launch.tokenizer.TOKENIZER_LIMIT", 1000)
    with pytest.raises(CheckpointError, match="bytes, allowed: at most 1000"):
        TextTokenizer.load(tmp_path, VOCAB)
