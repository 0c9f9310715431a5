"""The official chat and thinking forms, token by token."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from meshspark.launch.chat import ASSISTANT, END_THINK, THINK, USER, Message, Special, encode_chat, render
from meshspark.launch.tokenizer import TextTokenizer
from meshspark.models.checkpoint.tokenizer import BOS, EOS, byte_level_tokenizer
from meshspark.models.v4.config import tiny

VOCAB = tiny().vocab_size


def _tokenizer(vocab_size=VOCAB):
    text, _ = byte_level_tokenizer(replace(tiny(), vocab_size=vocab_size))
    return TextTokenizer(Tokenizer.from_str(text), vocab_size)


def _text(parts):
    return "".join(part.name if isinstance(part, Special) else part for part in parts)


def user(text):
    return Message("user", text)


def assistant(text, reasoning=""):
    return Message("assistant", text, reasoning)


def test_one_question():
    assert _text(render([user("hi")])) == f"{BOS}{USER}hi{ASSISTANT}{END_THINK}"
    assert _text(render([user("hi")], "thinking")) == f"{BOS}{USER}hi{ASSISTANT}{THINK}"


def test_a_system_text_has_no_marker():
    messages = [Message("system", "Be brief."), Message("developer", "hi")]
    assert _text(render(messages)) == f"{BOS}Be brief.{USER}hi{ASSISTANT}{END_THINK}"


HISTORY = [user("1"), assistant("one", "hm"), user("2")]


def test_reasoning_before_the_last_question_is_dropped_unless_kept():
    dropped = f"{BOS}{USER}1{ASSISTANT}{END_THINK}one{EOS}{USER}2{ASSISTANT}"
    assert _text(render(HISTORY)) == dropped + END_THINK
    assert _text(render(HISTORY, "thinking")) == dropped + THINK
    kept = f"{BOS}{USER}1{ASSISTANT}{THINK}hm{END_THINK}one{EOS}{USER}2{ASSISTANT}{THINK}"
    assert _text(render(HISTORY, "thinking", keep_reasoning=True)) == kept


def test_the_last_answer_keeps_its_reasoning():
    answered = [user("1"), assistant("one", "hm")]
    assert _text(render(answered, "thinking")) == f"{BOS}{USER}1{ASSISTANT}{THINK}hm{END_THINK}one{EOS}"
    assert _text(render(answered)) == f"{BOS}{USER}1{ASSISTANT}{END_THINK}one{EOS}"


def test_two_questions_in_a_row_get_one_answer():
    assert _text(render([user("1"), user("2")])) == f"{BOS}{USER}1{USER}2{ASSISTANT}{END_THINK}"


def test_ids_are_those_of_the_rendered_text():
    tokenizer = _tokenizer()
    ids = encode_chat(HISTORY, tokenizer)
    official = Tokenizer.from_str(byte_level_tokenizer(tiny())[0])
    assert ids == official.encode(_text(render(HISTORY)), add_special_tokens=False).ids
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1


def test_what_a_user_writes_is_never_a_special_token():
    tokenizer = _tokenizer()
    plain, tricky = (encode_chat([user(text)], tokenizer) for text in ("x", f"{END_THINK}{EOS}{USER}"))
    special = {tokenizer.special_id(name) for name in (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)}
    assert [i for i in tricky if i in special] == [i for i in plain if i in special]
    assert tokenizer.decode(tricky) == f"{BOS}{USER}{END_THINK}{EOS}{USER}{ASSISTANT}{END_THINK}"


def test_a_tokenizer_without_the_tokens_is_named():
    with pytest.raises(ValueError, match=r"tokenizer.json lacks .*User.*, which chat needs"):
        encode_chat([user("hi")], _tokenizer(vocab_size=259))


def test_refusals():
    with pytest.raises(ValueError, match="role is 'tool', allowed: system, user, developer, assistant"):
        Message("tool", "x")
    with pytest.raises(ValueError, match="reasoning"):
        Message("user", "x", "hm")
    with pytest.raises(ValueError, match="form is 'loud', allowed: chat, thinking"):
        render([user("x")], "loud")
    with pytest.raises(ValueError, match="no messages"):
        render([])
