"""Prompts as they are typed or lie in files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.errors import ConfigError, TokensInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKEN = (1 << 32) - 1


def read_prompt(tokens: str, tokens_file: str, text: str, tokenizer: str) -> Sequence[int]:
    """Token ids from whichever one was given."""
    given = [
        name
        for name, value in (("--tokens", tokens), ("--tokens-file", tokens_file), ("--text", text))
        if value
    ]
    if len(given) != 1:
        told = "and not by " + " and ".join(given) if given else "of which none was given"
        raise ConfigError(
            f"Name the prompt by one of --tokens, --tokens-file and --text, {told}.", setting="tokens"
        )
    if text:
        return tokenize(text, tokenizer)
    return parse_tokens(read_text(tokens_file) if tokens_file else tokens, given[0])


def read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tokens-file {path} cannot be read: {error}.", setting="tokens_file") from error


def parse_tokens(text: str, origin: str) -> list[int]:
    """A JSON list, or numbers separated by commas, spaces or lines."""
    text = text.strip()
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise TokensInvalid(f"{origin} is not a JSON list: {error}.") from error
    else:
        found = [part for part in re.split(r"[\s,]+", text) if part]
    return [_token(value, position, origin) for position, value in enumerate(found)]


def _token(value: Any, position: int, origin: str) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKEN:
        raise TokensInvalid(
            f"{origin}: {value!r} at position {position} is no token id (0 to 2^32-1).", position=position
        )
    return value


def tokenize(text: str, tokenizer: str) -> list[int]:
    if not tokenizer:
        raise ConfigError(
            "--text needs --tokenizer: the model's folder or its tokenizer.json.", setting="text"
        )
    file = Path(tokenizer)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--tokenizer {tokenizer}: there is no tokenizer.json.", setting="tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "--text needs the package tokenizers: pip install tokenizers", setting="text"
        ) from error
    ids: list[int] = Tokenizer.from_file(str(file)).encode(text).ids
    return ids
