from __future__ import annotations

import asyncio

import pytest

from kvwire.server.fetch.budget import Budget

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("tasks")]


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_bytes_are_handed_out_in_the_order_of_asking():
    budget, order = Budget(10), []

    async def one(name, size):
        order.append((name, await budget.take(size)))

    tasks = [asyncio.create_task(one(name, size)) for name, size in [("a", 6), ("b", 6), ("c", 1)]]
    await turns()
    # The small one does not overtake: the large one would wait for ever.
    assert order == [("a", 6)]
    budget.give(6)
    await asyncio.gather(*tasks)
    assert order == [("a", 6), ("b", 6), ("c", 1)]
    assert budget.used == 7


async def test_more_than_there_is_comes_alone():
    budget = Budget(10)
    assert await budget.take(3) == 3
    large = asyncio.create_task(budget.take(1000))
    await turns()
    assert not large.done()
    budget.give(3)
    assert await large == 10
    budget.give(10)
    assert budget.used == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_who_gives_up_waiting_takes_nothing_with_him(granted):
    budget = Budget(10)
    await budget.take(10)
    first, second = asyncio.create_task(budget.take(8)), asyncio.create_task(budget.take(5))
    await turns()
    if granted:
        budget.give(10)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    if not granted:
        budget.give(10)
    assert await second == 5
    assert budget.used == 5
