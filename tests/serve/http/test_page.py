"""The page at /: its policy, what /v1/status says, and the page itself in headless Chromium with real models."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest
from browser import CHROMIUM, Browser, browser
from server_harness import running, scripted_server, serve_command

from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.serve import status
from meltcore.serve.http.page import _FILE
from meltcore.settings.fleet_file import parse_fleet
from meltcore.settings.fleet_spec import ServerSection

TABS = ("chat", "translate", "speak", "transcribe", "talk")
READY = "document.querySelector('#state').classList.contains('ready')"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.mark.slow
def test_page_runs_its_own_script_alone_and_status_needs_the_key() -> None:
    with scripted_server(api_key="secret") as server:
        answer = server.request("GET", "/")
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        [script] = re.findall(rb"<script>(.*?)</script>", answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
        assert policy["script-src"] == f"'sha256-{digest}'"
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert server.request("GET", "/v1/status").status == 401
        server.post("/v1/completions", {"model": "scripted", "prompt": "a", "max_tokens": 3}, {"x-api-key": "secret"})
        found = server.request("GET", "/v1/status", headers={"x-api-key": "secret"}).json
        [model] = found["models"]
        assert (model["name"], model["status"], model["finished"], model["output_tokens"]) == (
            "scripted",
            "ready",
            1,
            3,
        )
        assert (model["task"], model["in_flight"], found["translates"]) == ("generation", 0, False)
        assert isinstance(found["gpus"], list)


# threat: a web page: the server's own page runs its script alone, and shows what models write as text
def test_page_loads_nothing_else_and_writes_no_markup() -> None:
    page = _FILE.read_text()
    assert re.findall(r"https?://[^'\s]+", page) in (["http://www.w3.org/2000/svg"], [])
    for call in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "localStorage",
        "sessionStorage",
        "eval",
    ):
        assert call not in page
    assert not re.search(r"\son\w+=", page.partition("<script>")[0]), "the policy would forbid a handler in markup"


def test_every_control_has_a_label_and_tabs_have_panels() -> None:
    markup = _FILE.read_text().partition("<script>")[0]
    for audio in re.findall(r"<audio[^>]*>", markup):
        assert "aria-label=" in audio
    for control in re.findall(r"<(?:select|textarea|input)\b[^>]*>", markup):
        before = markup.partition(control)[0]
        assert before.rfind("<label") > before.rfind("</label>"), control
        assert " placeholder=" in control or not control.startswith("<textarea"), "an example says what a model expects"
    panels = re.findall(r'<section class="card" id="(\w+)" role="tabpanel" aria-labelledby="tab-(\w+)"', markup)
    assert '<a href="docs">' in markup, "the page leads to Swagger UI"
    assert [name for name, _ in panels] == [tab for _, tab in panels] == list(TABS)


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading:
        total, used, gpu = 2**30, 2**29, 40

    def refuse(handle: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, result in [
        ("nvmlInit", lambda: None),
        ("nvmlDeviceGetCount", lambda: 2),
        ("nvmlDeviceGetHandleByIndex", lambda index: index),
        ("nvmlDeviceGetName", lambda handle: f"GPU {handle}"),
        ("nvmlDeviceGetMemoryInfo", lambda handle: Reading),
        ("nvmlDeviceGetUtilizationRates", lambda handle: refuse(handle) if handle else Reading),
    ]:
        monkeypatch.setattr(pynvml, name, result)
    first, second = status.query_gpus()
    assert first == {"name": "GPU 0", "memory_bytes": 2**30, "memory_used_bytes": 2**29, "utilization": 0.4}
    assert (second["name"], second["utilization"]) == ("GPU 1", None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA GB10")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert [gpu["memory_bytes"] > gpu["memory_used_bytes"] > 0 for gpu in status.query_gpus()] == [True, True]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: refuse(0))
    assert status.query_gpus() == []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: refuse(0))
    assert status.query_gpus() == []


def test_a_driver_that_hangs_costs_one_thread_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def hang() -> list[dict[str, Any]]:
        calls.append(time.monotonic())
        time.sleep(0.3)
        return [{"name": "late"}]

    monkeypatch.setattr(status, "query_gpus", hang)
    monkeypatch.setattr(status, "_QUERY_LIMIT_S", 0.05)

    async def read() -> list[list[dict[str, Any]]]:
        reader = status.GpuLoadReader()
        early = [await reader.read() for _ in range(3)]
        await asyncio.sleep(0.3)
        return [*early, await reader.read()]

    assert asyncio.run(read()) == [[], [], [], [{"name": "late"}]]
    assert len(calls) == 1


def fits(tab: Browser) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth <= window.innerWidth"))


@needs_chromium
@pytest.mark.slow
def test_chat_is_streamed_escaped_and_stopped_in_a_browser(tmp_path: Path) -> None:
    # The model repeats what it is sent.
    text = "<img src=x onerror=document.title=1><script>document.title=2</script> "
    with scripted_server("--step-s", "0.01", api_key="secret") as server, browser(tmp_path) as tab:
        tab.open(f"{server.url}/")
        tab.wait("!document.querySelector('#key-field').hidden")
        assert tab.run("document.querySelector('#tabs').childElementCount") == 0
        tab.problems.clear()  # the browser reports the 401
        tab.run("key = 'secret'; poll()")
        tab.wait(READY)
        assert tab.run("document.querySelector('#tabs').textContent") == "Chat"
        tab.run(
            f"document.querySelector('#chat .text').value = {text!r}; document.querySelector('#chat .main').click()"
        )
        tab.wait(f"document.querySelectorAll('.message')[1]?.textContent.length > {2 * len(text)}")
        tab.wait("parseFloat(document.querySelector('#rate').textContent) > 0")
        tab.wait("document.querySelector('#running').textContent === '1'")
        for width in (1200, 400):
            tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            assert fits(tab)
            assert tab.run("document.querySelectorAll('.message img, .message script').length") == 0
        tab.run("document.querySelector('#chat .stop').click()")
        server.check_no_leak()
        assert tab.run("document.title") == "Meltcore"
        assert tab.problems == []


# The least contrast of visible texts with what is behind them, by WCAG's formula; the page has no gradients.
CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = color => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(color[i] / 255), 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.disabled || ["OPTION", "SCRIPT"].includes(node.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, node.textContent.slice(0, 40)];
  }
  return least;
})()
"""
UNNAMED = """
[...document.querySelectorAll('input, select, textarea, button, audio')]
  .filter(node => !node.labels?.length && !node.getAttribute('aria-label') && !node.textContent.trim())
  .map(node => node.outerHTML.slice(0, 80))
"""


def press(tab: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        tab.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def record(tab: Browser, section: str, seconds: float) -> None:
    """Record with the fake microphone, and wait for the answer."""
    tab.run(f"document.querySelector('#{section} .language').value = 'en'")
    tab.run(f"document.querySelector('#{section} .record').click()")
    tab.wait(f"document.querySelector('#{section} .record').textContent === 'Stop'")
    time.sleep(seconds)
    tab.run(f"document.querySelector('#{section} .record').click()")
    tab.wait(f"/ s$/.test(document.querySelector('#{section} .note').textContent)", 90.0)


@needs_chromium
@pytest.mark.slow
def test_all_tabs_work_with_a_fleet_in_a_browser(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
    for package in ("av", "python_multipart", "sentencepiece", "soxr"):
        pytest.importorskip(package, reason="the extra av has it")
    from meltcore.measure.problems.tones import render, tone_clip

    clip = tone_clip(random.Random("heldout"), "heldout", 4.0)
    soundfile.write(tmp_path / "clip.wav", render(clip, 48_000), 48_000)
    tiny = resources.files("meltcore.fleet") / "examples" / "tiny.yaml"
    server = ServerSection(port=0, api_server_count=1)
    config = PlacedFleet(msgspec.structs.replace(parse_fleet(tiny.read_text()), server=server))
    microphone = f"--use-file-for-fake-audio-capture={tmp_path / 'clip.wav'}%noloop"
    with (
        running(serve_command(config, engine=ENGINE_COMMAND), tmp_path / "stderr") as server,
        browser(tmp_path / "profile", microphone) as tab,
    ):
        server.wait_healthy(120)
        tab.open(f"{server.url}/")
        tab.wait(READY)
        tab_names = "[...document.querySelector('#tabs').children].map(tab => tab.textContent).join()"
        tab.wait(f"{tab_names} === 'Chat,Translate,Speak,Transcribe,Speech to speech'", 120.0)  # as models become ready
        assert "Kannada gets it as Gujarati" in tab.run("document.querySelector('#substitutes').textContent")

        tab.run("document.querySelector('#chat .text').value = 'What is 7 * 8?'")
        tab.run("document.querySelector('#chat .text').focus()")
        press(tab, "Enter")
        tab.wait("document.querySelectorAll('.message')[1]?.textContent.includes('56')")
        tab.wait("/tokens, first after/.test(document.querySelector('#chat .note').textContent)")

        tab.run("document.querySelector('#tabs').children[0].focus()")
        press(tab, "ArrowRight")
        assert not tab.run("document.querySelector('#translate').hidden")
        assert tab.run("document.activeElement.textContent") == "Translate"
        assert tab.run("document.querySelector('#translate .source').value") == "eng_Latn"
        assert tab.run("document.querySelector('#translate .target').value") == "guj_Gujr"
        tab.run("document.querySelector('#translate .text').value = 'the cat sees the dog'")
        tab.run("document.querySelector('#translate .main').click()")
        tab.wait(r"/\p{Script=Gujarati}/u.test(document.querySelector('#translate .result').textContent)")

        press(tab, "ArrowRight")
        tab.run("document.querySelector('#speak .text').value = 'go at seven'")
        tab.run("document.querySelector('#speak .main').click()")
        tab.wait("document.querySelector('#speak audio').duration > 0.5", 60.0)

        press(tab, "ArrowRight")
        record(tab, "transcribe", 5.0)
        heard = tab.run("document.querySelector('#transcribe .result').textContent")
        assert clip.text("en").split()[-1] in heard, (heard, clip.text("en"))

        press(tab, "End")
        question, answer = (f"document.querySelector('#talk .{name}')" for name in ("language", "target"))
        assert (tab.run(f"{question}.value"), tab.run(f"{answer}.value")) == ("en", "as"), "it speaks no English"
        for language in ("hi", "en"):
            tab.run(f"{question}.value = '{language}'; {question}.dispatchEvent(new Event('change'))")
            assert tab.run(f"{answer}.value") == "hi"
        record(tab, "talk", 5.0)
        assert clip.text("en").split()[-1] in tab.run("document.querySelector('#talk .question').textContent")
        tab.wait("document.querySelector('#talk audio').duration > 0.5")
        press(tab, "ArrowRight")
        assert tab.run("document.activeElement.textContent") == "Chat", "the last tab leads to the first"
        assert tab.run("document.querySelectorAll('#tabs [tabindex=\"0\"]').length") == 1

        done = "document.querySelector('#models').rows"
        tab.wait(f"[...{done}].every(row => parseInt(row.cells[2].textContent) >= 1)")
        assert tab.run(f"{done}[3].cells[0].innerText") == "voice\nsynthesis, ready"
        assert tab.run(UNNAMED) == []
        for width, dark in ((1200, False), (1200, True), (400, False), (400, True)):
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            tab.send("Emulation.setEmulatedMedia", features=[scheme])
            tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            for index in range(5):
                tab.run(f"document.querySelector('#tabs').children[{index}].click()")
                assert fits(tab), (width, index)
                ratio, text = tab.run(CONTRAST)
                assert ratio >= 4.5, (width, dark, text, ratio)
        assert tab.problems == []
        server.check_no_leak()
