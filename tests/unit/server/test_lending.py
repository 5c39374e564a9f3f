"""Leases for other servers: what is leased, what is refused, and that memory comes back."""

from __future__ import annotations

import dataclasses

import pytest

from kvwire.errors import FleetMixed, Overloaded
from kvwire.keys import chunk_keys, root
from kvwire.server import lending
from kvwire.server.layout import layout_digest
from kvwire.server.lending import LoanRequest
from kvwire.server.messages import LeaseKind
from kvwire.server.state import EngineConfig
from support.domain import (
    CHUNK,
    FULL,
    NAMESPACE,
    OBJECT_BYTES,
    Domain,
    layout,
    recurrent_group,
    tokens,
    window_group,
    with_salt,
)


def request(domain, packed, have=(), namespace=NAMESPACE, **more):
    space_root = root(namespace, CHUNK)
    keys = chunk_keys(space_root, packed, CHUNK)
    masks = [*have, *[0] * (len(keys) - len(have))]
    made = LoanRequest(space_root, layout_digest(domain.layout, CHUNK), keys, masks, max_objects=1000)
    return dataclasses.replace(made, **more)


@pytest.fixture
def domain():
    made = Domain()
    made.store_prompt(made.register(), "s", tokens(6))
    return made


def lend(domain, asked, name="b"):
    borrower = domain.engine.lending.borrower(name, "ucx-local")
    return borrower, domain.engine.lending.lend(borrower, asked, domain.now)


def settle(domain):
    """The data path has confirmed everything."""
    for ended in domain.engine.drain_ended():
        domain.engine.confirm_cancelled(ended.lease_id)


def places(loan):
    return [(slot.chunk_index, slot.rank, slot.group_index) for slot in loan.slots]


def test_what_is_lacking_is_leased_and_held_until_it_is_released(domain):
    _, loan = lend(domain, request(domain, tokens(6), have=(1, 1)))
    assert loan.hit_chunks == 6
    assert places(loan) == [(index, 0, 0) for index in range(2, 6)]
    domain.engine.clear()
    assert domain.hit(tokens(6)) == 0
    assert domain.used == 4
    domain.check()
    assert domain.engine.lending.end("b", loan.lease_id, domain.now)
    assert domain.used == 4
    settle(domain)
    assert domain.engine.lending.given_bytes == 4 * OBJECT_BYTES
    domain.engine.clear()
    assert domain.used == 0
    domain.check()


def test_a_prompt_that_is_not_here_leases_nothing(domain):
    assert lend(domain, request(domain, tokens(4, seed=9)))[1] == lending.Loan(0)
    assert lend(domain, request(domain, tokens(6), namespace=with_salt("t")))[1] == lending.Loan(0)
    assert lend(domain, request(domain, tokens(6), have=(1,) * 6))[1] == lending.Loan(6)
    assert domain.engine.status().leases[LeaseKind.READ] == 0


def test_what_the_borrower_has_beyond_reaches_on(domain):
    """It has the tail: both together reach to its end."""
    asked = request(domain, tokens(8), have=(0,) * 6 + (1, 1))
    assert lend(domain, asked)[1].hit_chunks == 8


def test_windows_and_states_are_leased_for_the_boundary_only():
    domain = Domain(kv_layout=layout(1, FULL, window_group(5), recurrent_group()))
    domain.store_prompt(domain.register(), "s", tokens(4))
    _, loan = lend(domain, request(domain, tokens(4)))
    assert places(loan) == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 0, 1), (3, 0, 2)]
    domain.check()


def test_a_lease_ends_in_time_and_its_memory_waits_for_the_data_path():
    domain = Domain(config=EngineConfig(read_ttl=0.3))
    domain.store_prompt(domain.register(), "s", tokens(3))
    _, loan = lend(domain, request(domain, tokens(3)))
    domain.now += 0.3
    assert not domain.engine.lending.end("b", loan.lease_id, domain.now)
    assert domain.engine.lending.is_waiting(loan.lease_id)
    domain.engine.clear()
    assert domain.used == 3
    settle(domain)
    assert not domain.engine.lending.is_waiting(loan.lease_id)
    domain.engine.clear()
    assert domain.used == 0
    domain.check()


def test_only_the_borrower_ends_a_lease(domain):
    _, loan = lend(domain, request(domain, tokens(6)))
    assert not domain.engine.lending.end("c", loan.lease_id, domain.now)
    assert not domain.engine.lending.end("b", loan.lease_id + 1, domain.now)
    assert domain.engine.lending.end("b", loan.lease_id, domain.now)
    assert not domain.engine.lending.end("b", loan.lease_id, domain.now)


def test_a_damaged_object_makes_its_lease_one_that_was_not_held(domain):
    borrower, loan = lend(domain, request(domain, tokens(6)))
    domain.engine.discard(loan.slots[2].ref)
    assert domain.engine.lending.checksums(borrower, loan.lease_id, domain.now) is None
    assert not domain.engine.lending.end("b", loan.lease_id, domain.now)


def test_another_layout_is_refused(domain):
    with pytest.raises(FleetMixed, match="layout"):
        lend(domain, request(domain, tokens(6), layout_digest=bytes(32)))


def test_leases_of_peers_are_limited(domain, monkeypatch):
    monkeypatch.setattr(lending, "MAX_LOANS", 2)
    for _ in range(2):
        lend(domain, request(domain, tokens(6)))
    with pytest.raises(Overloaded):
        lend(domain, request(domain, tokens(6)))


@pytest.mark.parametrize("most", range(7))
def test_a_lease_has_at_most_so_many_objects(domain, most):
    _, loan = lend(domain, request(domain, tokens(6), max_objects=most))
    assert (loan.hit_chunks, len(loan.slots)) == (most, most)


def test_what_was_lent_is_used(domain):
    """It is the last to be evicted."""
    client = domain.register("other")
    domain.store_prompt(client, "t", tokens(4, seed=2))
    _, loan = lend(domain, request(domain, tokens(6)))
    domain.engine.lending.end("b", loan.lease_id, domain.now)
    settle(domain)
    domain.engine.evict_to(6 / 64)
    assert domain.hit(tokens(6)) == 6
    assert domain.hit(tokens(4, seed=2)) == 0


def test_a_shutdown_ends_the_leases_of_peers(domain):
    lend(domain, request(domain, tokens(6)))
    domain.engine.shutdown()
    settle(domain)
    assert domain.engine.status().leases[LeaseKind.READ] == 0
    domain.check()
