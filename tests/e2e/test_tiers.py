"""An engine at a server with a folder below its memory: the folder outlives the server."""

from __future__ import annotations

from e2e.harness import FOUND, SHELF, Answer, engine
from support.waiting import eventually


def test_bl55_an_engine_finds_in_the_folder_what_was_there_before_a_kill(serve, baseline, tmp_path):
    """kill -9 and a new start: the same text out of files; and of another tenant nothing."""
    prompts, salted = SHELF[:4], SHELF[4]
    right = baseline("gemma3", *prompts, salted)
    server = serve("--l2", f"file://{tmp_path}?size=64MiB", "--server-id", "one", "--prefetch-deadline=10")
    with engine("gemma3", server) as first:
        assert [answer.cached for answer in first.run(*prompts)] == [0] * 4
        assert first.run(salted, salt="t1")[0].cached == 0
    eventually(lambda: written(server) >= server.status().memory.objects > 0)
    server.kill()
    server.start()
    assert server.status().memory.used_bytes == 0
    with engine("gemma3", server) as second:
        answers = second.run(*prompts)
        assert [answer.tokens for answer in answers] == right[:4]
        assert [answer.cached for answer in answers] == FOUND
        assert server.status().counters.l2_hit_tokens == sum(FOUND)
        tenants = [second.run(salted, salt=salt)[0] for salt in ("t2", None, "t1")]
        assert tenants == [Answer(right[4], cached, "length") for cached in (0, 0, 128)]
    server.assert_at_rest()
    assert server.status().tiers[0].damaged_objects == 0


def written(server):
    tier = server.status().tiers[0]
    return tier.objects if not tier.queued_objects else 0
