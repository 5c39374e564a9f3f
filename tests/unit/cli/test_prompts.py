from __future__ import annotations

import io
import json

import pytest

from kvwire.cli.commands import prompts
from kvwire.errors import ConfigError, TokensInvalid


def test_tokens_as_typed():
    assert prompts.read_prompt("1, 2,4294967295", "", "", "") == [1, 2, 4294967295]
    assert prompts.parse_tokens("[5, 6]", "--tokens") == [5, 6]
    assert prompts.parse_tokens("7 8\n9\t10,", "--tokens") == [7, 8, 9, 10]


def test_tokens_from_a_file_and_from_stdin(tmp_path, monkeypatch):
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(list(range(300))))
    assert prompts.read_prompt("", str(file), "", "") == list(range(300))
    monkeypatch.setattr("sys.stdin", io.StringIO("3 2 1"))
    assert prompts.read_prompt("", "-", "", "") == [3, 2, 1]
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts.read_prompt("", str(tmp_path), "", "")


@pytest.mark.parametrize("text", ["1,x", "4294967296", "[1, 2.5]", "[true]", "[1", '{"a": 1}', "1.0"])
def test_what_is_no_token(text):
    with pytest.raises(TokensInvalid):
        prompts.parse_tokens(text, "--tokens")


def test_text_is_tokenized_by_the_models_own_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"once": 0, "upon": 1, "[UNK]": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert prompts.read_prompt("", "", "once upon once", str(tmp_path)) == [0, 1, 0]
    assert prompts.read_prompt("", "", "upon", str(tmp_path / "tokenizer.json")) == [1]
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        prompts.read_prompt("", "", "upon", str(tmp_path / "elsewhere"))
