"""The first sentence of a report: what it names, and what it leaves out."""

from __future__ import annotations

import time
from typing import Any

import pytest
from events import event, save

from torch_ckpt.records import diagnosis
from torch_ckpt.records.calls import Call
from torch_ckpt.records.event import PHASES, Event


def first_sentence(events: list[Event]) -> str:
    """What the report on one call begins with."""
    return diagnosis.first_sentence(Call(events))


def with_details(events: list[Event], phase: str, ranks: range | None = None, **details: Any):
    """The events, with more details of one phase; a function computes them of the event."""
    for each in events:
        if each.phase == phase and (ranks is None or each.rank in ranks):
            each.details.update({k: v(each) if callable(v) else v for k, v in details.items()})
    return events


def waiting(share: float) -> Any:
    return lambda each: share * each.seconds


def test_a_rank_that_has_not_finished_is_named_before_all_else() -> None:
    events = [each for each in save(64) if (each.rank, each.phase) != (37, "write")]
    events += [
        event(37, "write", 0.32, 31, unfinished=True),
        event(0, "commit", 3, 28, unfinished=True),
        event(5, "write", 3, 28, error="the save was given up"),
    ]
    assert first_sentence(events) == (
        "rank 37 on host-4 has not finished writing for 31 s; the others took 2.2 s"
    )


def test_ranks_that_have_sent_nothing_are_named_without_a_machine() -> None:
    events = [each for each in save(4) if each.phase == "plan" and each.rank < 2]
    events += [event(rank, "plan", 1, 40, unfinished=True, host="") for rank in (2, 3)]
    assert first_sentence(events).startswith("rank 2 and 1 more rank have not finished planning")


def test_all_ranks_of_a_machine_that_have_not_finished_are_named_by_it() -> None:
    events = [e for e in save(16) if e.rank < 8 or e.phase != "write"]
    events += [event(rank, "write", 1, 40, unfinished=True) for rank in range(8, 16)]
    expected = "all 8 ranks of host-1 have not finished writing for 40 s; the others took 2.2 s"
    assert first_sentence(events) == expected
    everyone = [event(rank, "plan", 1, 40, unfinished=True) for rank in range(4)]
    assert first_sentence(everyone) == "all 4 ranks have not finished planning for 40 s"


def test_a_rank_that_others_wait_for_is_named_rather_than_those() -> None:
    events = [event(0, "begin", 0, 1), event(1, "begin", 0, 1), event(2, "begin", 0, 1)]
    events += [event(rank, "plan", 1, 30, unfinished=True) for rank in (0, 2)]
    expected = "rank 1 on host-0 has not begun planning; the others have waited for 30 s"
    assert first_sentence(events) == expected
    events.append(event(1, "stage", 1, 30, unfinished=True))
    expected = "rank 1 on host-0 has not finished copying to host memory for 30 s"
    assert first_sentence(events) == expected
    events[-1] = event(1, "message", 1, 30, unfinished=True, of="begin")
    assert first_sentence(events) == "a message of rank 1 on host-0 has not arrived for 30 s"


def test_the_first_error_is_named_with_its_rank_and_phase() -> None:
    events = save(4, write_2=9.0)
    events += [
        event(0, "write", 3, 2, error="rank 3 failed"),
        event(3, "write", 3, 1, error="no space left\n  (ENOSPC)" + "x" * 400),
    ]
    sentence = first_sentence(events)
    assert sentence.startswith("rank 3 on host-0 failed while writing: no space left (ENOSPC)xxx")
    assert len(sentence) < 400


def test_an_error_in_a_step_that_a_restore_passed_over_is_named_as_such() -> None:
    loaded, error = {"kind": "load", "step": 300}, "CorruptionError: step-400/a is damaged"
    passed_over = [
        *(
            event(rank, phase, 0.1, 0.1, **loaded)
            for phase in ("choose", "plan")
            for rank in (0, 1)
        ),
        event(0, "read", 0.2, 1.0, **loaded),
        event(1, "read", 0.2, 1.1, **loaded, error=error),
        *(event(rank, "choose", 1.3, 0.1, **loaded) for rank in (0, 1)),
    ]
    another = [
        event(rank, phase, 1.5, 1.0, **loaded) for phase in ("plan", "read") for rank in (0, 1)
    ]
    assert Call(passed_over).error == error  # There was no other step.
    assert first_sentence(passed_over) == f"rank 1 on host-0 failed while reading: {error}"
    sound = Call(passed_over + another)
    assert (sound.error, sound.result) == (None, "ok")
    assert first_sentence(sound.events) == (
        f"rank 1 on host-0 failed while reading, and another copy was loaded: {error}"
    )
    another[-1].details["error"] = "CorruptionError: step-300/a is damaged"
    failed = Call(passed_over + another)
    assert (failed.error, failed.result) == ("CorruptionError: step-300/a is damaged", "failed")
    assert first_sentence(failed.events).endswith("reading: CorruptionError: step-300/a is damaged")


def test_a_slow_rank_is_named_with_its_rate_and_what_it_waited_for() -> None:
    events = save(64, write_37=10.0)
    expected = "rank 37 on host-4 wrote at 0.2 GB/s, the others at 0.91"
    assert first_sentence(events) == expected
    for share, cause in (
        (0.95, "it waited for storage 95 % of that time"),
        (0.0, "it did not wait for storage"),
    ):
        with_details(events, "write", waited=waiting(share))
        assert first_sentence(events) == f"{expected}; {cause}"


def test_of_two_ranks_the_other_is_one() -> None:
    sentence = first_sentence(save(2, write_1=10.0))
    assert sentence == "rank 1 on host-0 wrote at 0.2 GB/s, the other at 1"


def test_a_machine_whose_ranks_are_all_slow_is_named() -> None:
    slow = {f"write_{rank}": 20.0 + rank for rank in range(8, 16)}
    events = with_details(save(16, **slow), "write", waited=waiting(0.9))
    assert first_sentence(events) == (
        "all 8 ranks of host-1 wrote at 64 MB/s, the others at 0.91 GB/s; "
        "they waited for storage 90 % of that time"
    )


def test_a_slow_machine_is_named_also_if_it_has_most_of_the_ranks() -> None:
    sentence = first_sentence(save(12, **{f"write_{rank}": 20.0 for rank in range(8)}))
    assert sentence == "all 8 ranks of host-0 wrote at 0.1 GB/s, the others at 0.87"


def test_several_slow_ranks_are_counted_and_the_slowest_is_named() -> None:
    sentence = first_sentence(save(16, write_3=11.0, write_9=12.0, write_12=10.0))
    assert sentence == "rank 9 on host-1 and 2 more ranks wrote at 0.18 GB/s, the others at 0.91"


def test_a_rank_that_writes_more_is_not_called_slow() -> None:
    events = with_details(save(4, write_2=10.0), "write", range(2, 3), bytes=10_000_000_000)
    assert first_sentence(events) == (
        "rank 2 on host-0 wrote 10 GB in 10 s, the others 2 GB in 2 s"
    )


def test_a_slow_phase_without_bytes_is_named_by_its_seconds() -> None:
    sentence = first_sentence(save(4, stage_1=3.0))
    assert sentence == "rank 1 on host-0 took 3 s for copying to host memory, the others 0.2 s"


def test_a_rank_that_waits_for_storage_where_it_works_for_all_is_not_called_slow() -> None:
    events = [event(0, "plan", 0, 2.5, waited=2.4), event(1, "plan", 0, 0.01)]
    events += [event(rank, "write", 2.5, 1) for rank in (0, 1)]
    expected = "rank 0 on host-0 waited for storage while planning, which took 2.5 s"
    assert first_sentence(events) == expected


def test_the_phase_that_cost_most_is_named() -> None:
    assert "copying" in first_sentence(save(4, stage_1=9.0, write_2=7.0))
    assert "wrote" in first_sentence(save(4, stage_1=7.0, write_2=12.0))


def test_messages_that_took_long_are_named() -> None:
    events = save(4)
    events += [event(rank, "message", 2, 0.001, of="plan") for rank in (2, 3)]
    sound = first_sentence(events)
    assert sound.startswith("nothing stands out")
    events += [event(1, "message", 3, 1.6, of="plan"), event(1, "message", 5, 1.6, of="write")]
    expected = "messages of rank 1 on host-0 took 3.2 s, those of the others 1.0 ms"
    assert first_sentence(events) == expected
    only = [*save(2), event(1, "message", 3, 3.2, of="plan")]
    assert first_sentence(only) == "messages of rank 1 on host-0 took 3.2 s"
    everyone = save(4) + [event(rank, "message", 2, 3.2) for rank in (1, 2, 3)]
    assert first_sentence(everyone).startswith("messages of rank 1 on host-0 and 2 more ranks took")


def test_a_message_that_a_slow_rank_has_delayed_is_not_named() -> None:
    events = [*save(4, write_0=9.0), event(1, "message", 2.5, 5.0, of="write")]
    assert first_sentence(events).startswith("rank 0 on host-0 wrote at")


def test_a_rank_that_begins_late_is_named_and_not_those_that_wait_for_it() -> None:
    for ranks in (2, 4):
        events = [event(rank, "begin", 0, 3.1) for rank in range(ranks - 1)]
        events.append(event(ranks - 1, "begin", 3.0, 0.1))
        events += [event(rank, "write", 3.1, 1, bytes=10**9) for rank in range(ranks)]
        others = "others" if ranks > 2 else "other"
        expected = f"rank {ranks - 1} on host-0 began 3 s after the {others}"
        assert first_sentence(events) == expected


def test_the_time_at_which_ranks_began_is_compared_in_a_phase_that_all_have() -> None:
    alone = [event(0, "begin", -5, 1)]
    events = [event(rank, "choose", 3.0 * (rank == 2), 5) for rank in range(4)]
    assert first_sentence(alone + events) == "rank 2 on host-0 began 3 s after the others"


def test_ranks_that_wait_in_a_common_phase_are_not_called_slow_in_it() -> None:
    events = [event(0, "stage", 0, 0.2), event(0, "plan", 0.2, 3.1)]
    events += [event(1, "stage", 0, 3.0), event(1, "plan", 3.2, 0.1)]
    assert first_sentence(events) == (
        "rank 1 on host-0 took 3 s for copying to host memory, the other 0.2 s"
    )


def test_a_slow_disk_of_all_ranks_is_named_with_its_rate() -> None:
    slow = {f"write_{rank}": 40.0 for rank in range(2)}
    events = with_details(save(2, **slow), "write", waited=waiting(0.97), mode="direct")
    assert first_sentence(events) == (
        "writing took 99 % of the save: all ranks waited for storage, which took 0.1 GB/s"
    )
    alone = with_details(save(1, write_0=40.0), "write", waited=waiting(0.97))
    assert "rank 0 on host-0 waited for storage, which took 50 MB/s" in first_sentence(alone)


def test_a_slow_store_is_named_with_how_often_its_requests_end() -> None:
    events = [
        event(
            rank, "read", 0, 20, kind="load", bytes=10**9, waited=19, requests=10, mode="store"
        )
        for rank in range(3)
    ]  # fmt: skip
    assert first_sentence(events) == (
        "reading took 100 % of the load: all ranks waited for storage, which gave 0.15 GB/s; "
        "a rank completed a request every 2 s"
    )


def read(rank: int, seconds: float, waited_for_ranks: float, **details: Any) -> Event:
    """A read of 1 GB that took so long, as part of an exchange."""
    details |= {"bytes": 10**9, "waited_for_ranks": waited_for_ranks}
    return event(rank, "read", 0, seconds, kind="load", **details)


def test_a_rank_that_reads_slowly_for_others_is_named_rather_than_those_that_wait() -> None:
    events = [read(0, 10, 0.1, waited=9.5), read(1, 10, 9), read(2, 10, 9.2)]
    assert first_sentence(events) == (
        "rank 0 on host-0 took 9.9 s for reading, the others 0.9 s and then waited for it; "
        "it waited for storage 95 % of that time"
    )
    events = [read(rank, 10, 0.1 if rank < 2 else 9) for rank in range(5)]
    assert first_sentence(events) == (
        "rank 0 on host-0 and 1 more rank took 9.9 s for reading, the others 1 s and then waited "
        "for them"
    )


def test_an_exchange_for_which_all_ranks_wait_is_named() -> None:
    assert first_sentence([read(rank, 10, 8 + 0.1 * rank) for rank in range(3)]) == (
        "reading took 100 % of the load: all ranks waited for bytes from other ranks"
    )
    uneven = [read(0, 6, 5.38), read(1, 6, 5.83)]  # The rest costs less than the exchange.
    assert first_sentence(uneven) == (
        "reading took 100 % of the load: all ranks waited for bytes from other ranks"
    )
    exchanged = [read(rank, 10, 1, waited=8) for rank in range(3)]
    assert first_sentence(exchanged) == (  # No rate: storage gave less than they received.
        "reading took 100 % of the load: all ranks waited for storage"
    )


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_a_sound_save_has_nothing_that_stands_out(ranks: int) -> None:
    sentence = first_sentence(save(ranks))
    assert sentence.startswith("nothing stands out: writing took the longest, 2")


def test_what_costs_little_is_left_out() -> None:
    events = save(4, write_3=2.25, stage_1=0.33, plan_2=0.23)  # Less than 5 %.
    events += [event(1, "message", 2, 0.1, of="plan")]
    assert first_sentence(events).startswith("nothing stands out")
    fast = [event(rank, "write", 0, 0.001 + 0.045 * (rank == 1)) for rank in range(4)]
    assert first_sentence(fast).startswith("nothing stands out")  # Less than 50 ms.


def test_copies_after_the_commit_are_no_part_of_the_save() -> None:
    events = [*save(2), event(0, "promote", 5, 500, bytes=10**9)]
    assert first_sentence(events).startswith("nothing stands out: writing took")
    elsewhere = event(1, "promote", 5, 5, host="host-7", bytes=10**9)
    assert first_sentence([*events, elsewhere]).startswith("nothing stands out: writing took")
    assert first_sentence(events[-1:]) == "the save has no phases that could be compared"
    failed = [*save(2), event(0, "promote", 5, 1, error="no route to host")]
    assert first_sentence(failed) == "rank 0 on host-0 failed while promoting: no route to host"


def test_4096_ranks_are_diagnosed_within_2_seconds() -> None:
    events = save(4096, write_37=10.0)
    began = time.process_time()
    assert first_sentence(events).startswith("rank 37 on host-4 wrote at 0.2 GB/s")
    assert time.process_time() - began < 2


def test_each_phase_has_a_verb() -> None:
    assert [phase for phase in PHASES if diagnosis.gerund(phase).startswith("phase")] == []
