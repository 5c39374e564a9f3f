from __future__ import annotations

from kvwire.server.idle import IdleWatch


def test_over_when_nobody_was_there_for_long_enough():
    watch = IdleWatch(10, 100)
    assert not watch.is_over(0, 109)
    assert watch.is_over(0, 110)


def test_a_client_starts_the_time_anew():
    watch = IdleWatch(10, 100)
    assert not watch.is_over(1, 500)
    assert not watch.is_over(0, 509)
    assert not watch.is_over(2, 515)
    assert watch.is_over(0, 525)
