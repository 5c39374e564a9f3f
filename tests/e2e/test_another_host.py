"""An engine on another host than its server: UCX over TCP, between namespaces."""

from __future__ import annotations

import pytest

from e2e.harness import FOUND, SHELF, engine, transfer_config
from kvwire.v1 import transfer_pb2
from support.hosts import two_hosts
from support.waiting import eventually


def retrieved(server):
    paths = server.status().counters.paths
    return {transfer_pb2.DataPath.Name(each.path): each.retrieved_bytes for each in paths}


@pytest.mark.timeout(240)
def test_an_engine_on_another_host_than_its_server(serve, baseline, process):
    """Over the network the same text; with the cable out of a load as well, and then it hits again."""
    pytest.importorskip("ucxx")
    prompts, others = SHELF[:4], SHELF[4:8]
    right, rest = ([list(tokens) for tokens in baseline("gemma3", *each)] for each in (prompts, others))
    with two_hosts() as (near, far, link):
        server = serve("--listen", "10.77.0.1:7470", "--insecure-bind", prefix=near.prefix)
        away = process("gemma3", transfer_config("10.77.0.1:7470"), prefix=far.prefix)
        with engine("gemma3", server, extra={"data_path": "inline"}) as first:  # on neither host
            first.run(*prompts, *others)
        away.start()
        assert away.run(*prompts) == {"tokens": right, "cached": FOUND}
        moved = retrieved(server)
        assert moved.pop("DATA_PATH_UCX_REMOTE")
        assert not any(moved.values())

        link.quality.rate = 1e6
        link.cut_after(40_000)
        assert away.run(*others)["tokens"] == rest
        assert link.is_cut
        link.quality.rate = 0.0
        link.mend()
        eventually(lambda: sum(away.run(*others)["cached"]), within=30)
        assert away.run(*prompts, *others)["tokens"] == right + rest
        away.close()
        server.assert_at_rest()
        server.close()
