"""Who must not be served from whose KV, and who must."""

from __future__ import annotations

from e2e.harness import Answer, engine, prompt


def test_bl55_tenants_do_not_share(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    cached = []
    with engine("llama", server) as running:
        for salt in ("t1", "t2", None, "t1", "t2", None):
            (answer,) = running.run(tokens, salt=salt)
            assert answer.tokens == right
            cached.append(answer.cached)
    assert cached == [0, 0, 0, 192, 192, 192]
    with engine("llama", server) as other:
        assert [other.run(tokens, salt=salt)[0].cached for salt in ("t1", "t3")] == [192, 0]
    assert "t1" not in server.log()


def test_engines_that_keep_other_bytes_do_not_share(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as first:
        first.run(tokens)
    with engine("llama", server, block_size=64) as second:
        (answer,) = second.run(tokens)
    assert (answer.tokens, answer.cached) == (right, 0)
    with engine("llama", server) as third:
        assert third.run(tokens)[0].cached == 192


def test_two_models_in_one_server(server, baseline):
    tokens = prompt(200)
    for model in ("llama", "gemma3"):
        with engine(model, server) as running:
            assert running.run(tokens)[0].cached == 0
    for model in ("llama", "gemma3"):
        (right,) = baseline(model, tokens)
        with engine(model, server) as running:
            assert running.run(tokens) == [Answer(right, 192, "length")]
