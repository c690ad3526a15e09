"""The page of `torch-ckpt report --html`: what it embeds, and how a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import run_command
from events import event, save, write_record

import torch_ckpt
from torch_ckpt.records.calls import calls_of
from torch_ckpt.records.event import Event
from torch_ckpt.records.page import page

CHROMIUM = shutil.which("chromium")
BROWSER_S = 120

# Runs before and after the scripts of the page; what it found is in the DOM that is printed.
WATCH = """<script>
window.faults = [];
addEventListener("error", event => faults.push(String(event.message)));
addEventListener("unhandledrejection", event => faults.push(String(event.reason)));
console.error = console.warn = (...words) => faults.push(words.join(" "));
</script>"""
USE = """<script>
const found = {};
function colorsOf(canvas) {
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(all.buffer)).size;
}
function picture() { return at("timeline").toDataURL(); }
const box = () => at("timeline").getBoundingClientRect();
function send(type, x, y, more) {
  const kind = type === "wheel" ? WheelEvent : PointerEvent;
  const where = {clientX: box().left + x * box().width, clientY: box().top + y * box().height};
  at("timeline").dispatchEvent(new kind(type, {...where, pointerId: 1, cancelable: true, ...more}));
}
at("timeline").setPointerCapture = () => {};
found.colors = Object.fromEntries([...document.querySelectorAll("canvas")]
  .map(canvas => [canvas.id, colorsOf(canvas)]));
found.paper = getComputedStyle(document.body).backgroundColor;
found.overflow = document.documentElement.scrollWidth - innerWidth;
const seen = [picture()];
send("wheel", 0.2, 0.5, {deltaY: -600, ctrlKey: true});
seen.push(picture());
send("wheel", 0.2, 0.5, {deltaY: -3000, shiftKey: true});
seen.push(picture());
send("pointerdown", 0.6, 0.6);
send("pointermove", 0.3, 0.3);
send("pointerup", 0.3, 0.3);
seen.push(picture());
at("fit").onclick();
found.back = picture() === seen[0];
found.pictures = new Set(seen).size;
at("order").value = "last";
at("order").onchange();
found.first = label(rows[0]);
send("pointermove", 0.4, (TOP + 0.3) / box().height);
found.tip = at("tip").textContent;
at("copy-ranks").onclick();
for (const button of document.querySelectorAll("[data-copy]")) button.onclick();
found.sentence = at("sentence").textContent;
found.rows = at("phases").rows.length;
const begin = performance.now();
for (let n = 0; n < 5; n++) { drawTimeline(); colorsOf(at("timeline")); }
found.draw_ms = (performance.now() - begin) / 5;
const names = [], paint = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
  const end = x + this.measureText(words).width;
  if (x < LABELS && this.textAlign === "left") names.push([words, end]);
  paint.call(this, words, x, y);
};
drawTimeline();
found.names = names.map(([words]) => words);
found.over_the_axis = names.filter(([, end]) => end > LABELS).length;
found.legend = [...at("legend").children].map(entry =>
  [entry.textContent, Number(getComputedStyle(entry.firstChild).opacity)]);
found.faults = faults;
document.body.append(Object.assign(document.createElement("pre"),
  {id: "found", textContent: JSON.stringify(found)}));
</script>"""


def in_browser(text: str, folder: Path, *, dark: bool = False, width: int = 1280) -> dict[str, Any]:
    """Opens a page in Chromium, uses it, and returns what a script found there."""
    watched = text.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{USE}</body>")
    path = folder / "watched.html"
    path.write_text(watched)
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/browser"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--window-size={width},1400", "--virtual-time-budget=10000", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=BROWSER_S,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:] + done.stdout[-500:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


def embedded(text: str) -> dict[str, Any]:
    """The data of a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data: dict[str, Any] = json.loads(found)
    return data


def test_the_page_has_all_events_of_the_chosen_call_and_numbers_of_others(tmp_path: Path) -> None:
    load = [event(0, "read", 90, 2.5, kind="load", call="3", bytes=10**9, waited=2.25)]
    run = write_record(tmp_path / "run", [*save(16), *save(16, number=2, start=60), *load])
    status, _ = run_command("report", run, "--step", 400, "--html", tmp_path / "page.html")
    assert status == 0
    data = embedded((tmp_path / "page.html").read_text())
    assert (data["kind"], len(data["spans"]["r"]), len(data["trend"])) == ("save", 65, 3)
    assert [line["kind"] for line in data["trend"]] == ["save", "save", "load"]
    assert data["trend"][1]["interval_s"] == 60
    assert data["phases"] == ["begin", "stage", "plan", "write", "commit"]
    assert data["hosts"] == ["host-0", "host-1"]
    status, _ = run_command("report", run, "--html", tmp_path / "page.html")
    data = embedded((tmp_path / "page.html").read_text())
    assert (data["spans"]["d"], data["details"]) == ([25_000], {"0": {"waited": "2.25"}})


def test_no_text_of_a_record_ends_the_script_of_the_page() -> None:
    evil = "</script><script>alert(1)</script><!--"
    events = [event(0, "write", 0, 1, host=evil, error=evil), event(1, evil, 0, 1)]
    text = page(*[calls_of(events)[0]], calls_of(events))
    assert text.count("</script>") == page(calls_of(save())[0], []).count("</script>")
    assert evil in embedded(text)["hosts"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(calls_of(save())[0], [])
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(", text)


def test_the_page_of_4096_ranks_is_small() -> None:
    events = save(4096)
    for each in events:
        each.details.update(waited=1.234567, requests=40, mode="direct")
    calls = calls_of(events)
    assert len(page(calls[0], calls * 20)) < 3_000_000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("ranks", [1, 2, 64, 4096])
def test_a_browser_draws_the_page_without_errors(ranks: int, dark: bool, tmp_path: Path) -> None:
    slow = ranks * 3 // 4
    events = save(ranks, **{f"write_{slow}": 9.0})
    events.append(event(ranks - 1, "message", 2.5, 0.4, of="write"))
    events.append(event(0, "new-phase", 2.5, 0.4, error="<b>no</b>"))
    events.append(event(0, "promote", 12, 30, background=True))
    calls = calls_of([*events, *save(2, number=2, start=60, step=500), *save(2, number=3)[:-1]])
    found = in_browser(page(calls[0], calls), tmp_path, dark=dark)
    assert found["faults"] == []
    assert min(found["colors"].values()) > 3
    assert len(found["colors"]) == 6
    assert found["paper"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert found["overflow"] <= 0
    assert found["pictures"] >= (3 if ranks < 4 else 4)  # There are no fewer rows than three.
    assert found["back"]
    assert found["first"].startswith(f"{slow} ")
    assert found["tip"].startswith(f"rank {slow} on host-")
    assert found["sentence"].endswith(".")
    assert found["rows"] == len(calls[0].parts) + 1
    assert found["draw_ms"] < 1000


LONG = "training-worker-{:04d}.cluster-prod-eu.compute.internal.example.com"


def on_long_hosts(events: list[Event]) -> list[Event]:
    return [each._replace(host=LONG.format(each.rank // 8)) for each in events]


def test_the_page_names_the_run_the_version_and_machines_without_their_domain(
    tmp_path: Path,
) -> None:
    run = write_record(tmp_path / "gpt-17", on_long_hosts(save(16, write_11=9.0)))
    assert run_command("report", run, "--html", tmp_path / "page.html")[0] == 0
    text = (tmp_path / "page.html").read_text()
    assert "<title>Save of step 400, gpt-17</title>" in text
    data = embedded(text)
    assert (data["run"], data["version"]) == (str(run), torch_ckpt.__version__)
    assert data["short_hosts"] == ["training-worker-0000", "training-worker-0001"]
    assert data["hosts"] == [LONG.format(0), LONG.format(1)]
    assert data["sentence"].startswith("Rank 11 on training-worker-0001 wrote at ")


@pytest.mark.parametrize(
    ("hosts", "short"),
    [
        (["a.x.org", "b.x.org"], ["a", "b"]),
        (["a.eu.x.org", "b.us.x.org"], ["a.eu", "b.us"]),
        (["a.x.org"], ["a"]),
        (["a", "b"], ["a", "b"]),
        (["10.0.0.1", "10.1.0.1"], ["10.0.0.1", "10.1.0.1"]),
        (["x.org", "a.x.org"], ["x", "a.x"]),
        (["", "a.x"], ["", "a.x"]),
    ],
)
def test_machines_lose_the_domain_that_all_have(hosts: list[str], short: list[str]) -> None:
    events = [event(rank, "write", 0, 1, host=host) for rank, host in enumerate(hosts)]
    data = embedded(page(calls_of(events)[0], []))
    assert [data["hosts"], data["short_hosts"]] == [hosts, short]


def test_the_text_of_an_error_is_below_the_headline_and_whole() -> None:
    text = "cannot write /a/long/path: No space left on device (ENOSPC) " * 10
    call = calls_of([event(0, "plan", 0, 1), event(1, "plan", 0, 1, error=text)])[0]
    data = embedded(page(call, []))
    assert data["sentence"] == "Rank 1 on host-0 failed while planning."
    assert data["error"] == text.strip()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_names_of_machines_keep_their_number_and_end_before_the_axis(
    width: int, tmp_path: Path
) -> None:
    events = on_long_hosts(save(16))
    events.append(events[0]._replace(phase="persist", details={"background": True}))
    found = in_browser(page(calls_of(events)[0], calls_of(events)), tmp_path, width=width)
    assert found["faults"] == []
    assert found["over_the_axis"] == 0
    hosts = [name for name in found["names"] if "work" in name or "\N{HORIZONTAL ELLIPSIS}" in name]
    assert {host[-4:] for host in hosts} == {"0000", "0001"}
    assert found["legend"][-1] == ["paler: in the background, while training continues", 0.5]
    shown = {text.partition(":")[0]: opacity for text, opacity in found["legend"]}
    assert (shown["persist"], shown["write"]) == (0.5, 1)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium")
def test_odd_records_are_drawn_without_errors_also_on_a_narrow_screen(tmp_path: Path) -> None:
    evil = "</script><b>" + "long" * 40
    records = [
        [event(7, "commit", 0, 0)],
        [event(0, evil, 0, 1, host=evil, error=evil, unfinished=True, step=None)],
        [event(0, "read", 0, 1e6, kind="load", bytes=1e18), event(99_999, "read", -1e6, 1)],
    ]
    for events in records:
        found = in_browser(page(calls_of(events)[0], calls_of(events)), tmp_path, width=500)
        assert found["faults"] == []
        assert found["overflow"] <= 0
