"""The text of a config.pbtxt: what Triton 2.51 takes is taken, what it refuses is refused."""

import pytest

from gpubridge.config import parse_model_config
from gpubridge.errors import BridgeError


def value_of(text: str | bytes) -> str:
    """Return the value of a parameter given as a string literal."""
    literal = text if isinstance(text, bytes) else text.encode()
    content = b'parameters { key: "a" value { string_value: ' + literal + b" } }"
    return str(parse_model_config(content, "text").parameters["a"].string_value)


def dims_of(text: str) -> list[int]:
    return list(parse_model_config(f"input {{ dims:{text} }}", "text").input[0].dims)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r'"\?\a\x41\101\u0041\"\'"', "?\aAAA\"'"),
        (r'"\x414"', "A4"),
        (r'"\4012"', "\x012"),
        (r'"\U0001F600"', "\U0001f600"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\xc3\xa9"', "é"),
        ("\"a\" 'b'", "ab"),
        ('"café # no comment"', "café # no comment"),
    ],
)
def test_strings(literal: str, value: str) -> None:
    assert value_of(literal) == value


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r'"\d"', r"1:46: expected an escape sequence, got \\d"),
        (r'"\x"', "expected an escape sequence"),
        (r'"\X41"', "expected an escape sequence"),
        (r'"\N{DIGIT ONE}"', "expected an escape sequence"),
        (r'"\ud83d"', "expected UTF-8, got the byte 0xed"),
        (b'"caf\xe9"', "expected UTF-8, got the byte 0xe9"),
        ('"a\nb"', "expected a string that ends in its line"),
    ],
)
def test_strings_that_are_refused(literal: str | bytes, text: str) -> None:
    with pytest.raises(BridgeError, match=text):
        value_of(literal)


@pytest.mark.parametrize(
    ("text", "dims"),
    [("[ - 1 ]", [-1]), ("[ -\n# x\n1 ]", [-1]), (" 0x10", [16]), (" 010", [8]), ("\f[\v1 ]", [1])],
)
def test_numbers_and_blanks(text: str, dims: list[int]) -> None:
    assert dims_of(text) == dims


@pytest.mark.parametrize(
    "text",
    [
        *("[ +8 ]", "[ 8_0 ]", "[ 0o10 ]", "[ 0b10 ]", "[ 08 ]", "[ --1 ]", "8optional: true"),
        *("\u00a0[ 1 ]", "\u2003[ 1 ]", "\x1c[ 1 ]", "[ 1 ] # \0", "[ 1 ] \x01", "[ 1, ]"),
    ],
)
def test_numbers_and_blanks_that_are_refused(text: str) -> None:
    with pytest.raises(BridgeError, match=r"failed to read text proto from text: \d+:\d+"):
        dims_of(text)


def test_a_comment_may_have_any_bytes() -> None:
    assert parse_model_config(b'backend: "x" # caf\xe9\n#\xff', "text").backend == "x"


def test_a_byte_order_mark_is_refused_with_its_place() -> None:
    with pytest.raises(BridgeError, match="text: 1:1: expected ASCII"):
        parse_model_config("\ufeffname: 'x'", "text")


def test_an_error_names_the_place_in_the_file() -> None:
    with pytest.raises(BridgeError, match="from text: 3:19 "):
        parse_model_config('# café "\nbackend: "\\303\\251"\n  max_batch_size: "x"', "text")
