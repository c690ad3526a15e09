"""One sentence about a save or load: what to examine first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from torch_ckpt.records.calls import AFTERWARDS, Call, Part, error_of
from torch_ckpt.records.figures import nbytes_text, pair_of_rates, percent, rate_text, seconds_text

__all__ = ["first_sentence", "gerund", "headline"]

MIN_S = 0.05
"""Smaller costs are ignored: the scheduler of a busy machine can delay a process by as much."""

MIN_SHARE = 0.05
"""Costs below this fraction of the call are ignored: fixing them would change little."""

MUCH_SLOWER = 2.0
"""Factor from which a rank is an outlier. Ranks that share a healthy disk can differ by less."""

MOSTLY = 0.5
"""Waiting is the main cause from this share of the call, or of a phase, on."""

HARDLY = 0.05
"""Waiting for storage up to this share of a phase does not count."""

MAX_ERROR = 300
"""Number of quoted characters of an error's text."""

_TOGETHER = ("begin", "choose", "plan")
"""Phases that end on all ranks together: the ranks that arrive early wait for the last one."""

_LATER = ("commit", "persist", AFTERWARDS, "message")
"""Phases whose start does not show when a rank began a call."""

_DOING = {
    "begin": "waiting to begin",
    "choose": "choosing the step",
    "stage": "copying to host memory",
    "plan": "planning",
    "write": "writing",
    "read": "reading",
    "apply": "changing tensors",
    "commit": "committing",
    "persist": "persisting",
    "promote": "promoting",
    "retain": "removing steps",
    "wait": "waiting for other ranks",
    "message": "sending messages",
}

_DID = {
    "stage": "copied",
    "write": "wrote",
    "read": "read",
    "persist": "wrote",
    "promote": "copied",
}


def first_sentence(call: Call) -> str:
    """Returns what to examine first in a call, as a sentence without its full stop.

    In this order, it names: a rank that has not finished; an error; the most expensive of four
    causes (slow messages between ranks, an exchange of reads for which all ranks waited, a rank or
    machine that was much slower than the others, a rank that began late); storage, if all ranks
    waited for it; otherwise the longest phase.
    """
    sentence, error = headline(call)
    if not error:
        return sentence
    return f"{sentence}: {error if len(error) <= MAX_ERROR else f'{error[:MAX_ERROR]}...'}"


def headline(call: Call) -> tuple[str, str]:
    """Returns the sentence of :func:`first_sentence` without the text of an error, and that text.

    The text is empty if the sentence is not about an error.
    """
    if unfinished := _unfinished(call):
        return unfinished, ""
    return _failed(call) or (_slowest(call) or _same_for_all(call), "")


def gerund(phase: str) -> str:
    """Returns what a rank does in a phase: "writing"."""
    return _DOING.get(phase, f'phase "{phase}"')


@dataclass(frozen=True)
class _Finding:
    cost: float  # Approximate seconds by which the call would have been shorter.
    text: str


# ---- Ranks ----


def _who(ranks: Sequence[int], call: Call) -> str:
    """Names ranks: a single one, all of a machine, or the first and the number of others."""
    host = call.hosts[ranks[0]]
    first = f"rank {ranks[0]} on {host}" if host else f"rank {ranks[0]}"  # "": no event yet.
    if len(ranks) == 1:
        return first
    if len(ranks) == len(call.hosts):
        return f"all {len(ranks)} ranks"
    if host and sorted(ranks) == [rank for rank, other in call.hosts.items() if other == host]:
        return f"all {len(ranks)} ranks of {host}"
    more = len(ranks) - 1
    return f"{first} and {more} more rank{'s' if more > 1 else ''}"


def _others(number: int) -> str:
    return "the others" if number > 1 else "the other"


def _threshold(call: Call) -> float:
    return max(MIN_S, MIN_SHARE * call.seconds)


# ---- Unfinished ranks, and errors ----


def _unfinished(call: Call) -> str | None:
    open_phases = [p for p in call.parts if any(part.unfinished for part in call.of(p))]
    if not open_phases:
        return None

    def suspicion(phase: str) -> int:  # Other ranks wait for working ranks, and for messages.
        return 2 if phase in _TOGETHER else 1 if phase == "message" else 0

    phase = min(open_phases, key=suspicion)  # The first: later ones depend on it.
    parts = call.parts[phase]
    late = [rank for rank, part in parts.items() if part.unfinished]
    late.sort(key=lambda rank: parts[rank].start)
    so_far = seconds_text(max(parts[rank].end - parts[rank].start for rank in late))
    absent = [rank for rank in call.hosts if rank not in parts]
    if phase in _TOGETHER and 0 < len(absent) < len(late):
        verb = "has" if len(absent) == 1 else "have"
        waited = f"{_others(len(late))} {'have' if len(late) > 1 else 'has'} waited for {so_far}"
        return f"{_who(absent, call)} {verb} not begun {gerund(phase)}; {waited}"
    if phase == "message":
        return f"a message of {_who(late, call)} has not arrived for {so_far}"
    verb = "has" if len(late) == 1 else "have"
    text = f"{_who(late, call)} {verb} not finished {gerund(phase)} for {so_far}"
    done = [part.seconds for part in parts.values() if not part.unfinished]
    if done:
        text += f"; {_others(len(done))} took {seconds_text(median(done))}"
    return text


def _failed(call: Call) -> tuple[str, str] | None:
    failed = call.failures or [event for event in call.events if error_of(event)]
    if not failed:
        return None
    first = min(failed, key=lambda event: event.end)  # The other ranks fail because of it.
    passed_over = not call.failures and first.phase != AFTERWARDS
    then = ", and another copy was loaded" if passed_over else ""
    text = f"{_who([first.rank], call)} failed while {gerund(first.phase)}{then}"
    return text, error_of(first) or ""


# ---- Ranks that are slower than others ----


def _slowest(call: Call) -> str | None:
    """Names the most expensive finding; prefers messages if costs are equal."""
    findings = [_exchanged(call), _late(call)]
    for phase in call.parts:
        if phase == "message":
            findings.insert(0, _messages(call))
        elif phase != AFTERWARDS:
            findings.append(_compared(call, phase, _phase_text))
    found = [finding for finding in findings if finding is not None]
    return max(found, key=lambda finding: finding.cost).text if found else None


def _exchanged(call: Call) -> _Finding | None:
    """Finds an exchange of reads in which all ranks mostly waited for bytes from each other."""
    parts = call.parts.get("read")
    if parts is None:
        return None
    fraction = call.fraction("read") or 0.0
    seconds = max(part.seconds for part in parts.values())
    waited = min(part.waited_for_ranks or 0.0 for part in parts.values())
    if fraction < MOSTLY or waited < max(MOSTLY * seconds, MIN_S):
        return None
    who = "all ranks" if len(parts) > 1 else _who(list(parts), call)
    text = f"{gerund('read')} took {percent(fraction)} of the {call.kind}"
    return _Finding(waited, f"{text}: {who} waited for bytes from other ranks")


def _late(call: Call) -> _Finding | None:
    """Finds the ranks that began late: their training step took longer, not the save."""
    early = [phase for phase in call.parts if phase not in _LATER]
    ranks = {rank for phase in early for rank in call.parts[phase]}
    first = next((p for p in early if len(call.parts[p]) == len(ranks)), None)
    if first is None:
        return None
    starts = {rank: part.start for rank, part in call.parts[first].items()}
    earliest = min(starts.values())
    late = {rank: start - earliest for rank, start in starts.items()}

    def text(slow: list[int], others: list[int]) -> str:
        after = median(late[rank] for rank in slow) - median(late[rank] for rank in others)
        return f"{_who(slow, call)} began {seconds_text(after)} after {_others(len(others))}"

    return _outliers(call, late, text)


def _messages(call: Call) -> _Finding | None:
    seconds = {rank: part.seconds for rank, part in call.parts["message"].items()}

    def text(slow: list[int], others: list[int]) -> str:
        took = seconds_text(max(seconds[rank] for rank in slow))
        text = f"messages of {_who(slow, call)} took {took}"
        if others:
            usual = median(seconds[rank] for rank in others)
            text += f", those of {_others(len(others))} {seconds_text(usual)}"
        return text

    found = _outliers(call, seconds, text)
    usual = median(seconds.values())
    if found is None and usual >= _threshold(call):  # Even if only one rank had them.
        return _Finding(usual, text(sorted(seconds, key=lambda rank: -seconds[rank]), []))
    return found


_Text = Callable[[list[int], list[int]], str]


def _outliers(call: Call, seconds: dict[int, float], text: _Text) -> _Finding | None:
    """Finds a machine, or else ranks, that took much longer than the others."""
    threshold = _threshold(call)

    def is_slow(value: float, usual: float) -> bool:
        return value >= MUCH_SLOWER * usual and value - usual >= threshold

    by_host: dict[str, list[int]] = {}
    for rank in seconds:
        by_host.setdefault(call.hosts[rank], []).append(rank)
    slowest = max(seconds, key=lambda rank: seconds[rank], default=-1)
    slow = by_host.get(call.hosts.get(slowest, ""), [])  # Only its machine can be the slowest.
    others = [rank for rank in seconds if rank not in set(slow)]
    if len(slow) > 1 and others:
        usual = median(seconds[rank] for rank in others)
        if is_slow(min(seconds[rank] for rank in slow), usual):
            return _Finding(seconds[slowest] - usual, text(slow, others))
    if len(seconds) < 2:
        return None
    usual = median(value for rank, value in seconds.items() if rank != slowest)
    slow = [rank for rank, value in seconds.items() if is_slow(value, usual)]
    slow.sort(key=lambda rank: -seconds[rank])
    others = [rank for rank in seconds if rank not in set(slow)]
    if not slow or len(slow) > len(others):
        return None
    return _Finding(seconds[slowest] - usual, text(slow, others))


def _compared(
    call: Call, phase: str, text: Callable[[Call, str, list[int], list[int]], str]
) -> _Finding | None:
    parts = call.parts[phase]
    seconds = {rank: part.own_seconds for rank, part in parts.items()}
    if phase in _TOGETHER:  # Without the wait for the last rank to begin.
        last = max(part.start for part in parts.values())
        seconds = {r: min(s, max(parts[r].end - last, 0.0)) for r, s in seconds.items()}
    return _outliers(call, seconds, lambda slow, others: text(call, phase, slow, others))


def _phase_text(call: Call, phase: str, slow: list[int], others: list[int]) -> str:
    parts = call.parts[phase]
    theirs, rest = [parts[rank] for rank in slow], [parts[rank] for rank in others]
    who, they = _who(slow, call), _others(len(others))
    took, usual = (seconds_text(median(p.own_seconds for p in some)) for some in (theirs, rest))
    rate, usual_rate = _median_rate(theirs), _median_rate(rest)
    if phase in _TOGETHER and (_fraction(theirs, "waited") or 0) >= MOSTLY:
        return f"{who} waited for storage while {gerund(phase)}, which took {took}"
    if _fraction(rest, "waited_for_ranks"):
        it = "it" if len(slow) == 1 else "them"
        text = f"{who} took {took} for {gerund(phase)}, {they} {usual} and then waited for {it}"
    elif phase not in _DID or rate is None or usual_rate is None:
        text = f"{who} took {took} for {gerund(phase)}, {they} {usual}"
    elif rate * MUCH_SLOWER <= usual_rate:
        one, other = pair_of_rates(rate, usual_rate)
        text = f"{who} {_DID[phase]} at {one}, {they} at {other}"
    else:
        moved, less = (median(part.nbytes or 0 for part in some) for some in (theirs, rest))
        text = (
            f"{who} {_DID[phase]} {nbytes_text(moved)} in {took}, "
            f"{they} {nbytes_text(less)} in {usual}"
        )
    return text + _waiting(theirs) + _requests(theirs)


def _median_rate(parts: list[Part]) -> float | None:
    rates = [part.rate for part in parts if part.rate is not None]
    return median(rates) if rates else None


def _fraction(parts: list[Part], waited: str) -> float | None:
    """Returns the fraction of the time in which ranks only waited, if known.

    ``waited`` is the attribute of a part: ``"waited"`` for storage, or ``"waited_for_ranks"``.
    """
    known = [part for part in parts if getattr(part, waited) is not None]
    seconds = sum(part.seconds for part in known)
    return min(sum(getattr(part, waited) for part in known) / seconds, 1.0) if seconds else None


def _waiting(parts: list[Part]) -> str:
    fraction = _fraction(parts, "waited")
    it = "it" if len(parts) == 1 else "they"
    if fraction is None:
        return ""
    if fraction <= HARDLY:
        return f"; {it} did not wait for storage"
    return f"; {it} waited for storage {percent(fraction)} of that time"


def _requests(parts: list[Part]) -> str:
    """States how often requests to a store ended."""
    requests = sum(part.requests or 0 for part in parts)
    if not requests or all(part.mode != "store" for part in parts):
        return ""
    each = sum(part.seconds for part in parts) / requests
    return f"; a rank completed a request every {seconds_text(each)}"


# ---- What all ranks have in common ----


def _same_for_all(call: Call) -> str:
    """Names storage if ranks mostly waited for it, or else the longest phase."""
    phases = [phase for phase in call.parts if phase not in (AFTERWARDS, "message")]
    if not phases:
        return f"the {call.kind} has no phases that could be compared"
    longest = max(phases, key=lambda phase: max(part.seconds for part in call.of(phase)))
    parts = call.of(longest)
    seconds = max(part.seconds for part in parts)
    fraction = call.fraction(longest) or 0.0
    part = f"{percent(fraction)} of the {call.kind}"
    # Bytes that ranks exchanged did not come from storage.
    is_exchanged = bool(_fraction(parts, "waited_for_ranks"))
    nbytes = 0 if is_exchanged else sum(each.nbytes or 0 for each in parts)
    rate = rate_text(nbytes / seconds) if nbytes and seconds else None
    waited = _fraction(parts, "waited")
    if fraction >= MOSTLY and waited is not None and waited >= MOSTLY and seconds >= MIN_S:
        who = "all ranks" if len(parts) > 1 else _who(list(call.parts[longest]), call)
        text = f"{gerund(longest)} took {part}: {who} waited for storage"
        if rate is not None:
            text += f", which {'gave' if longest == 'read' else 'took'} {rate}"
        return text + _requests(parts)
    text = f"nothing stands out: {gerund(longest)} took the longest, {seconds_text(seconds)}"
    return f"{text} ({part}{f', {rate}' if rate else ''})"
